"""Write docs/settings.md: every setting with its default and its meaning, as the files of configs/ give them.

    python docs/write_settings.py

The first comment of a file says what an option is, and the comment on a line, or on the lines before it, what a setting
means. tests/test_docs.py compares the page with what this makes.
"""

import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from muown_train.cli.help import list_option_sentences
from muown_train.config.compose import CONFIG_DIR, GROUPS

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# All settings

This page is made of the files in `configs/` by `docs/write_settings.py`. [Configuration](configuration.md)
explains how settings are given and what the most used ones do. `muown-train --cfg job` prints the settings of a command
with their values. `${…}` is the value of another setting.
"""
INTRODUCTIONS = {
    "model": "A model also brings the budget, the data and the sizes of its runs.",
    "experiment": "[Reproducing the paper](reproduce.md) explains them. A file also has settings for all its runs.",
}


def read_settings(path: Path, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the default and the meaning of each setting in a file, in its order.

    Args:
        prefix: the section that the file's keys belong to, with a dot at its end; of a global file none.
    """
    text = path.read_text()
    prefix = "" if "@package _global_" in text else prefix
    lines = dropwhile(lambda line: line.startswith("#"), text.splitlines())  # the first comment is the option's
    sections: list[tuple[int, str]] = []  # indentation and name of the mappings around a line
    comment = ""
    for line in lines:
        if line.lstrip().startswith("#"):
            comment = f"{comment} {line.lstrip('# ')}".strip()
            continue
        match = re.match(r"( *)([\w.]+): *(.*?)(?: +# *(.*))?$", line)
        meaning, comment = comment, ""
        if match is None:
            continue
        indent, name, value, inline = len(match[1]), match[2], match[3], match[4]
        sections = [(width, section) for width, section in sections if width < indent]
        path_of_key = [*(section for _, section in sections), name]
        if name in ("_target_", "_partial_") or path_of_key[0] in ("hydra", "experiment", "defaults"):
            if not value:
                sections.append((indent, name))
            continue
        if not value:
            sections.append((indent, name))
        else:
            yield prefix + ".".join(path_of_key), value, inline or meaning


def format_group(group: str) -> Iterator[str]:
    """Yield the lines that show a config group: its options, and the settings that they have."""
    options = list_option_sentences(CONFIG_DIR / group)
    yield f"\n## {group}=\n"
    if group in INTRODUCTIONS:
        yield f"{INTRODUCTIONS[group]}\n"
    yield f"| `{group}=` | |\n|---|---|"
    for option, sentence in options:
        yield f"| `{option}` | {escape(sentence)} |"
    if group == "experiment":
        return
    settings: dict[str, dict[str, list[str]]] = {}  # key -> default -> options
    meanings: dict[str, list[str]] = {}
    folder = CONFIG_DIR / group
    for path in [*(folder / f"{option}.yaml" for option, _ in options), *sorted(folder.glob("*/*.yaml"))]:
        option, prefix = path.stem, f"{group}."
        if path.parent != folder:  # optim/rest/adamw.yaml
            option, prefix = f"{path.parent.name}: {path.stem}", f"{group}.{path.parent.name}."
        for key, default, meaning in read_settings(path, prefix):
            settings.setdefault(key, {}).setdefault(default, []).append(option)
            if meaning and meaning not in meanings.setdefault(key, []):
                meanings[key].append(meaning)
    if settings:
        yield "\n| setting | default | meaning |\n|---|---|---|"
    for key, defaults in settings.items():
        is_common = len(defaults) == 1 and len(next(iter(defaults.values()))) == len(options)
        shown = "; ".join(
            f"`{escape(default)}`" + ("" if is_common else f" ({', '.join(of)})") for default, of in defaults.items()
        )
        yield f"| `{key}` | {shown} | {escape('; '.join(meanings.get(key, [])))} |"


def escape(text: str) -> str:
    """Return text that can stand in a cell of a table."""
    return text.replace("|", "\\|").replace("<|", "&lt;|")


def format_page() -> str:
    """Return the whole page."""
    lines = [HEAD, "## The run\n", "| setting | default | meaning |\n|---|---|---|"]
    for key, default, meaning in read_settings(CONFIG_DIR / "train.yaml", ""):
        lines.append(f"| `{key}` | `{escape(default)}` | {escape(meaning)} |")
    for group in GROUPS:
        lines += format_group(group)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(format_page())
