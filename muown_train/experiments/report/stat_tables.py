"""Tables of what is measured besides losses: spectra, effective ranks, gradient noise, copying."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from muown_train.experiments.report.matrix_stats import (
    NEGATIVE,
    RANK,
    SPECTRAL,
    MatrixQuantity,
    MatrixStats,
    Spread,
    list_kinds,
)
from muown_train.experiments.report.results import Report
from muown_train.experiments.report.tables import Table, format_mean
from muown_train.runs.record import ABSENT, RunRecord
from muown_train.runtime.formatting import format_lr

COPYING = "copying/second_minus_first"
# A run whose second loss of random tokens is so many nats below the first has learned to copy. Of the runs in
# docs/results.md, those whose text loss shows no such gain end at -0.29 and above, and the others at -0.56 and below.
COPIES_BELOW = -0.3


def make_spectral_tables(report: Report) -> list[Table]:
    """Return for each kind of matrix the factors of Proposition 1 at the end of training, and their growth."""

    def format_growth(quantity: MatrixQuantity, stats: MatrixStats, kind: str) -> str:
        values = stats.compute_spread(quantity, kind).median
        if not len(values):
            return ABSENT
        return _format_number(values[-1]) + (f" (×{values[-1] / values[0]:.2f})" if values[0] else "")

    def format_negative(stats: MatrixStats, kind: str) -> str:
        spread = stats.compute_spread(NEGATIVE, kind)
        if not len(spread.steps):
            return ABSENT
        return f"{spread.median[-1]:.1%} [{spread.quantiles[0, -1]:.1%}, {spread.quantiles[-1, -1]:.1%}]"

    tables = []
    for quantity in SPECTRAL:
        title = f"{quantity.title.capitalize()}: median over layers at the end, and its growth"
        tables.append(_make_kind_table(title, report.stats, partial(format_growth, quantity)))
    if muown := [stats for stats in report.stats if NEGATIVE.key in stats.by_quantity]:
        title = f"{NEGATIVE.title.capitalize()}: median over layers at the end [span]"
        tables.append(_make_kind_table(title, muown, format_negative))
    return tables


def make_rank_tables(report: Report) -> list[Table]:
    """Return for each kind of matrix the effective rank of its gradients, averaged over training."""

    def format_rank(stats: MatrixStats, kind: str) -> str:
        values = stats.compute_spread(RANK, kind).median
        return f"{values.mean():.3f}" if len(values) else ABSENT

    title = f"{RANK.title.capitalize()}: median over layers, mean over training"
    return [_make_kind_table(title, report.stats, format_rank)]


def make_noise_tables(report: Report) -> list[Table]:
    """Return the noise terms and their ratios at each checkpoint, over matrices.

    The last columns are the paper's ratio: the median of Muon's term along a run of Muon, which has no other term, over
    that of Muown's term along a run of Muown.
    """
    names = {"muon": "Muon's term", "muown": "Muown's term", "muon/muown": "Muon's / Muown's"}
    columns = {
        f"{names[key]} along {stats.label}": spread
        for stats in report.stats
        for key in names
        if len((spread := stats.compute_spread(key)).steps)
    }
    steps = sorted({step for spread in columns.values() for step in spread.steps.tolist()})
    rows = [[f"{step:,.0f}", *(_format_quartiles(spread, step) for spread in columns.values())] for step in steps]
    ratios = {
        f"median along {muon.label} / median along {muown.label}": (muon.compute_spread("muon"), own)
        for muown in report.stats
        if len((own := muown.compute_spread("muown")).steps)
        for muon in report.stats
        if "muown" not in muon.by_quantity
    }
    tables = [Table("Gradient noise: median over matrices [quartiles]", ["step", *columns], rows)]
    rows = [[f"{step:,.0f}", *(_format_ratio(*spreads, step) for spreads in ratios.values())] for step in steps]
    return [*tables, Table("Gradient noise as the paper compares it: each along its own run", ["step", *ratios], rows)]


def make_copying_tables(report: Report) -> list[Table]:
    """Return for each setting how many of its runs learned to copy, when, and the losses of those and of the others."""
    digits, measure, rows = report.quantity.digits[0], report.quantity.measure, []
    for result in report.results:
        starts = [(run, find_copying(run)) for run in result.done if len(run.series(COPYING)[0])]
        if not starts:
            continue
        steps = [step for _, step in starts if step is not None]
        losses = [
            [value for run, step in starts if (step is None) == never and (value := measure(run)) is not None]
            for never in (False, True)
        ]
        median = f"{np.median(steps):,.0f}" if steps else ABSENT
        cells = (format_mean(values, digits) for values in losses)
        share = f"{len(steps)} of {len(starts)}"
        rows.append([report.names[result.key], format_lr(result.lr), share, median, *cells])
    title = f"Runs that learned to copy: random tokens cost {-COPIES_BELOW:g} nat less the second time, at the end"
    name = report.grid.quantity
    head = ["setting", "learning rate", "learned", "from step (median)", f"{name} if so", f"{name} if not"]
    return [Table(title, head, rows)]


def find_copying(run: RunRecord) -> int | None:
    """Return the step from which on a run copies up to its end, as it was measured; None if it does not in the end."""
    steps, gains = run.series(COPYING)
    if not len(steps) or not gains[-1] < COPIES_BELOW:
        return None
    before = np.flatnonzero(~(gains < COPIES_BELOW))
    return int(steps[before[-1] + 1 if len(before) else 0])


def _make_kind_table(title: str, stats: Sequence[MatrixStats], format_cell: Callable[[MatrixStats, str], str]) -> Table:
    """Return a table with kinds of matrices down and settings across."""
    head = ["matrix", *(each.label for each in stats)]
    return Table(title, head, [[kind, *(format_cell(each, kind) for each in stats)] for kind in list_kinds(stats)])


def _format_quartiles(spread: Spread, step: float) -> str:
    index = np.flatnonzero(spread.steps == step)
    if not len(index):
        return ABSENT
    low, median, high = spread.quantiles[1:4, index[0]]
    return f"{_format_number(median)} [{_format_number(low)}, {_format_number(high)}]"


def _format_ratio(above: Spread, below: Spread, step: float) -> str:
    medians = [spread.median[spread.steps == step] for spread in (above, below)]
    return _format_number((medians[0] / medians[1]).item()) if all(map(len, medians)) else ABSENT


def _format_number(value: float) -> str:
    """Return a number with three digits, zeros among them: 0.190, 1.80, 16.0."""
    return f"{value:#.3g}".rstrip(".")


TABLES: dict[str, Callable[[Report], list[Table]]] = {
    "spectral": make_spectral_tables,
    "effective_rank": make_rank_tables,
    "gradient_noise": make_noise_tables,
    "copying": make_copying_tables,
}
