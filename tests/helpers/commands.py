"""The commands of pages and examples: check one without running it, or run the programs of this clone.

Programs, files, flags and settings of a command must exist and compose.
"""

import argparse
import itertools
import os
import re
import runpy
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from muown_train.cli.commands.evaluate import parse_settings, split_words
from muown_train.cli.commands.reproduce import parse_request, remove_dashes
from muown_train.cli.main import COMMANDS, main
from muown_train.config.compose import load_config
from muown_train.experiments.grid import load_grid
from tests.helpers.paths import ROOT

OTHERS = {"ls", "eval", "printf", "source", "tail", "pytest", "lm_eval", "mkdocs"}  # programs whose words are not ours
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


_PROGRAMS = {
    "muown-train": 'exec {python} -P -c "from muown_train.cli.main import run; run()" "$@"',
    "python": 'exec {python} "$@"',
    "torchrun": 'exec {python} -m torch.distributed.run "$@"',
}


def put_programs_on_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `muown-train`, `python` and `torchrun` be this clone's and this Python's in processes that a test starts."""
    folder.mkdir()
    for name, line in _PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{line.format(python=sys.executable)}\n")
        (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    patch.setenv("PYTHONPATH", str(ROOT))


class Parsed(BaseException):
    """Stands for everything that a command does after it has read its words."""


def check_command(words: Sequence[str]) -> None:
    """Fail where a command names a file, flag or setting that does not exist."""
    program, *rest = words
    if program == "torchrun":
        check_command(["python", *itertools.dropwhile(lambda word: re.match("--", word), rest)])
    elif words[:3] == ["python", "-m", "muown_train"]:
        check_own(rest[2:])
    elif program == "muown-train":
        check_own(rest)
    elif program == "python":
        check_script(rest)
    elif program == "pip":
        named = re.findall(r"\[([\w,]+)\]", " ".join(word for word in rest if re.match(r"\.|muown-train", word)))
        assert {extra for names in named for extra in names.split(",")} <= EXTRAS.keys(), words
    elif program == "sbatch" or program.endswith(".sbatch"):
        assert any((ROOT / word).exists() for word in words if word.endswith(".sbatch")), words
        check_training([word for word in rest if "=" in word and not word.startswith("-")])
    else:
        assert program in OTHERS, words


def check_own(words: Sequence[str]) -> None:
    """Check the words of `muown-train`."""
    name = words[0] if words and words[0] in COMMANDS else "train"
    own = list(words[1:] if words and words[0] in COMMANDS else words)
    if name == "train":
        check_training(own)
    elif name == "reproduce":
        request = parse_request(remove_dashes(own))
        grid = load_grid(str(request.experiment), request.scale)
        grid.select(request.points, request.seeds, request.series).expand(request.overrides)
    elif "--help" not in own:
        parsed = parse_only(main, ["muown-train", *words])
        if name == "plan":
            load_config([word for word in parsed.settings if not word.startswith("network=")])
        elif name == "evaluate":
            load_config(parse_settings(split_words(parsed.words)[1])[1])


def check_training(words: Sequence[str]) -> None:
    """Check the settings of a run, or of jobs of a sweep that have every value."""
    if {"--config-dir", "-sc", "--help"} & set(words):  # options of the reader's own, or no settings
        return
    flags = [word for word in words if word.startswith("-")]
    assert set(flags) <= {"--multirun", "--cfg"}, words
    settings = [word for word in words if word not in (*flags, "job") and not word.startswith("hydra")]
    values = [
        [f"{word.partition('=')[0]}={value}" for value in re.split(r",(?![^\[{]*[\]}])", word.partition("=")[2])]
        for word in settings
    ]
    for i in range(max(map(len, values), default=1)):  # every value once, in as few jobs as do that
        load_config([of[min(i, len(of) - 1)] for of in values])


def check_script(words: Sequence[str]) -> None:
    """Check a script of the repository, its flags and the settings among them."""
    path = ROOT / words[0]
    assert path.exists(), words
    parsed = parse_only(lambda: load_script(path)(), list(words))
    common = getattr(parsed, "common", [])
    for settings in getattr(parsed, "configs", [getattr(parsed, "settings", getattr(parsed, "overrides", []))]):
        load_config([*common, *settings])


def load_script(path: Path) -> Callable[[], object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        return runpy.run_path(str(path))["main"]


def parse_only(call: Callable[[], object], argv: list[str]) -> argparse.Namespace:
    """Call what reads `argv`, and return what its parser makes of the words before anything else happens."""
    made, handler = argparse.Namespace(), signal.getsignal(signal.SIGINT)

    def stop(*_: object, **__: object) -> None:
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        for method in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, method, _keep(getattr(argparse.ArgumentParser, method), made))
        patch.setattr("muown_train.data.shards.prepare.prepare_shards", stop)
        patch.setattr("muown_train.data.shards.dataset.check_shards", stop)
        patch.setattr("muown_train.data.sources.train_tokenizer", stop)
        patch.setattr(sys, "argv", argv)
        try:
            with pytest.raises(Parsed):
                call()
        finally:
            signal.signal(signal.SIGINT, handler)  # commands set their own
    return made


def _keep(parse: Callable[..., argparse.Namespace], made: argparse.Namespace) -> Callable[..., None]:
    def keep(*arguments: object, **options: object) -> None:
        vars(made).update(vars(parse(*arguments, **options)))
        raise Parsed

    return keep
