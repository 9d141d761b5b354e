"""Weights of a checkpoint, found and read without making anything else of the run."""

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from muown_train.runs import checkpoint_files as files

_MODEL = "model/"  # what the keys of weights in a checkpoint begin with
_OPTIMIZER = "optimizer/"
_TRIES = 5  # to open the newest checkpoint of a run that goes on removing them


class Removed(ValueError):
    """A checkpoint that was there and is not any more: the run keeps but its newest."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"{checkpoint}: the run has removed step {files.step_of(checkpoint):,} meanwhile")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A whole checkpoint. Its tensors can be read as long as this exists, whatever the run removes meanwhile."""

    folder: Path
    step: int
    config: dict[str, Any]  # of the run, resolved
    data: dict[str, Any]  # facts about the run's data
    weights_alone: bool  # no state of a run, which could go on from it
    tensors: dict[str, Callable[[], Tensor]]  # what reads each, by its key

    @cached_property
    def readers(self) -> dict[str, Callable[[], Tensor]]:
        """What reads each weight, by canonical name."""
        return {key.removeprefix(_MODEL): read for key, read in self.tensors.items() if key.startswith(_MODEL)}

    def weights(self) -> dict[str, Tensor]:
        """All weights by canonical name, on the CPU, as they were saved."""
        return {name: read() for name, read in self.readers.items()}

    def optimizer_state(self, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """Of each parameter, by canonical name, the tensors of optimizer state that are called so, on the CPU.

        Parameters without any of them have an empty dictionary; there is none where the checkpoint holds weights alone.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for key, read in self.tensors.items():
            if key.startswith(_OPTIMIZER):
                parameter, _, name = key.removeprefix(_OPTIMIZER).rpartition("/")
                found.setdefault(parameter, {}).update({name: read()} if name in names else {})
        return found


def to_stderr(sentence: str) -> None:
    """What is said of a checkpoint that is passed over."""
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def open_checkpoint(path: Path, step: int | None = None, warn: Callable[[str], None] = to_stderr) -> OpenCheckpoint:
    """Find a whole checkpoint and open its tensors.

    Args:
        path: a run's folder, or that of one checkpoint.
        step: after which update; by default of the newest checkpoint that is whole.
        warn: called with a sentence for each damaged one that is passed over.

    Raises:
        ValueError: there is none, the one asked for is damaged, or does not say what it is of; Removed: it was removed
            while it was being read, and of a run without `step` the newest again and again.
    """
    one = step is not None or _is_checkpoint(path)
    tries = 1 if one else _TRIES
    while True:
        tries -= 1
        try:
            return _opened(_whole(path, step, warn))
        except Removed:
            if not tries:
                raise


def _is_checkpoint(path: Path) -> bool:
    return (path / files.INDEX).exists() and path in files.newest_first(path.parent)


def _whole(path: Path, step: int | None, warn: Callable[[str], None]) -> Path:
    """The folder of the checkpoint that `open_checkpoint` is to open."""
    if _is_checkpoint(path):
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
    faults: list[str] = []
    for checkpoint in found:
        try:
            fault = files.fault(checkpoint)
        except files.OtherFormat as error:
            raise ValueError(str(error)) from None
        if fault is None:
            for passed_over in faults:
                warn(f"{passed_over}; {checkpoint.name} is read instead")
            return checkpoint
        if not checkpoint.exists():
            raise Removed(checkpoint)
        faults.append(f"{checkpoint} is damaged: {fault}")
    raise ValueError("; ".join(faults) or f"{path} has no checkpoint: it is no run's folder, or has not saved yet")


def _opened(checkpoint: Path) -> OpenCheckpoint:
    index = files.read_index(checkpoint)
    if index is None:
        raise Removed(checkpoint)  # it was whole just now
    if index.get("step") != files.step_of(checkpoint):
        raise ValueError(f"{checkpoint / files.INDEX} has step={index.get('step')!r}, which is not that of the folder")
    about = index.get("about")
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise ValueError(f"{checkpoint} does not say what it is a checkpoint of: it was written by an earlier version")
    model, data = about["config"].get("model"), about.get("data", {})
    if not isinstance(model, dict) or not isinstance(model.get("_target_"), str):
        raise ValueError(f"{checkpoint} has the configuration model={model!r}: it must be a mapping with a _target_")
    if not isinstance(data, dict):
        raise ValueError(f"{checkpoint} has data={data!r}: it must be a mapping")
    tensors: dict[str, Callable[[], Tensor]] = {}
    for name in sorted(index["files"]):
        if name.endswith(".safetensors"):
            try:
                file = safe_open(checkpoint / name, "pt")
            except FileNotFoundError:
                raise Removed(checkpoint) from None
            except SafetensorError as error:
                raise ValueError(f"{checkpoint / name} cannot be read: {error}") from None
            for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118, it is no mapping
                tensors[key] = partial(file.get_tensor, key)
    return OpenCheckpoint(checkpoint, index["step"], about["config"], data, files.weights_alone(index), tensors)


def check_finite(name: str, weight: Tensor) -> Tensor:
    """The weight itself.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    if not weight.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite: the model has diverged, or was damaged")
    return weight


def read_rest(checkpoint: Path) -> dict[str, Any]:
    """What a whole checkpoint holds besides tensors, flat, such as `data/rows`."""
    rest: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("rank-*.json")):
        rest |= json.loads(path.read_text())
    return rest
