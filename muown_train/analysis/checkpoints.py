"""Measure a saved checkpoint with the probes of a run, and keep the results."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from muown_train.analysis.context import Magnitudes, ProbeContext
from muown_train.analysis.scoring import rebuild_data
from muown_train.data.sources import TrainingData
from muown_train.runs import checkpoint_files as files
from muown_train.runs.checkpoint_reader import OpenCheckpoint, list_steps
from muown_train.runs.metrics import encode_line, read_metrics
from muown_train.runs.saved_run import SavedRun, open_run
from muown_train.runs.state import unflatten
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.distributed import World

FOLDER = "analysis"  # a folder in the run's folder, which training never reads


def make_context(saved: SavedRun, world: World) -> ProbeContext:
    """Return the context of a checkpoint, with the data that the run would train on next.

    The data are rebuilt when they are first asked for; if that is impossible, the error comes then.
    """
    model, config = saved.load_model(world.device), saved.config

    @cache
    def get_data() -> TrainingData:
        return rebuild_data(saved, model.vocab_size)

    def get_loader_state() -> dict[str, Any]:
        state: dict[str, Any] = {"rows": 0, **unflatten(saved.opened.rest).get("data", {})}
        return state

    return ProbeContext(
        model,
        world,
        lambda: read_magnitudes(saved.opened),
        lambda: get_data().train,
        get_loader_state,
        lambda: get_data().valid,
        config.seq_len,
        config.batch_tokens,
        config.micro_batch,
        hardware.wants_autocast(config.precision, world.device),
    )


def read_magnitudes(checkpoint: OpenCheckpoint) -> dict[str, Magnitudes]:
    """Return Muown's magnitudes by parameter; {} for weights alone (see `check_optimizer_state`)."""
    state = checkpoint.load_optimizer_state(("magnitude", "row_norm"))
    return {name: Magnitudes(own["magnitude"], own["row_norm"]) for name, own in state.items() if "magnitude" in own}


def check_optimizer_state(checkpoint: OpenCheckpoint) -> None:
    """Refuse a checkpoint from which nothing that depends on the optimizer can be measured.

    Raises:
        ValueError: the checkpoint holds weights alone.
    """
    if not checkpoint.load_optimizer_state(()):
        raise ValueError(
            f"{checkpoint.folder} holds weights alone: this measurement also needs the state of the optimizer"
        )


def open_checkpoints(run: Path, steps: Sequence[int] | None, every: bool) -> list[SavedRun]:
    """Open checkpoints of a run in the order of their steps: those of `steps`, all if `every`, or the newest.

    Args:
        run: the folder of a run or of one checkpoint.

    Raises:
        ValueError: a checkpoint does not exist or is damaged.
    """
    if steps is None and every:
        steps = list_steps(run)
    return [open_run(run)] if not steps else [open_run(run, step) for step in sorted(set(steps))]


def check_results_folder(run: Path) -> Path:
    """Return the folder of results in a run's folder, whether it exists or not.

    Raises:
        ValueError: it is a link, which may lead out of the run's folder, or a file, or holds such a link.
    """
    folder = run / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is a link or a file, and must be a folder: move it, or give another with --out")
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_symlink():
            raise ValueError(f"{path} is a link, which may lead elsewhere: move it, or give another folder with --out")
    return folder


class Results:
    """A file of results, one line of JSON for each checkpoint and the settings it was measured with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all lines, ordered by step and then by time; null becomes NaN or an infinity again."""
        return read_metrics(self.path) if os.path.lexists(self.path) else []

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the line that contains all of `key`: a `step`, the identity of the `checkpoint`, and settings."""
        return next((line for line in self.read() if {**line, **key} == line), None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line, which replaces the lines of any other checkpoint of the same step."""
        kept = [
            old for old in self.read() if old["step"] != line["step"] or old.get("checkpoint") == line["checkpoint"]
        ]
        write_atomic(self.path, b"".join(map(encode_line, sorted([*kept, line], key=lambda each: each["step"]))))


def identify_checkpoint(saved: SavedRun) -> str:
    """Return 16 hexadecimal digits that differ between checkpoints of different content."""
    index = files.read_index(saved.checkpoint)
    return hashlib.sha256(json.dumps([saved.step, index["files"]], sort_keys=True).encode()).hexdigest()[:16]
