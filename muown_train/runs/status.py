"""The status of a run, in its folder: status.json tells people, starts.jsonl tells the run when to give up.

status.json    {"state", "reason", "step", "steps", "time"}; the states are running (or cut off, if no process holds
               the folder's lock), stopped or failed (the same command goes on), finished, and diverged; `step` is the
               step at `time`
starts.jsonl   a line for each start: {"job", "failed_at", "time"}
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muown_train.runs.metrics import Metrics
from muown_train.runtime.atomic_files import try_read_json, write_atomic

if TYPE_CHECKING:  # reading a status must not load torch
    from muown_train.runtime.distributed import World


@dataclass(frozen=True)
class Outcome:
    """The state of training, and how it ended."""

    state: str  # running, stopped, failed, finished, diverged
    reason: str = ""


class RepeatedFailure(Exception):
    """A run has failed too often at the same step."""


def write_status(folder: Path, outcome: Outcome, step: int, steps: int) -> None:
    """Replace status.json."""
    status = {"state": outcome.state, "reason": outcome.reason, "step": step, "steps": steps, "time": time.time()}
    write_atomic(folder / "status.json", (json.dumps(status) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; {} if there is none or it cannot be read."""
    return try_read_json(folder / "status.json")


def count_start(folder: Path, give_up_after: int, world: "World") -> None:
    """Record that a run starts. A start after a planned end does not count as a failure. A collective call.

    Args:
        give_up_after: the number of starts in a row, of the same SLURM job or of none, that may fail at the same step.

    Raises:
        RepeatedFailure: that many have failed; raised on every rank.
        OSError: the folder cannot be written.
    """
    world.run_on_main(lambda: _record_start(folder, give_up_after))


def _record_start(folder: Path, give_up_after: int) -> None:
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
        starts[-1]["failed_at"] = None  # whoever starts it again has looked at the cause
    write_atomic(path, "".join(json.dumps(start) + "\n" for start in starts).encode())
    if given_up:
        raise RepeatedFailure(
            f"{folder}: {give_up_after} starts in a row failed after step {failed_at}; look at the log, "
            "mend the cause, and start the run again"
        )
