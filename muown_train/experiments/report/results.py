"""The results of an experiment as plain data: the runs of each setting, their numbers, and those of the paper.

Means are over the seeds whose runs finished, and deviations are those of a sample (n - 1). Tables and figures are made
of these data by other modules of this package; `write.py` knows them all. This module does not load torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from muown_train.config.run_name import list_naming_overrides
from muown_train.experiments.grid import Curve, Grid, PaperValue
from muown_train.experiments.progress import GridPointStatus
from muown_train.experiments.report.matrix_stats import PROBES, MatrixStats, read_probe
from muown_train.experiments.report.tables import mean_and_deviation
from muown_train.runs.record import RunRecord
from muown_train.runtime.formatting import format_lr


class Quantity(NamedTuple):
    """A number of a run that a report is about."""

    title: str
    column: str  # the name of its column in a CSV file
    digits: tuple[int, int]  # decimals of means and of deviations, as in the paper
    measure: Callable[[RunRecord], float | None]


_QUANTITIES = {
    "perplexity": Quantity("Validation perplexity", "valid_perplexity", (2, 3), lambda r: r.last("valid/perplexity")),
    "loss": Quantity("Validation loss", "valid_loss", (4, 4), lambda run: run.last("valid/loss")),
    "step_time": Quantity("Median time of a step, seconds", "step_time", (2, 3), lambda run: run.step_time),
}


@dataclass(frozen=True)
class Result:
    """The runs of a setting with all its seeds."""

    curve: Curve
    value: Any  # on the grid's further axis
    lr: float
    runs: tuple[GridPointStatus, ...]
    by_seed: Mapping[int, float]  # the quantity of the runs that are done
    paper: PaperValue
    choosing: GridPointStatus | None = None  # the run of the grid's rate_seed, which is none of `runs`
    rate_value: float | None = None  # its quantity, if it is done

    @property
    def key(self) -> tuple[str, Any]:
        """The key of the column of a table, or the line of a figure, that shows this result."""
        return self.curve.key, self.value

    @property
    def values(self) -> tuple[float, ...]:
        """The quantity of the runs that are done."""
        return tuple(self.by_seed.values())

    @property
    def mean(self) -> float | None:
        return mean_and_deviation(self.values)[0] if self.values else None

    @property
    def deviation(self) -> float | None:
        return mean_and_deviation(self.values)[1] if self.values else None

    @property
    def score(self) -> float:
        """The number by which the best result is chosen: that of the grid's rate_seed, or the mean.

        It is infinite where a seed diverged, so that no survivor wins.
        """
        if self.choosing:
            return self.rate_value if self.rate_value is not None and math.isfinite(self.rate_value) else math.inf
        if self.mean is None or not math.isfinite(self.mean) or self.count("diverged"):
            return math.inf
        return self.mean

    @property
    def done(self) -> list[RunRecord]:
        """The runs whose numbers count."""
        return [status.run for status in self.runs if status.run and status.state == "done"]

    def count(self, state: str) -> int:
        """Return how many runs are in a state."""
        return sum(status.state == state for status in self.runs)

    @property
    def diverged(self) -> bool:
        """True if a run diverged and none is done."""
        return not self.values and self.count("diverged") > 0

    @property
    def paper_mean(self) -> float | None:
        if isinstance(self.paper, tuple):
            return self.paper[0]
        return self.paper if isinstance(self.paper, int | float) else None

    @property
    def paper_deviation(self) -> float | None:
        return self.paper[1] if isinstance(self.paper, tuple) else None

    @property
    def difference(self) -> float | None:
        """The mean minus the paper's."""
        return None if self.mean is None or self.paper_mean is None else self.mean - self.paper_mean


@dataclass(frozen=True)
class Report:
    """The results of an experiment, of which tables and figures are made."""

    grid: Grid
    results: tuple[Result, ...]
    stats: tuple[MatrixStats, ...]  # one for each setting whose finished runs have numbers of the probe `grid.report`
    overrides: tuple[str, ...]  # the settings of all runs besides the experiment's

    @property
    def quantity(self) -> Quantity:
        """The quantity that this report tabulates."""
        return _QUANTITIES[self.grid.quantity]

    @property
    def is_comparable(self) -> bool:
        """True if the paper has numbers that these results can be compared with."""
        return bool(self.grid.paper) and self.grid.scale is None

    @property
    def axis(self) -> str:
        """The name of the grid's further axis in words."""
        return (self.grid.over or "").rpartition(".")[2].replace("_", " ")

    @property
    def names(self) -> dict[tuple[str, Any], str]:
        """The name of each column of the table and line of the figure, by `Result.key`."""
        panels = len({curve.panel for curve in self.grid.curves}) > 1
        names = {}
        for result in self.results:
            axis = "" if self.grid.over is None else f"{self.axis} {result.value:g}"
            parts = (result.curve.label, result.curve.panel if panels else "", axis)
            names[result.key] = ", ".join(part for part in parts if part)
        return names

    @property
    def scale_note(self) -> str:
        """A sentence that says that the runs are small, if they are."""
        scale = self.grid.scale
        return f"scale={scale}: nothing here can be compared with the paper's numbers." if scale else ""


def build_report(grid: Grid, statuses: Sequence[GridPointStatus], overrides: Sequence[str] = ()) -> Report:
    """Collect the results of the runs of a grid.

    Args:
        overrides: the settings that all runs were given besides the experiment's.
    """
    by_setting: dict[tuple[str, Any, float], list[GridPointStatus]] = {}
    for status in statuses:
        by_setting.setdefault(status.point.setting, []).append(status)
    results = []
    for (key, value, lr), runs in by_setting.items():
        by_seed = {}
        for status in runs:
            if status.run and status.state == "done":
                number = _QUANTITIES[grid.quantity].measure(status.run)
                if number is not None:
                    by_seed[status.point.seed] = number
        choosing = next((status for status in runs if status.point.seed == grid.rate_seed), None)
        rate_value = by_seed.pop(choosing.point.seed, None) if choosing else None
        others = tuple(status for status in runs if status is not choosing)
        paper = grid.paper.get(key, {}).get(lr)
        results.append(Result(runs[0].point.curve, value, lr, others, by_seed, paper, choosing, rate_value))
    report = Report(grid, tuple(results), (), tuple(word for _, word in list_naming_overrides(overrides)))
    return replace(report, stats=_collect_stats(report)) if grid.report in PROBES else report


def _collect_stats(report: Report) -> tuple[MatrixStats, ...]:
    """Return the numbers that the probe `grid.report` measured in the finished runs of each setting that has any."""
    rates = Counter(result.key for result in report.results)
    stats = []
    for result in report.results:
        runs = [numbers for run in result.done if (numbers := read_probe(run, report.grid.report))]
        if runs:
            lr = f", lr {format_lr(result.lr)}" if rates[result.key] > 1 else ""
            stats.append(MatrixStats(report.names[result.key] + lr, runs))
    return tuple(stats)
