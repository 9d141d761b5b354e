"""Runs that wait in SLURM's queue, or train where their locks are not seen: whoever submits again leaves them out.

OUT/EXPERIMENT/submitted-TIME.txt    the runs of an array of jobs: the words of an element on each line
OUT/EXPERIMENT/submitted-TIME.job    the number of that job, from when it has been submitted

torch is not loaded.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path

from muown_train.experiments.progress import Found
from muown_train.runtime.atomic_files import write_atomic

_ASK = ("squeue", "--me", "--noheader", "--array", "--format=%F %K %T")  # job of the array, element, state
_SECONDS = 60  # for an answer


def keep_job(runs: Path, said: str) -> bool:
    """Write down which job has the runs of a file.

    Args:
        runs: submitted-TIME.txt.
        said: by sbatch: `Submitted batch job 17`, or with --parsable `17`; more words may follow the number.

    Returns:
        Whether there is a number in it.
    """
    number = re.search(r"\d+", said.strip().rpartition("\n")[2])
    if number:
        write_atomic(runs.with_suffix(".job"), f"{number[0]}\n".encode())
    return number is not None


def with_queue(found: Sequence[Found], out: str, root: Path) -> list[Found]:
    """The same, with the state `queued` where a job of ours waits for its turn, `running` where one has begun.

    SLURM is asked only if something was submitted from OUT, and only if it is here.

    Args:
        out: folder of all runs.
        root: where jobs start, and relative paths in their words begin.

    Raises:
        ValueError: it does not answer.
    """
    files = {path.read_text().strip(): path.with_suffix(".txt") for path in Path(out).glob("*/submitted-*.job")}
    if not files or shutil.which(_ASK[0]) is None:
        return list(found)
    states: dict[Path, str] = {}
    lines = {number: file.read_text().splitlines() for number, file in files.items() if file.exists()}
    for number, element, state in _elements():
        if element.isdigit() and int(element) < len(lines.get(number, [])):
            states[_folder(lines[number][int(element)], root)] = "queued" if state == "PENDING" else "running"
    return [
        changed(each, state=states[place]) if each.wanted and (place := each.folder.resolve()) in states else each
        for each in found
    ]


def _elements() -> list[list[str]]:
    """Of all arrays of this user that wait or run: number of the job, of the element, state."""
    try:
        asked = subprocess.run(_ASK, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"squeue does not answer within {_SECONDS} s: which runs are queued is not known") from None
    if asked.returncode != 0:
        reason = " ".join(asked.stderr.split()) or f"exit status {asked.returncode}"
        raise ValueError(f"squeue does not answer ({reason}): which runs are queued is not known")
    return [words for line in asked.stdout.splitlines() if len(words := line.split()) == 3]


def _folder(line: str, root: Path) -> Path:
    """Of a run, by the words that train it."""
    given = dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)
    return (root / given["out"] / given["name"]).resolve()
