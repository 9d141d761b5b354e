"""Which runs of an experiment there are, and how they stand. Nothing is changed, and torch is not loaded.

A run counts for a cell if their settings are the same, wherever it lies and whatever its name: experiments share runs.
"""

import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muown_train.config.run_name import check_run_name
from muown_train.experiments.grid import Cell, Experiment
from muown_train.runs.record import NoRun, RunRecord, get_defining_settings, read_archived_runs, read_config, read_run
from muown_train.runtime.redaction import redact_tree

# as reports and lists have it: the more useful, the earlier
STATES = ("done", "diverged", "running", "queued", "stopped", "cut off", "failed", "damaged", "missing")


@dataclass(frozen=True)
class Found:
    """A cell and its run, if there is one."""

    cell: Cell
    folder: Path  # of the run, or where it would be
    run: RunRecord | None
    state: str  # of STATES
    damage: str | None = None  # of a run that is damaged

    @property
    def wanted(self) -> bool:
        """Whether there is something left to train, and nobody who does or will."""
        return self.state not in ("done", "diverged", "running", "queued", "damaged")

    @property
    def loss(self) -> float | None:
        """The last validation loss."""
        return self.run.last("valid/loss") if self.run else None

    def line(self, width: int) -> str:
        """For a list, the name in so many columns."""
        run = self.run
        steps = "" if run is None or not run.steps else f"{run.step:,}/{run.steps:,}"
        loss = "" if self.loss is None else f"loss {self.loss:.4f}"
        reason = self.damage or (str(run.status.get("reason") or "") if run else "")
        elsewhere = "" if run is None or run.name == self.cell.name else f"{self.folder}"
        rest = "  ".join(part for part in (reason, elsewhere) if part)
        return f"{self.cell.name:<{width}}  {self.state:<8}  {steps:>15}  {loss:<11}  {rest}".rstrip()


def progress(experiment: Experiment, cells: Sequence[Cell], out: str, archive: Path | None = None) -> list[Found]:
    """How each cell stands.

    Args:
        out: folder of all runs; those of an experiment are in OUT/EXPERIMENT.
        archive: a folder of archives, whose runs count too.

    Raises:
        ValueError: a run of a cell's name that has other settings, or two cells that are one run.
    """
    folder = Path(out) / experiment.folder
    by_rate: dict[Any, list[tuple[RunRecord, dict[str, Any]]]] = {}
    for run in (*_read_runs(Path(out)), *(read_archived_runs(archive) if archive else ())):
        settings = _settings(run.config, experiment.same)
        by_rate.setdefault((run.seed, settings.get("optim.lr")), []).append((run, settings))
    found, seen = [], dict[str, Cell]()
    for cell in cells:
        settings = _settings(redact_tree(cell.config), experiment.same)
        other = seen.setdefault(repr((cell.seed, sorted(settings.items()))), cell)
        if other is not cell:
            raise ValueError(f"{other.name} and {cell.name} are the same run: choose some with series= or points=")
        there = by_rate.get((cell.seed, cell.lr), [])
        same = [run for run, of_run in there if same_settings(of_run, settings)]
        own = folder / check_run_name(cell.name)
        candidates = [_found(cell, run) for run in same]
        if own not in [run.folder for run in same]:
            try:
                _refuse_other(own, settings, experiment.same)
            except NoRun as error:
                candidates.append(Found(cell, own, None, "damaged", str(error)))
        candidates.sort(key=lambda each: (STATES.index(each.state), -(each.run.step if each.run else 0)))
        found.append(candidates[0] if candidates else Found(cell, own, None, _without_record(own)))
    return found


def _read_runs(out: Path) -> Iterator[RunRecord]:
    """Yield the runs in a folder, then those in the folders there; a folder whose configuration is unreadable is no run."""
    for pattern in ("*/config.yaml", "*/*/config.yaml"):
        for path in sorted(out.glob(pattern)):
            with suppress(NoRun):
                yield read_run(path.parent)


def _settings(config: Mapping[str, Any], same: Sequence[str]) -> dict[str, Any]:
    """What defines a run, and what else an experiment asks of its runs."""
    return get_defining_settings(config) | {key: config.get(key) for key in same}


def same_settings(of_run: Mapping[str, Any], of_cell: Mapping[str, Any]) -> bool:
    """Whether a run is that of a cell."""
    return "optim._target_" in of_run and _differing(of_run, of_cell) is None


def _differing(of_run: Mapping[str, Any], of_cell: Mapping[str, Any]) -> str | None:
    """The first setting that is another, if there is one."""
    return next((key for key in {**of_run, **of_cell} if of_run.get(key) != of_cell.get(key)), None)


def _refuse_other(folder: Path, settings: Mapping[str, Any], same: Sequence[str]) -> None:
    """Error if a folder that a cell would train in holds a run with other settings."""
    if not (folder / "config.yaml").exists():
        return
    there = _settings(read_config(folder), same)
    if key := _differing(there, settings):
        raise ValueError(
            f"{folder} holds a run with {key}={there.get(key)}, the experiment has {settings.get(key)}: give the "
            "settings that it was trained with, or another out"
        )


def _found(cell: Cell, run: RunRecord) -> Found:
    folder, state = run.folder, shown(run.state)
    if state == "running" and not in_use(folder):
        state = "cut off"
    elif state not in STATES:
        state = "cut off" if run.step and not in_use(folder) else _without_record(folder)
    return Found(cell, folder, run, state, run.damage)


def shown(state: str) -> str:
    """A state of status.json as lists have it."""
    return "done" if state == "finished" else state


def _without_record(folder: Path) -> str:
    return "running" if in_use(folder) else "missing"


def in_use(folder: Path) -> bool:
    """Whether a process trains there; over machines as far as the file system keeps locks."""
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def damages(found: Sequence[Found]) -> Iterator[str]:
    """A sentence for each damaged run."""
    for each in found:
        if each.state == "damaged":
            yield f"{each.folder} is damaged: {each.damage}; it counts for nothing until it is mended or moved away"


def summary(found: Sequence[Found]) -> str:
    """`36 runs: 3 done, 33 missing`."""
    counts = Counter(each.state for each in found)
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{len(found)} run{'s' * (len(found) != 1)}: {states}"
