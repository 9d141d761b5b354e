"""The written report of an experiment: tables for people, CSV and LaTeX, and figures.

This is the only module that knows both the data of a report and everything that is made of them. It does not load
torch.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from muown_train.experiments.progress import summarize
from muown_train.experiments.report.figures import FIGURES
from muown_train.experiments.report.matrix_stats import PROBES
from muown_train.experiments.report.result_tables import (
    list_records,
    make_best_table,
    make_claim_table,
    make_difference_table,
    make_paper_table,
    make_result_table,
)
from muown_train.experiments.report.results import Report
from muown_train.experiments.report.stat_tables import TABLES
from muown_train.experiments.report.tables import Table, format_csv
from muown_train.runtime.atomic_files import write_atomic


class ReportWriter:
    """Makes tables and figures of a report and writes them."""

    def __init__(self, report: Report) -> None:
        self.report = report

    @cached_property
    def tables(self) -> list[Table]:
        """The tables that show something: losses, beside the paper's where they compare, and what else was measured."""
        report = self.report
        tables = [make_result_table(report)]
        if report.is_comparable:
            tables.append(make_paper_table(report))
        if report.grid.report in TABLES:
            tables += TABLES[report.grid.report](report)
        if report.grid.report == "rates":
            tables.append(make_best_table(report))
        tables += [make_difference_table(report), make_claim_table(report)]
        return [table for table in tables if not table.is_empty]

    def list_notes(self) -> Iterator[str]:
        """Yield sentences that a reader of the numbers must know."""
        grid = self.report.grid
        choosing = [result.choosing for result in self.report.results if result.choosing]
        statuses = [*choosing, *(status for result in self.report.results for status in result.runs)]
        runs = [status.run for status in statuses if status.run]
        yield f"{summarize(statuses)}."
        yield "Means over seeds of runs that are done, with the sample's standard deviation (n - 1)."
        if choosing:
            yield f"Best rates are those of seed {grid.rate_seed}, which enters no mean."
        if grid.claims:
            yield (
                "Claims: mean differences, seed by seed, with Student's intervals; held where these are below 0, not "
                "held where they are above."
            )
        yield from (f"{line}." for line in grid.describe_settings(status.point for status in statuses))
        devices = sorted({run.device for run in runs if run.device})
        if devices:
            yield f"Trained on {', '.join(devices)}."
        data = {(key, value) for run in runs for key, value in run.settings.items() if key.startswith("data (")}
        if len(data) > len(dict(data)):
            yield "The runs did not have the same data: their losses may be of different texts."
        if grid.report in PROBES:
            measured = sum(len(stats.runs) for stats in self.report.stats)
            yield f"{grid.report.replace('_', ' ').capitalize()} was measured in {measured} of them."
        if grid.report == "step_time" and any(device.startswith("1 x ") for device in devices):
            yield "On one rank there is nothing to distribute: replicated and distributed are the same there."
        if self.report.scale_note:
            yield self.report.scale_note
        if self.report.overrides:
            yield f"Besides the experiment's settings: {' '.join(self.report.overrides)}."

    def format_body(self, level: int = 2) -> str:
        """Return the tables as Markdown under headings of a level, and the notes."""
        notes = "\n".join(f"- {note}" for note in self.list_notes())
        return "\n".join([*(table.format_markdown(level) for table in self.tables), f"{notes}\n"])

    def write(self, folder: Path) -> list[Path]:
        """Write table.md, table.csv, table.tex, and a PNG and a PDF of each figure that has something to show.

        Returns:
            The files.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"table.{suffix}" for suffix in ("md", "csv", "tex")]
        grid = self.report.grid
        parts, figures = [f"# {grid.name}\n", f"{grid.sentence}.\n"], []
        for name, plot in FIGURES[grid.report].items():
            files = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf")]
            if plot(self.report, files):
                parts.append(f"![{name}]({name}.png)\n")
                figures += files
        parts.append(self.format_body())
        write_atomic(paths[0], "\n".join(parts).encode())
        write_atomic(paths[1], format_csv(list_records(self.report)).encode())
        write_atomic(paths[2], "\n".join(table.format_latex() for table in self.tables).encode())
        return paths + figures
