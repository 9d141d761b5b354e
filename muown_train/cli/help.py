"""`python -m muown_train --help`: one screen, made of the configuration files themselves.

What an option is says the first comment of its file, what a setting means the comment on its line. Nothing is imported
that takes time.
"""

import importlib.metadata
import platform
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

GROUPS = ("model", "optim", "data", "schedule", "tracking", "probes", "experiment")
SETTINGS = (  # the most used
    *("tokens", "optim.lr", "seq_len", "batch_tokens", "micro_batch"),
    *("precision", "compile", "seed", "name", "out"),
)
EXAMPLES = (
    ("optim=muon optim.lr=0.01", "another optimizer, another learning rate"),
    ("data=files data.train='texts/**/*.txt'", "your own text"),
    ("model=500m", "a model of the paper with its data, budget and batch"),
    ("schedule=decay_from checkpoint=runs/NAME tokens=2e5", "the decay of a run that was stable until then"),
    ("--multirun seed=0,1,2 optim=muown,muon", "all combinations, one after the other"),
)
_WIDTH = 110


def help_text(configs: Path) -> str:
    """What to type, on one screen.

    Args:
        configs: the folder of train.yaml.
    """
    return "\n".join(_lines(configs))


def version_text() -> str:
    """The program's version, and those that matter with it."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "hydra-core"))
    return f"muown_train {importlib.metadata.version('muown-train')} (Python {platform.python_version()}, {versions})"


def _lines(configs: Path) -> Iterator[str]:
    train = (configs / "train.yaml").read_text()
    yield "python -m muown_train key=value …    trains a language model, or goes on where the same command stopped"
    yield "(installed also as: muown-train key=value …)"
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", train, re.MULTILINE))
    for group in GROUPS[:-1]:
        for i, (option, sentence) in enumerate(options(configs / group)):
            mark = "*" if option == chosen.get(group) else " "
            yield _cut(f"{f'{group}=' if i == 0 else '':<10}{mark}{option:<17} {sentence}")
    experiments = ", ".join(option for option, _ in options(configs / GROUPS[-1]))
    yield from textwrap.wrap(experiments, _WIDTH, initial_indent=f"{GROUPS[-1]}= ", subsequent_indent=" " * 12)
    yield "\nThe most used settings (* above and values here are the defaults):"
    for key in SETTINGS:
        value, meaning = setting(configs, chosen, key)
        yield _cut(f"  {f'{key}={value}':<24} {meaning}")
    yield "\nExamples:"
    for words, meaning in EXAMPLES:
        yield f"  {words:<52} {meaning}"
    yield "\nAll settings with their values: --cfg job; what they mean: README.md, and the comments in the files in"
    yield f"{configs}. Other flags: --version, --hydra-help."


def options(folder: Path) -> list[tuple[str, str]]:
    """The options of a config group and the first sentence of the first comment of each."""
    return [
        (path.stem, first_sentence(path.read_text()).rstrip(".")) for path in sorted(folder.glob("*.yaml"), key=_size)
    ]


def first_sentence(text: str) -> str:
    """Of the comment that a configuration file begins with; empty where there is none."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    comment = lines[0].removeprefix("# ") if lines and lines[0].startswith("#") else ""
    return re.split(r"(?<=\.)\s", comment)[0]


def setting(configs: Path, chosen: dict[str, str], key: str) -> tuple[str, str]:
    """Default value, `…` where it is null, and meaning of a setting.

    Args:
        chosen: the default option of each group.
        key: of train.yaml, or of a group after a dot.
    """
    group, _, name = key.rpartition(".")
    file = configs / group / f"{chosen[group]}.yaml" if group else configs / "train.yaml"
    found = re.search(rf"^{name}: *(.*?) *# *(.*)$", file.read_text(), re.MULTILINE)
    assert found, f"{file} must have a comment on {name}"
    value, meaning = found.groups()
    return "…" if value == "null" else value, meaning


def _size(path: Path) -> tuple[float, str]:
    """2_7b after 500m: names that are numbers of parameters in order of them, after the others."""
    number = re.fullmatch(r"(\d+(?:_\d+)?)([mb])", path.stem)
    size = float(number[1].replace("_", ".")) * {"m": 1, "b": 1000}[number[2]] if number else 0.0
    return size, path.stem


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1].rstrip() + "…"
