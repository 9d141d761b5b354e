"""What an experiment's runs come to: a table beside the paper's numbers, and a figure.

Means are over seeds, of runs that finished; deviations are those of a sample (n - 1). A run that diverged is a cell of
the table as well. torch is not loaded.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from muown_train.config.run_name import list_naming_overrides
from muown_train.experiments.grid import Experiment, Reported, Series
from muown_train.experiments.progress import Found, summary
from muown_train.experiments.report.figures import FIGURES
from muown_train.experiments.report.matrix_stats import Measured, lines_of
from muown_train.experiments.report.stat_tables import TABLES
from muown_train.experiments.report.tables import Table, csv_text, mean_and_deviation
from muown_train.runs.record import ABSENT, RunRecord
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.formatting import format_lr

NEAR = 1.02  # a perplexity, of the best


class Quantity(NamedTuple):
    """What a table is of."""

    title: str
    column: str  # of the CSV
    digits: tuple[int, int]  # of means and deviations, as in the paper
    of: Callable[[RunRecord], float | None]


_QUANTITIES = {
    "perplexity": Quantity(
        "Validation perplexity", "valid_perplexity", (2, 3), lambda run: run.last("valid/perplexity")
    ),
    "loss": Quantity("Validation loss", "valid_loss", (4, 4), lambda run: run.last("valid/loss")),
    "step_time": Quantity("Median time of an update, seconds", "step_time", (2, 3), lambda run: run.step_time),
}


@dataclass(frozen=True)
class Result:
    """All seeds of a setting."""

    series: Series
    value: Any  # of the experiment's further axis
    lr: float
    runs: tuple[Found, ...]
    by_seed: Mapping[int, float]  # of those that are done
    paper: Reported

    @property
    def values(self) -> tuple[float, ...]:
        """Of all seeds that are done."""
        return tuple(self.by_seed.values())

    @property
    def mean(self) -> float | None:
        return mean_and_deviation(self.values)[0] if self.values else None

    @property
    def deviation(self) -> float | None:
        return mean_and_deviation(self.values)[1] if self.values else None

    @property
    def score(self) -> float:
        """By which the best is chosen: the mean; infinite where a seed diverged, so that no survivor alone is best."""
        if self.mean is None or not math.isfinite(self.mean) or self.count("diverged"):
            return math.inf
        return self.mean

    @property
    def done(self) -> list[RunRecord]:
        """The runs whose numbers count."""
        return [each.run for each in self.runs if each.run and each.state == "done"]

    def count(self, state: str) -> int:
        """How many runs are in that state."""
        return sum(found.state == state for found in self.runs)

    @property
    def diverged(self) -> bool:
        """Whether that is all there is to say."""
        return not self.values and self.count("diverged") > 0

    @property
    def of_paper(self) -> tuple[float | None, float | None]:
        """The paper's mean and deviation."""
        if isinstance(self.paper, tuple):
            return self.paper
        return (self.paper, None) if isinstance(self.paper, int | float) else (None, None)

    @property
    def difference(self) -> float | None:
        """To the paper's mean."""
        ours, theirs = self.mean, self.of_paper[0]
        return None if ours is None or theirs is None else ours - theirs


@dataclass(frozen=True)
class Report:
    """The results of an experiment; beside the paper's unless the runs are smaller."""

    experiment: Experiment
    results: tuple[Result, ...]
    changed: tuple[str, ...]  # settings besides the experiment's

    @property
    def quantity(self) -> Quantity:
        """Of which the numbers are."""
        return _QUANTITIES[self.experiment.quantity]

    @property
    def comparable(self) -> bool:
        return bool(self.experiment.paper) and self.experiment.scale is None

    def columns(self) -> list[tuple[tuple[str, Any], str]]:
        """Series and value of each line of the figure and column of the table, and what it is called."""
        panels = len({series.panel for series in self.experiment.series}) > 1
        found = {}
        for result in self.results:
            axis = "" if self.experiment.over is None else f"{self.axis} {result.value:g}"
            parts = (result.series.label, result.series.panel if panels else "", axis)
            found[result.series.key, result.value] = ", ".join(part for part in parts if part)
        return list(found.items())

    @property
    def axis(self) -> str:
        """The further setting in words."""
        return (self.experiment.over or "").rpartition(".")[2].replace("_", " ")

    def table(self) -> Table:
        """Learning rates down, settings across, as in the paper."""
        columns = self.columns()
        results = {(each.lr, each.series.key, each.value): each for each in self.results}
        rates = sorted({each.lr for each in self.results}, reverse=True)
        rows = [
            [format_lr(lr), *(self.cell(results[lr, *key]) if (lr, *key) in results else "" for key, _ in columns)]
            for lr in rates
        ]
        return Table(self.quantity.title, ["learning rate", *(name for _, name in columns)], rows)

    @cached_property
    def measured(self) -> list[Measured]:
        """What the probe that the experiment is about measured, of each setting."""
        return lines_of(self)

    @cached_property
    def tables(self) -> list[Table]:
        """All there are: losses, beside the paper's if that can be compared, and what else was measured."""
        tables = [self.table()]
        if self.comparable:
            tables.append(self.comparison())
        if further := TABLES.get(self.experiment.report):
            tables += further(self)
        last = [*([self.best()] if self.experiment.report == "rates" else []), self.differences()]
        return tables + [table for table in last if table.rows]

    def tried(self) -> Iterator[tuple[str, list[Result], int]]:
        """Of each setting with runs that are done: its name, the grid's results, and the place of the best."""
        for key, name in self.columns():
            grid = [each for each in self.results if (each.series.key, each.value) == key]
            grid.sort(key=lambda each: each.lr)
            at = min(range(len(grid)), key=lambda i: grid[i].score)
            if math.isfinite(grid[at].score):
                yield name, grid, at

    def best(self) -> Table:
        """A line for each setting with runs: its best learning rate, and those beside it that are nearly as good."""
        rows = []
        for name, grid, at in self.tried():
            best = grid[at].score
            limit = best + math.log(NEAR) if self.experiment.quantity == "loss" else best * NEAR
            first = last = at
            while first > 0 and grid[first - 1].score <= limit:
                first -= 1
            while last < len(grid) - 1 and grid[last + 1].score <= limit:
                last += 1
            beyond = [grid[i] if 0 <= i < len(grid) else None for i in (first - 1, last + 1)]
            known = all(each and (each.values or each.diverged) for each in beyond)
            near = f"{format_lr(grid[first].lr)} to {format_lr(grid[last].lr)}"
            factor = f"{'' if known else '≥ '}{grid[last].lr / grid[first].lr:.3g}"
            rows.append([name, format_lr(grid[at].lr), self.cell(grid[at]), near, factor])
        head = ["setting", "best learning rate", self.experiment.quantity, "nearly as good", "a factor of"]
        return Table(f"Best learning rates, and those beside them within {NEAR - 1:.0%} of the perplexity", head, rows)

    def differences(self) -> Table:
        """Of each setting at its best learning rate the difference from the first one at its own, seed by seed.

        Without lines where no setting has several seeds, or no other has those of the first.
        """
        tried = [(name, grid[at]) for name, grid, at in self.tried()]
        head = ["setting", "best learning rate", "difference", "deviation", "seeds"]
        if self.experiment.over or not any(len(each.values) > 1 for _, each in tried):
            return Table("Differences", head, [])
        (first, of_first), *others = tried
        digits, rows = max(self.quantity.digits), []
        for name, each in others:
            common = [each.by_seed[seed] - value for seed, value in of_first.by_seed.items() if seed in each.by_seed]
            if common:
                mean, deviation = mean_and_deviation(common)
                shown = ABSENT if deviation is None else f"{deviation:.{digits}f}"
                rows.append([name, format_lr(each.lr), f"{mean:+z.{digits}f}", shown, str(len(common))])
        return Table(f"Differences from {first} at {format_lr(of_first.lr)}, seed by seed", head, rows)

    def comparison(self) -> Table:
        """A line for each setting that the paper reports."""
        names = dict(self.columns())
        head = ("setting", "learning rate", "runs", "here", "paper", "difference")
        digits = self.quantity.digits[0]
        rows = []
        for each in self.results:
            if each.series.key not in self.experiment.paper:
                continue
            runs = f"{len(each.values) + each.count('diverged')} of {len(each.runs)}"
            change = ABSENT if each.difference is None else f"{each.difference:+z.{digits}f}"
            name = names[each.series.key, each.value]
            rows.append([name, format_lr(each.lr), runs, self.cell(each), self.reported(each), change])
        return Table("Beside the paper", head, rows)

    def cell(self, result: Result) -> str:
        """`14.13 ± 0.004`, and what it leaves out."""
        if result.diverged:
            return "diverged" if result.count("diverged") == len(result.runs) else "diverged so far"
        if result.mean is None:
            return ABSENT
        text = self.number(result.mean, result.deviation)
        notes = [f"{result.count('diverged')} diverged"] * bool(result.count("diverged"))
        if there := len(result.values) + result.count("diverged") - len(result.runs):
            notes.append(f"{-there} to come")
        return f"{text} ({', '.join(notes)})" if notes else text

    def reported(self, result: Result) -> str:
        """What the paper says."""
        if isinstance(result.paper, str):
            return result.paper
        mean, deviation = result.of_paper
        return ABSENT if mean is None else self.number(mean, deviation)

    def number(self, mean: float, deviation: float | None) -> str:
        """Mean and deviation with the paper's digits."""
        of_mean, of_deviation = self.quantity.digits
        return f"{mean:.{of_mean}f}" + ("" if deviation is None else f" ± {deviation:.{of_deviation}f}")

    def records(self) -> list[dict[str, Any]]:
        """A line for each setting, unrounded."""
        return [
            {
                "series": each.series.key,
                "label": each.series.label,
                "panel": each.series.panel,
                **({self.experiment.over: each.value} if self.experiment.over else {}),
                "lr": each.lr,
                "runs": len(each.runs),
                "done": len(each.values),
                "diverged": each.count("diverged"),
                self.quantity.column: each.mean,
                "deviation": each.deviation,
                "lowest": min(each.values, default=None),
                "highest": max(each.values, default=None),
                **(self._paper_record(each) if self.comparable else {}),
            }
            for each in self.results
        ]

    def _paper_record(self, each: Result) -> dict[str, Any]:
        mean, deviation = each.of_paper
        stated = each.paper if isinstance(each.paper, str) else mean
        return {"paper": stated, "paper_deviation": deviation, "difference": each.difference}

    def notes(self) -> list[str]:
        """What a reader must know of the numbers."""
        found = [each for result in self.results for each in result.runs]
        there = [each.run for each in found if each.run]
        notes = [
            f"{summary(found)}.",
            "Means over seeds of runs that are done, with the sample's standard deviation (n - 1).",
        ]
        devices = sorted({run.device for run in there if run.device})
        if devices:
            notes.append(f"Trained on {', '.join(devices)}.")
        facts = {(key, value) for run in there for key, value in run.settings.items() if key.startswith("data (")}
        if len(facts) > len(dict(facts)):
            notes.append("The runs did not have the same data: their losses may be of different texts.")
        if self.experiment.report in TABLES:
            those = sum(len(line.runs) for line in self.measured)
            notes.append(f"{self.experiment.report.replace('_', ' ').capitalize()} was measured in {those} of them.")
        if self.experiment.report == "step_time" and any(device.startswith("1 x ") for device in devices):
            notes.append("On one rank there is nothing to distribute: replicated and distributed are the same there.")
        if self.of_scale:
            notes.append(self.of_scale)
        if self.changed:
            notes.append(f"Besides the experiment's settings: {' '.join(self.changed)}.")
        return notes

    @property
    def of_scale(self) -> str:
        """That it is of small runs, if it is; figures say so too."""
        scale = self.experiment.scale
        return f"scale={scale}: nothing here can be compared with the paper's numbers." if scale else ""

    def body(self, level: int = 2) -> str:
        """The tables as Markdown under headings of a level, and the notes."""
        notes = "\n".join(f"- {note}" for note in self.notes())
        return "\n".join([*(table.markdown(level) for table in self.tables), f"{notes}\n"])

    def write(self, folder: Path) -> list[Path]:
        """table.md, table.csv, table.tex, and of each figure for which there are numbers a PNG and a PDF.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"table.{suffix}" for suffix in ("md", "csv", "tex")]
        parts, figures = [f"# {self.experiment.name}\n", f"{self.experiment.sentence}.\n"], []
        for name, plot in FIGURES[self.experiment.report].items():
            files = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf")]
            if plot(self, files):
                parts.append(f"![{name}]({name}.png)\n")
                figures += files
        parts.append(self.body())
        write_atomic(paths[0], "\n".join(parts).encode())
        write_atomic(paths[1], csv_text(self.records()).encode())
        write_atomic(paths[2], "\n".join(table.latex() for table in self.tables).encode())
        return paths + figures


def report(experiment: Experiment, found: Sequence[Found], further: Sequence[str] = ()) -> Report:
    """The results of runs that `progress` found; `further` are the overrides that all of them were given."""
    by_setting: dict[tuple[str, Any, float], list[Found]] = {}
    for each in found:
        by_setting.setdefault(each.cell.setting, []).append(each)
    results = []
    for (key, value, lr), runs in by_setting.items():
        of = _QUANTITIES[experiment.quantity].of
        values = {each.cell.seed: of(run) for each in runs if each.state == "done" and (run := each.run)}
        there = {seed: number for seed, number in values.items() if number is not None}
        paper = experiment.paper.get(key, {}).get(lr)
        results.append(Result(runs[0].cell.series, value, lr, tuple(runs), there, paper))
    settings = [setting for _, setting in list_naming_overrides(list(further))]
    return Report(experiment, tuple(results), tuple(settings))
