"""The status of a run, in its folder: status.json tells people, starts.jsonl tells the run when to give up, and a lock
keeps a second process away.

status.json    {"state", "reason", "step", "steps", "time"}; the states are running (or cut off, if no process holds
               the folder's lock), stopped or failed (the same command goes on), finished, and diverged; `step` is the
               step at `time`
starts.jsonl   a line for each start: {"job", "saved", "time"}; `saved` is the step of the newest checkpoint it found
"""

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from muown_train.config.stored_files import COUNT, NUMBER, TEXT, Kind, allow_null, check_entries
from muown_train.runs.checkpoint_files import list_checkpoints, parse_step
from muown_train.runs.metrics import FolderChangedError
from muown_train.runtime.atomic_files import parse_json, read_regular, try_read_json, write_atomic

_STATUS: dict[str, Kind] = {"state|reason": TEXT, "step|steps": COUNT, "time": NUMBER}
_START: dict[str, Kind] = {"job": allow_null(TEXT), "saved": allow_null(COUNT), "time": NUMBER}


@dataclass(frozen=True)
class Outcome:
    """The state of training, and how it ended."""

    state: str  # running, stopped, failed, finished, diverged
    reason: str = ""


class RepeatedFailure(Exception):
    """A run has failed too often without a new checkpoint."""


class FolderInUse(ValueError):
    """Another process trains in a run's folder."""


def write_status(folder: Path, outcome: Outcome, step: int, steps: int) -> None:
    """Replace status.json.

    Raises:
        OSError: it cannot be written; on a full disk only if there is no status.json whose place can be used.
    """
    status = {"state": outcome.state, "reason": outcome.reason, "step": step, "steps": steps, "time": time.time()}
    path, content = folder / "status.json", (json.dumps(status) + "\n").encode()
    try:
        write_atomic(path, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with path.open("r+b") as file:  # the block that the file has takes the new content on most file systems
            file.write(content)
            file.truncate()


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; {} if there is none, or if it holds what no run writes."""
    try:
        return check_entries(try_read_json(folder / "status.json"), _STATUS)
    except ValueError:
        return {}


def lock_folder(folder: Path) -> FileLock:
    """Make a run's folder and lock it for this process; the system releases the lock however the process ends.

    Raises:
        FolderInUse: another process trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderInUse(f"{folder} is being trained by another process: wait for it, or give another name") from None
    return lock


class FolderGuard:
    """Notices that the folder of a run, or the lock in it, is no longer the one that this process locked.

    Somebody may have moved or removed it, and put another in its place. The folder and its lock stay open, so that a
    file system cannot give their numbers to others.

    Args:
        folder: the folder of a run, whose lock this process holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, None
        with suppress(FileNotFoundError):  # where a file system has no locks, filelock keeps another file
            self.lock = os.stat(folder / ".lock")
        self._descriptor: int | None = os.open(folder, os.O_RDONLY)

    def check(self) -> None:
        """Raise FolderChangedError if the folder or its lock has been moved, removed or replaced."""
        if self._descriptor is None:
            return
        if not _is_same(self.folder, os.fstat(self._descriptor)):
            raise FolderChangedError(
                f"{self.folder} was moved, removed or replaced while this run was training: nothing more is saved; "
                "once it is back in its place, the same command goes on from the last checkpoint"
            )
        if self.lock and not _is_same(self.folder / ".lock", self.lock):
            raise FolderChangedError(
                f"{self.folder}/.lock was removed or replaced while this run was training, so that another process may "
                "train there: nothing more is saved; when none does, the same command goes on from the last checkpoint"
            )

    def close(self) -> None:
        """End the guard; further checks find nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def _is_same(path: Path, stat: os.stat_result) -> bool:
    """Return whether a path still leads to the same file or folder."""
    try:
        return os.path.samestat(path.stat(), stat)
    except (FileNotFoundError, NotADirectoryError):
        return False


def count_start(folder: Path, give_up_after: int) -> None:
    """Record that a run starts, on the main rank alone. A start that ends as it should is to be followed by
    `forget_starts`, so that those on record have failed.

    A failure makes no progress unless a checkpoint was saved before it: the next start begins where this one began.
    The step that a failed start reached says less, since a save that fails in the background is noticed some steps
    later, and not always as many.

    Args:
        give_up_after: the number of starts in a row, of the same SLURM job or of none, that may fail without a new
            checkpoint.

    Raises:
        RepeatedFailure: that many have failed.
        OSError: the folder cannot be written.
    """
    path, job = folder / "starts.jsonl", os.environ.get("SLURM_JOB_ID")
    saved = next(map(parse_step, list_checkpoints(folder / "checkpoints")), None)
    starts = _read_starts(path)
    last = starts[-give_up_after:]
    if len(last) == give_up_after and all((start["job"], start["saved"]) == (job, saved) for start in last):
        forget_starts(folder)  # whoever starts it again has looked at the cause
        since = "any checkpoint" if saved is None else f"a checkpoint later than that of step {saved}"
        raise RepeatedFailure(
            f"{folder}: {give_up_after} starts in a row failed without {since}; look at the log, "
            "mend the cause, and start the run again"
        )
    starts.append({"job": job, "saved": saved, "time": time.time()})
    write_atomic(path, "".join(json.dumps(start) + "\n" for start in starts).encode())


def forget_starts(folder: Path) -> None:
    """Remove the record of starts, because the last one has ended as it should or somebody is to look at the cause."""
    with suppress(OSError):  # then the next start counts too early, and no more
        (folder / "starts.jsonl").unlink(missing_ok=True)


def _read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts recorded so far; a line that a full disk or a crash has cut off is left out."""
    starts = []
    for line in read_regular(path).splitlines() if os.path.lexists(path) else []:
        with suppress(ValueError):
            start = check_entries(parse_json(line), _START)
            if start.keys() >= _START.keys():
                starts.append(start)
    return starts
