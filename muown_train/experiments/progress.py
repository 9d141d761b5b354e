"""The progress of an experiment: which of its runs exist, and the state of each. Nothing is changed.

A run counts for a point of the grid if their settings are equal, wherever the run lies and whatever its name, so that
experiments share runs. This module does not load torch.
"""

import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muown_train.config.run_name import check_run_name
from muown_train.experiments.grid import Grid, GridPoint
from muown_train.runs.record import NoRun, RunRecord, get_defining_settings, read_archived_runs, read_config, read_run
from muown_train.runtime.redaction import redact_tree

# Summaries have this order. Of several runs of a point the one whose state comes first counts.
STATES = ("done", "diverged", "running", "queued", "stopped", "cut off", "failed", "damaged", "missing")


@dataclass(frozen=True)
class GridPointStatus:
    """A point of a grid, its run if there is one, and the state of that."""

    point: GridPoint
    folder: Path  # the run lies, or would lie, here
    run: RunRecord | None
    state: str  # one of STATES
    damage: str | None = None  # the reason why a damaged run counts for nothing

    @property
    def needs_training(self) -> bool:
        """True if there is something left to train, and no process trains it or waits to."""
        return self.state not in ("done", "diverged", "running", "queued", "damaged")

    def format_line(self, width: int) -> str:
        """Return a line of a list, in which the point's title fills `width` columns."""
        run = self.run
        steps = "" if run is None or not run.steps else f"{run.step:,}/{run.steps:,}"
        last = run.last("valid/loss") if run else None
        loss = "" if last is None else f"loss {last:.4f}"
        reason = self.damage or (str(run.status.get("reason") or "") if run else "")
        elsewhere = "" if run is None or run.name == self.point.name else f"{self.folder}"
        notes = "  ".join(part for part in (reason, elsewhere) if part)
        return f"{self.point.title:<{width}}  {self.state:<8}  {steps:>15}  {loss:<11}  {notes}".rstrip()


def read_progress(
    grid: Grid, points: Sequence[GridPoint], out: str, archive: Path | None = None
) -> list[GridPointStatus]:
    """Return the status of each point of a grid.

    Args:
        out: the folder of all runs; those of an experiment lie in OUT/EXPERIMENT.
        archive: a folder of archives, whose runs count too.

    Raises:
        ValueError: a run with a point's name has other settings, or two points are the same run.
    """
    folder = Path(out) / grid.folder
    by_rate: dict[Any, list[tuple[RunRecord, dict[str, Any]]]] = {}
    for run in (*_read_runs(Path(out)), *(read_archived_runs(archive) if archive else ())):
        settings = _get_settings(run.config, grid.same)
        by_rate.setdefault((run.seed, settings.get("optim.lr")), []).append((run, settings))
    statuses, seen = [], dict[str, GridPoint]()
    for point in points:
        settings = _get_settings(redact_tree(point.config), grid.same)
        other = seen.setdefault(repr((point.seed, sorted(settings.items()))), point)
        if other is not point:
            raise ValueError(f"{other.name} and {point.name} are the same run: choose some with series= or points=")
        similar = by_rate.get((point.seed, point.lr), [])
        runs = [run for run, of_run in similar if same_settings(of_run, settings)]
        own = folder / check_run_name(point.name)
        candidates = [_judge_run(point, run) for run in runs]
        if own not in [run.folder for run in runs]:
            try:
                _check_own_folder(own, settings, grid.same)
            except NoRun as error:
                candidates.append(GridPointStatus(point, own, None, "damaged", str(error)))
        if not candidates:
            candidates = [GridPointStatus(point, own, None, _judge_folder(own))]
        statuses.append(min(candidates, key=_rank_candidate))
    return statuses


def _rank_candidate(status: GridPointStatus) -> tuple[int, int, float]:
    """Return a key by which the best state comes first, of equal ones the most steps, and then the earliest end.

    So a report stays as it is when another experiment trains the same run once more.
    """
    run = status.run
    return STATES.index(status.state), -run.step if run else 0, float(run.status.get("time", 0.0)) if run else 0.0


def _read_runs(out: Path) -> Iterator[RunRecord]:
    """Yield the runs in a folder, then those in the folders there.

    A run whose configuration cannot be read is left out: it is being made, or broken, and not finished in any case.
    """
    for pattern in ("*/config.yaml", "*/*/config.yaml"):
        for path in sorted(out.glob(pattern)):
            with suppress(NoRun):
                yield read_run(path.parent)


def _get_settings(config: Mapping[str, Any], same: Sequence[str]) -> dict[str, Any]:
    """Return the settings that define a run, and the others that an experiment asks of its runs."""
    return get_defining_settings(config) | {key: config.get(key) for key in same}


def same_settings(of_run: Mapping[str, Any], of_point: Mapping[str, Any]) -> bool:
    """Return whether a run is that of a point."""
    return "optim._target_" in of_run and _find_difference(of_run, of_point) is None


def _find_difference(of_run: Mapping[str, Any], of_point: Mapping[str, Any]) -> str | None:
    """Return the first key whose values differ, if there is one."""
    return next((key for key in {**of_run, **of_point} if of_run.get(key) != of_point.get(key)), None)


def _check_own_folder(folder: Path, settings: Mapping[str, Any], same: Sequence[str]) -> None:
    """Check that the folder in which a point would train holds no run with other settings."""
    if not (folder / "config.yaml").exists():
        return
    there = _get_settings(read_config(folder), same)
    if key := _find_difference(there, settings):
        raise ValueError(
            f"{folder} holds a run with {key}={there.get(key)}, the experiment has {settings.get(key)}: give the "
            "settings that it was trained with, or another out"
        )


def _judge_run(point: GridPoint, run: RunRecord) -> GridPointStatus:
    state = rename_state(run.state)
    if state == "running" and not is_in_use(run.folder):
        state = "cut off"
    elif state not in STATES:
        state = "cut off" if run.step and not is_in_use(run.folder) else _judge_folder(run.folder)
    return GridPointStatus(point, run.folder, run, state, run.damage)


def rename_state(state: str) -> str:
    """Return the word that lists have for a state of status.json."""
    return "done" if state == "finished" else state


def _judge_folder(folder: Path) -> str:
    return "running" if is_in_use(folder) else "missing"


def is_in_use(folder: Path) -> bool:
    """Return whether a process trains in a folder; on other machines only if the file system shares its locks."""
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file gives it back
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def describe_damage(statuses: Sequence[GridPointStatus]) -> Iterator[str]:
    """Yield a sentence for each damaged run."""
    for each in statuses:
        if each.state == "damaged":
            yield f"{each.folder} is damaged: {each.damage}; it counts for nothing until it is mended or moved away"


def summarize(statuses: Sequence[GridPointStatus]) -> str:
    """Return the number of runs in each state, such as `36 runs: 3 done, 33 missing`."""
    counts = Counter(each.state for each in statuses)
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{len(statuses)} run{'s' * (len(statuses) != 1)}: {states}"
