"""Runs as an array of SLURM jobs; whoever submits again leaves out those that wait or train already.

    OUT/EXPERIMENT/submitted-TIME.txt    the runs of an array, with the words of an element on each line
    OUT/EXPERIMENT/submitted-TIME.job    the number of the job, once it has been submitted

A run may wait in the queue, or train on a machine whose locks are not seen here. This module does not load torch.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from muown_train.experiments.launch import make_overrides
from muown_train.experiments.progress import GridPointStatus
from muown_train.runtime.atomic_files import write_atomic

_SQUEUE = ("squeue", "--me", "--noheader", "--array", "--format=%F %K %T")  # job of the array, element, state
_TIMEOUT = 60  # seconds


def submit_runs(statuses: Sequence[GridPointStatus], folder: Path, jobs: int, flags: Sequence[str], root: Path) -> int:
    """Submit an array of jobs, an element for each run, and print what sbatch says.

    Args:
        folder: the folder of the experiment's runs.
        jobs: how many elements may run at a time.
        flags: words for sbatch.
        root: the checkout, in which jobs start.

    Returns:
        The exit status of sbatch.

    Raises:
        ValueError: there is no sbatch, or this process is not in the checkout.
    """
    if shutil.which("sbatch") is None:
        raise ValueError("action=submit needs sbatch, which is not here: submit from a login node, or action=run")
    if Path.cwd() != root:
        raise ValueError(f"call action=submit in {root}: its jobs run there, where relative paths would be others")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"submitted-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    write_atomic(file, "".join(f"{shlex.join(make_overrides(status))}\n" for status in statuses).encode())
    print(f"{file}: {len(statuses)} runs, at most {jobs} at a time", flush=True)
    command = [str(root / "slurm" / "sweep.sbatch"), *flags, f"@{file.resolve()}"]
    environment = os.environ | {"AT_ONCE": str(jobs)}
    process = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    print(process.stdout, end="")
    if process.returncode == 0 and not record_job(file, process.stdout):
        print("note: sbatch named no job: a further action=submit will not know of these runs until they begin")
    return process.returncode


def record_job(file: Path, output: str) -> bool:
    """Write the number of the job that has the runs of a file beside it.

    Args:
        file: submitted-TIME.txt.
        output: what sbatch printed: `Submitted batch job 17`, or `17` with --parsable; more words may follow the
            number.

    Returns:
        Whether the output contains a number.
    """
    number = re.search(r"\d+", output.strip().rpartition("\n")[2])
    if number:
        write_atomic(file.with_suffix(".job"), f"{number[0]}\n".encode())
    return number is not None


def mark_queued_runs(statuses: Sequence[GridPointStatus], out: str, root: Path) -> list[GridPointStatus]:
    """Return the statuses with the state `queued` where a job of this user waits, and `running` where one has begun.

    SLURM is asked only if it is here and something was submitted from OUT.

    Args:
        out: the folder of all runs.
        root: the folder in which jobs start and relative paths in their words begin.

    Raises:
        ValueError: SLURM does not answer.
    """
    files = {path.read_text().strip(): path.with_suffix(".txt") for path in Path(out).glob("*/submitted-*.job")}
    if not files or shutil.which(_SQUEUE[0]) is None:
        return list(statuses)
    lines = {number: file.read_text().splitlines() for number, file in files.items() if file.exists()}
    states: dict[Path, str] = {}
    for number, element, state in _list_elements():
        if element.isdigit() and int(element) < len(lines.get(number, [])):
            states[_find_folder(lines[number][int(element)], root)] = "queued" if state == "PENDING" else "running"
    return [
        replace(status, state=states[folder])
        if status.needs_training and (folder := status.folder.resolve()) in states
        else status
        for status in statuses
    ]


def _list_elements() -> list[list[str]]:
    """Return job number, element number and state of every element of this user's arrays that waits or runs."""
    try:
        process = subprocess.run(_SQUEUE, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ValueError(f"squeue does not answer within {_TIMEOUT} s: which runs are queued is not known") from None
    if process.returncode != 0:
        reason = " ".join(process.stderr.split()) or f"exit status {process.returncode}"
        raise ValueError(f"squeue does not answer ({reason}): which runs are queued is not known")
    return [words for line in process.stdout.splitlines() if len(words := line.split()) == 3]


def _find_folder(line: str, root: Path) -> Path:
    """Return the folder of the run that the words of a line train."""
    settings = dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)
    return (root / settings["out"] / settings["name"]).resolve()
