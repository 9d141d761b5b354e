"""How a run stands, in its folder: status.json for those who look, starts.jsonl to know when to give up.

status.json    {"state", "reason", "step", "steps", "time"}; states: running (or cut off, if no process has the
               folder), stopped or failed (the same command goes on), finished, diverged; `step` is of then
starts.jsonl   a line for each start: {"job", "failed_at", "time"}
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muown_train.runs.metrics import Metrics
from muown_train.runtime.atomic_files import read_json, write_atomic

if TYPE_CHECKING:  # tables of runs are made without torch
    from muown_train.runtime.distributed import World


@dataclass(frozen=True)
class Outcome:
    """How training ended, or stands."""

    state: str  # running, stopped, failed, finished, diverged
    reason: str = ""


class GaveUp(Exception):
    """The same update has failed too often."""


def write_status(folder: Path, outcome: Outcome, step: int, steps: int) -> None:
    """Replace status.json."""
    status = {"state": outcome.state, "reason": outcome.reason, "step": step, "steps": steps, "time": time.time()}
    write_atomic(folder / "status.json", (json.dumps(status) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; {} where there is none or it cannot be read."""
    return read_json(folder / "status.json")


def count_start(folder: Path, give_up_after: int, world: "World") -> None:
    """Note that a run starts; a collective call. A start that follows a planned end does not count as a failure.

    Args:
        give_up_after: so many starts of the same SLURM job (or of none) may fail at the same update in a row.

    Raises:
        GaveUp: they have; on every rank.
        OSError: the folder cannot be written.
    """
    world.run_on_main(lambda: _count(folder, give_up_after))


def _count(folder: Path, give_up_after: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path, job = folder / "starts.jsonl", os.environ.get("SLURM_JOB_ID")
    starts = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    status = read_status(folder)
    planned = status.get("state") in ("stopped", "finished", "diverged")
    failed_at = None
    ended = planned and bool(starts) and status["time"] >= starts[-1]["time"]
    if starts and starts[-1]["job"] == job and not ended:
        lines = Metrics(folder).read()
        failed_at = lines[-1]["step"] if lines else 0
    starts.append({"job": job, "failed_at": failed_at, "time": time.time()})
    last = starts[-give_up_after:]
    same = all(start["job"] == job and start["failed_at"] == failed_at for start in last)
    given_up = failed_at is not None and same and len(last) == give_up_after
    if given_up:
        starts[-1]["failed_at"] = None  # whoever starts it again has looked at it
    write_atomic(path, "".join(json.dumps(start) + "\n" for start in starts).encode())
    if given_up:
        raise GaveUp(
            f"{folder}: {give_up_after} starts in a row failed after update {failed_at}; look at the log, "
            "mend the cause, and start the run again"
        )
