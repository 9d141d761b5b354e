"""`muown-train --help`: one screen, made of the configuration files themselves.

The first comment of a file says what the option is, and the comment on a line what the setting means. Nothing that is
slow is imported.
"""

import importlib.metadata
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from muown_train import __version__
from muown_train.cli.main import COMMANDS
from muown_train.config.compose import GROUPS, read_first_sentence

SETTINGS = (  # the most used
    *("tokens", "optim.lr", "seq_len", "batch_tokens", "micro_batch"),
    *("device", "precision", "compile", "seed", "name", "out"),
)
EXAMPLES = (
    ("optim=muon optim.lr=0.01", "another optimizer, another learning rate"),
    ("data=files data.train='texts/**/*.txt'", "your own text"),
    ("model=500m", "a model of the paper with its data, budget and batch"),
    ("schedule=decay_from checkpoint=runs/NAME tokens=2e5", "the decay of a run that was stable until then"),
    ("--multirun seed=0,1,2 optim=muown,muon", "all combinations, one after the other"),
)
_WIDTH = 110  # columns, at most


def format_help(configs: Path) -> str:
    """Return what can be typed, on one screen.

    Args:
        configs: the folder of train.yaml.
    """
    return "\n".join(_yield_lines(configs))


def format_version() -> str:
    """Return the version of the program, of Python and of the two libraries that matter most."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "hydra-core"))
    return f"muown_train {__version__} (Python {platform.python_version()}, {versions})"


def _yield_lines(configs: Path) -> Iterator[str]:
    train = (configs / "train.yaml").read_text()
    width = min(_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _WIDTH
    yield "muown-train key=value …       trains a language model, or goes on where the same command stopped"
    yield "muown-train COMMAND --help    explains another command; `python -m muown_train` is the same program:"
    for name, (_, sentence) in COMMANDS.items():
        yield f"  {name:<13} {sentence}"
    yield "Settings are words key=value; everything else, such as a run's folder, is a plain word or a --flag.\n"
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", train, re.MULTILINE))
    for group in GROUPS[:-1]:
        for i, (option, sentence) in enumerate(list_option_sentences(configs / group)):
            mark = "*" if option == chosen.get(group) else " "
            yield _cut_line(f"{f'{group}=' if i == 0 else '':<10}{mark}{option:<17} {sentence}", width)
    experiments = ", ".join(option for option, _ in list_option_sentences(configs / GROUPS[-1]))
    yield from textwrap.wrap(experiments, width, initial_indent=f"{GROUPS[-1]}= ", subsequent_indent=" " * 12)
    yield "\nThe most used settings (* above and values here are the defaults):"
    for key in SETTINGS:
        value, meaning = read_setting(configs, chosen, key)
        yield _cut_line(f"  {f'{key}={value}':<24} {meaning}", width)
    yield "\nExamples:"
    for words, meaning in EXAMPLES:
        yield f"  {words:<52} {meaning}"
    yield "\nSettings with their values: --cfg job; what they mean: docs/settings.md, and the comments in the files in"
    yield f"{configs}. Other flags: --version, --hydra-help."


def list_option_sentences(folder: Path) -> list[tuple[str, str]]:
    """Return the options of a config group, each with the first sentence of its file's first comment."""
    files = sorted(folder.glob("*.yaml"), key=_sort_by_size)
    return [(path.stem, read_first_sentence(path.read_text()).rstrip(".")) for path in files]


def read_setting(configs: Path, chosen: dict[str, str], key: str) -> tuple[str, str]:
    """Return a setting's default value (`…` where it is null) and its meaning.

    Args:
        chosen: the default option of each group.
        key: a key of train.yaml, or GROUP.KEY.
    """
    group, _, name = key.rpartition(".")
    file = configs / group / f"{chosen[group]}.yaml" if group else configs / "train.yaml"
    match = re.search(rf"^{name}: *(.*?) *# *(.*)$", file.read_text(), re.MULTILINE)
    assert match, f"{file} must have a comment on {name}"
    value, meaning = match.groups()
    return "…" if value == "null" else value, meaning


def _sort_by_size(path: Path) -> tuple[float, str]:
    """Sort names that are numbers of parameters by number, such as 2_7b after 500m, and after all other names."""
    number = re.fullmatch(r"(\d+(?:_\d+)?)([mb])", path.stem)
    size = float(number[1].replace("_", ".")) * {"m": 1, "b": 1000}[number[2]] if number else 0.0
    return size, path.stem


def _cut_line(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"
