"""What was measured of runs besides losses: by probes in them, and by scripts/analyze.py of their checkpoints.

A number's name is MATRIX/QUANTITY, where a matrix is such as `blocks.3.attention.qkv.weight:0`. torch is not loaded.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muown_train.runs.record import RunRecord, Series
from muown_train.runtime.formatting import format_lr

if TYPE_CHECKING:
    from muown_train.experiments.report.results import Report

_KINDS = {  # as a figure names matrices that all layers have
    "attention.q": "query",
    "attention.k": "key",
    "attention.v": "value",
    "attention.out": "attention out",
    "mlp.gate_up": "MLP in",
    "mlp.up": "MLP in",
    "mlp.out": "MLP out",
}


class OfMatrix(NamedTuple):
    """A number that is measured of every matrix."""

    key: str
    title: str
    symbol: str = ""
    of: Callable[[np.ndarray], np.ndarray] = np.asarray  # what is shown of it


SPECTRAL = (  # the factors of Proposition 1
    OfMatrix("spectral_norm", "spectral norm", r"$\|W\|_{S_\infty}$"),
    OfMatrix("max_row_norm", "largest row norm", r"$\|g\|_\infty$"),
    OfMatrix("coherence", "root of the coherence", r"$\sqrt{\lambda_{\max}(PCP)}$", np.sqrt),
)
NEGATIVE = OfMatrix("negative", "share of negative magnitudes")  # Muown's alone
RANK = OfMatrix("", "normalised effective rank")


class Place(NamedTuple):
    """Where a matrix is."""

    kind: str
    layer: int | None


@dataclass(frozen=True)
class Spread:
    """A number of several matrices and runs at each step that any of them has."""

    steps: np.ndarray  # (S,)
    quantiles: np.ndarray  # (5, S): least, lower quartile, median, upper quartile, largest

    @property
    def median(self) -> np.ndarray:
        """(S,)."""
        return np.asarray(self.quantiles[2])


@dataclass(frozen=True)
class Measured:
    """What was measured of all runs of a setting: of each by name the steps and the values."""

    label: str
    runs: Sequence[Mapping[str, Series]]

    @cached_property
    def by_quantity(self) -> dict[str, list[tuple[Place, Series]]]:
        """The numbers of matrices of all runs."""
        found: dict[str, list[tuple[Place, Series]]] = {}
        for run in self.runs:
            for name, series in run.items():
                if is_matrix(name):
                    found.setdefault(name.partition("/")[2], []).append((place_of(name), series))
        return found

    def kinds(self) -> list[str]:
        """Of the matrices, in their order in the model."""
        return list(dict.fromkeys(place.kind for found in self.by_quantity.values() for place, _ in found))

    def layers(self) -> list[int]:
        """Of the model."""
        layers = {place.layer for found in self.by_quantity.values() for place, _ in found}
        return sorted(layer for layer in layers if layer is not None)

    def spread(self, quantity: str | OfMatrix, kind: str | None = None, layer: int | None = None) -> Spread:
        """Of matrices of a kind, or of all; of a layer, or of all; of all runs. Numbers that are none do not count."""
        key, _, _, of = OfMatrix(quantity, "") if isinstance(quantity, str) else quantity
        by_step: dict[float, list[float]] = {}
        for place, (steps, values) in self.by_quantity.get(key, []):
            if kind in (None, place.kind) and layer in (None, place.layer):
                for step, value in zip(steps.tolist(), of(values).tolist(), strict=True):
                    if np.isfinite(value):
                        by_step.setdefault(step, []).append(value)
        steps = np.array(sorted(by_step))
        found = [np.quantile(by_step[step], (0, 0.25, 0.5, 0.75, 1)) for step in steps]
        return Spread(steps, np.array(found).reshape(-1, 5).T)

    def singular_values(self, kind: str, layer: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Singular values at the last step: part of them that are smaller (Q,), from 0 to 1, and the values (Q,).

        Of several layers and runs the medians. Both are empty where quantiles were not measured.
        """
        found: dict[float, float] = {}
        prefix = "singular_value/"
        for what in self.by_quantity:
            if what.startswith(prefix):
                spread = self.spread(what, kind, layer)
                if len(spread.steps):
                    found[float(what.removeprefix(prefix))] = float(spread.median[-1])
        parts = sorted(found)
        return np.array(parts), np.array([found[part] for part in parts])


def lines_of(report: "Report") -> list[Measured]:
    """Of each setting what the probe of an experiment measured in its runs that are done; others are left out."""
    names = dict(report.columns())
    rates = Counter((result.series.key, result.value) for result in report.results)
    lines = []
    for result in report.results:
        runs = [found for run in result.done if (found := measured(run, report.experiment.report))]
        if runs:
            key = result.series.key, result.value
            lines.append(Measured(names[key] + (f", lr {format_lr(result.lr)}" if rates[key] > 1 else ""), runs))
    return lines


def all_layers(lines: Sequence[Measured]) -> list[int]:
    """Of all models."""
    return sorted({layer for line in lines for layer in line.layers()})


def is_matrix(name: str) -> bool:
    """Whether a number is that of a matrix, and not one over all of them."""
    return "." in name.partition("/")[0]


def place_of(name: str) -> Place:
    """The kind and the layer of a matrix; the blocks of a fused one are named by their letters, as q, k, v of qkv."""
    matrix, _, block = name.partition("/")[0].partition(":")
    parts = matrix.removesuffix(".weight").split(".")
    layer = next((int(part) for part in parts if part.isdigit()), None)
    words = [part for part in parts if not part.isdigit() and part not in ("blocks", "layers")]
    if block:
        last = words[-1]
        words[-1] = last[int(block)] if last == "qkv" else f"{last}:{block}"
    kind = ".".join(words)
    return Place(_KINDS.get(kind, kind), layer)


def measured(run: RunRecord, probe: str) -> dict[str, Series]:
    """All numbers of a probe by name; of a step that both have those that were measured later count: they may be exact.

    Args:
        probe: such as spectral, of metrics.jsonl (SPECTRAL/MATRIX/QUANTITY) or RUN/analysis/SPECTRAL.jsonl.
    """
    points: dict[str, dict[float, float]] = {}
    for key in run.columns:
        if key.startswith(f"{probe}/"):
            steps, values = run.series(key)
            points[key.removeprefix(f"{probe}/")] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    for line in _analysed(run, probe):
        for name, value in line.items():
            if is_matrix(name) and isinstance(value, int | float):
                points.setdefault(name, {})[line["step"]] = value
    return {
        name: (np.array(sorted(found)), np.array([found[step] for step in sorted(found)]))
        for name, found in points.items()
    }


def _analysed(run: RunRecord, probe: str) -> Iterable[Mapping[str, float]]:
    return run.read_lines(f"analysis/{probe}.jsonl")
