"""Weights of a checkpoint, found and read without making anything else of the run."""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from muown_train import checkpoint_files as files

_MODEL = "model/"  # what the keys of weights in a checkpoint begin with
_OPTIMIZER = "optimizer/"


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The folder of a whole checkpoint.

    Args:
        path: a run's folder, or that of one checkpoint.
        step: after which update; by default of the newest checkpoint that is whole.

    Raises:
        ValueError: there is none, or the one asked for is damaged.
    """
    if (path / files.INDEX).exists() and files.newest_first(path.parent):
        found = [path]
    elif not path.is_dir():
        raise ValueError(f"there is no folder {path}: give that of a run, such as runs/NAME")
    else:
        found = files.newest_first(path / "checkpoints")
    if step is not None:
        steps = [files.step_of(checkpoint) for checkpoint in found]
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{path} has no checkpoint of step {step}; there are {there}")
        found = [found[steps.index(step)]]
    faults = []
    for checkpoint in found:
        try:
            fault = files.fault(checkpoint)
        except files.OtherFormat as error:
            raise ValueError(str(error)) from None
        if fault is None:
            return checkpoint
        faults.append(f"{checkpoint} is damaged: {fault}")
    raise ValueError("; ".join(faults) or f"{path} has no checkpoint: it is no run's folder, or has not saved yet")


def read_about(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """Step of a whole checkpoint, and what it says it is of: `config`, resolved, and `data`, facts.

    Raises:
        ValueError: it does not say so.
    """
    index = files.read_index(checkpoint) or {}
    about = index.get("about")
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise ValueError(f"{checkpoint} does not say what it is a checkpoint of: it was written by an earlier version")
    return index["step"], about


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a whole checkpoint by canonical name; nothing else of it is read."""
    with ExitStack() as files_open:
        return {name: read() for name, read in weight_readers(checkpoint, files_open).items()}


def weight_readers(checkpoint: Path, files_open: ExitStack) -> dict[str, Callable[[], Tensor]]:
    """What reads each weight of a whole checkpoint, by canonical name, until `files_open` is closed."""
    readers: dict[str, Callable[[], Tensor]] = {}
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        file = files_open.enter_context(safe_open(path, "pt"))
        for key in file.keys():  # noqa: SIM118, it is no mapping
            if key.startswith(_MODEL):
                readers[key.removeprefix(_MODEL)] = partial(file.get_tensor, key)
    return readers


def read_optimizer_state(checkpoint: Path, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Of each parameter, by canonical name, the tensors of optimizer state that are called so, on the CPU.

    Parameters without any of them have an empty dictionary; there is none where a checkpoint holds weights alone.
    """
    wanted, found = set(names), dict[str, dict[str, Tensor]]()
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no mapping
                if key.startswith(_OPTIMIZER):
                    parameter, _, name = key.removeprefix(_OPTIMIZER).rpartition("/")
                    of_parameter = found.setdefault(parameter, {})
                    if name in wanted:
                        of_parameter[name] = file.get_tensor(key)
    return found


def read_rest(checkpoint: Path) -> dict[str, Any]:
    """What a whole checkpoint holds besides tensors, flat, such as `data/rows`."""
    rest: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("rank-*.json")):
        rest |= json.loads(path.read_text())
    return rest
