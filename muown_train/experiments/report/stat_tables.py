"""Tables of what is measured besides losses: spectra, effective ranks, gradient noise."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from muown_train.experiments.report.matrix_stats import NEGATIVE, RANK, SPECTRAL, Measured, OfMatrix, Spread
from muown_train.experiments.report.tables import Table
from muown_train.runs.record import ABSENT

if TYPE_CHECKING:
    from muown_train.experiments.report.results import Report


def spectral_tables(report: "Report") -> list[Table]:
    """Of each kind of matrix what the factors of Proposition 1 have come to, and how much they grew."""

    def cell(quantity: OfMatrix, line: Measured, kind: str) -> str:
        values = line.spread(quantity, kind).median
        if not len(values):
            return ABSENT
        return _three(values[-1]) + (f" (×{values[-1] / values[0]:.2f})" if values[0] else "")

    def turned(line: Measured, kind: str) -> str:
        found = line.spread(NEGATIVE, kind)
        if not len(found.steps):
            return ABSENT
        return f"{found.median[-1]:.1%} [{found.quantiles[0, -1]:.1%}, {found.quantiles[-1, -1]:.1%}]"

    muown = [line for line in report.measured if NEGATIVE.key in line.by_quantity]
    tables = [
        _by_kind(
            f"{quantity.title.capitalize()}: median over layers at the end, and its growth",
            report.measured,
            partial(cell, quantity),
        )
        for quantity in SPECTRAL
    ]
    if muown:
        tables.append(_by_kind(f"{NEGATIVE.title.capitalize()}: median over layers at the end [span]", muown, turned))
    return tables


def rank_tables(report: "Report") -> list[Table]:
    """Of each kind of matrix the effective rank of its gradients, averaged over training."""

    def cell(line: Measured, kind: str) -> str:
        values = line.spread(RANK, kind).median
        return f"{values.mean():.3f}" if len(values) else ABSENT

    return [_by_kind(f"{RANK.title.capitalize()}: median over layers, mean over training", report.measured, cell)]


def noise_tables(report: "Report") -> list[Table]:
    """At each checkpoint the noise terms and their ratio, over matrices."""
    names = {"muon": "Muon's term", "muown": "Muown's term", "muon/muown": "Muon's / Muown's"}
    found = {
        f"{names[key]} along {line.label}": spread
        for line in report.measured
        for key in names
        if len((spread := line.spread(key)).steps)
    }
    steps = sorted({step for spread in found.values() for step in spread.steps.tolist()})
    rows = [[f"{step:,.0f}", *(_quartiles(spread, step) for spread in found.values())] for step in steps]
    return [Table("Gradient noise: median over matrices [quartiles]", ["update", *found], rows)]


def _quartiles(spread: Spread, step: float) -> str:
    at = np.flatnonzero(spread.steps == step)
    if not len(at):
        return ABSENT
    low, median, high = spread.quantiles[1:4, at[0]]
    return f"{_three(median)} [{_three(low)}, {_three(high)}]"


def _three(value: float) -> str:
    """Three digits, zeros among them: 0.190, 1.80, 16.0."""
    return f"{value:#.3g}".rstrip(".")


def _by_kind(title: str, lines: Sequence[Measured], cell: Callable[[Measured, str], str]) -> Table:
    kinds = dict.fromkeys(kind for line in lines for kind in line.kinds())
    return Table(
        title,
        ["matrix", *(line.label for line in lines)],
        [[kind, *(cell(line, kind) for line in lines)] for kind in kinds],
    )


TABLES: dict[str, Callable[["Report"], list[Table]]] = {
    "spectral": spectral_tables,
    "effective_rank": rank_tables,
    "gradient_noise": noise_tables,
}
