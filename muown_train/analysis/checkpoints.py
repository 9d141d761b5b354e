"""Checkpoints as subjects of the same measurements as runs, and where their results are kept."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from muown_train.analysis.context import Magnitudes, Subject
from muown_train.analysis.scoring import own_validation
from muown_train.data.rows import RowSource
from muown_train.runs import checkpoint_files as files
from muown_train.runs.checkpoint import unflatten
from muown_train.runs.checkpoint_reader import OpenCheckpoint, list_steps
from muown_train.runs.metrics import encoded, read_metrics
from muown_train.runs.saved_run import SavedRun, open_run
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.distributed import World

FOLDER = "analysis"  # in a run's folder, where training looks at nothing


def subject_of(saved: SavedRun, world: World) -> Subject:
    """A checkpoint, with data as the run would go on with.

    Data are rebuilt when they are first asked for, and so are the errors if that is impossible.
    """
    model, top = saved.load_model(world.device), saved.config

    @cache
    def rows() -> RowSource:
        return own_validation(saved, model.vocab_size).train

    def place() -> dict[str, Any]:
        state: dict[str, Any] = {"rows": 0, **unflatten(saved.opened.rest).get("data", {})}
        return state

    return Subject(
        model,
        world,
        lambda: magnitudes_in(saved.opened),
        rows,
        place,
        top.seq_len,
        top.batch_tokens,
        top.micro_batch,
        hardware.wants_autocast(top.precision, world.device),
    )


def magnitudes_in(checkpoint: OpenCheckpoint) -> dict[str, Magnitudes]:
    """What Muown had of each parameter; nothing where the checkpoint holds weights alone: see `check_optimizer`."""
    state = checkpoint.load_optimizer_state(("magnitude", "row_norm"))
    return {name: Magnitudes(own["magnitude"], own["row_norm"]) for name, own in state.items() if "magnitude" in own}


def check_optimizer(checkpoint: OpenCheckpoint) -> None:
    """For what depends on the optimizer.

    Raises:
        ValueError: the checkpoint holds weights alone.
    """
    if not checkpoint.load_optimizer_state(()):
        raise ValueError(
            f"{checkpoint.folder} holds weights alone, and nothing of the optimizer whose gradients are asked for"
        )


def chosen(run: Path, steps: Sequence[int] | None, every: bool) -> list[SavedRun]:
    """Checkpoints of a run in the order of their steps: those of `steps`, all if `every`, or the newest.

    Args:
        run: its folder, or that of one checkpoint.

    Raises:
        ValueError: one is not there or damaged.
    """
    if steps is None and every:
        steps = list_steps(run)
    return [open_run(run)] if not steps else [open_run(run, step) for step in sorted(set(steps))]


class Results:
    """A file of results, one line of JSON for each checkpoint and the settings it was measured with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """What is there, by step and then by time; with numbers that are none as NaN and infinities."""
        return read_metrics(self.path) if self.path.exists() else []

    def find(self, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """The line that has all of that: a `step`, the `checkpoint`'s identity and settings."""
        return next((line for line in self.lines() if {**line, **about} == line), None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line, in place of those of another checkpoint of its step."""
        kept = [
            old for old in self.lines() if old["step"] != line["step"] or old.get("checkpoint") == line["checkpoint"]
        ]
        write_atomic(self.path, b"".join(map(encoded, sorted([*kept, line], key=lambda each: each["step"]))))


def identity(saved: SavedRun) -> str:
    """16 hexadecimal digits, others for other content of a checkpoint."""
    index = json.loads((saved.checkpoint / files.INDEX).read_text())
    return hashlib.sha256(json.dumps([saved.step, index["files"]], sort_keys=True).encode()).hexdigest()[:16]
