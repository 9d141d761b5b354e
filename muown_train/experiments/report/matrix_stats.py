"""Numbers of matrices that were measured besides losses: by probes in runs, and by `muown-train analyze` afterwards.

A number's name is MATRIX/QUANTITY, where a matrix is named such as `blocks.3.attention.qkv.weight:0`. This module does
not load torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from muown_train.runs.record import RunRecord, Series

PROBES = ("spectral", "effective_rank", "gradient_noise")  # reports show the numbers of these
_KINDS = {  # names that figures have for the matrices of every layer
    "attention.q": "query",
    "attention.k": "key",
    "attention.v": "value",
    "attention.out": "attention out",
    "mlp.gate_up": "MLP in",
    "mlp.up": "MLP in",
    "mlp.out": "MLP out",
}


class MatrixQuantity(NamedTuple):
    """A number that is measured of every matrix."""

    key: str
    title: str
    symbol: str = ""
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray  # turns what is stored into what is shown


SPECTRAL = (  # the factors of Proposition 1
    MatrixQuantity("spectral_norm", "spectral norm", r"$\|W\|_{S_\infty}$"),
    MatrixQuantity("max_row_norm", "largest row norm", r"$\|g\|_\infty$"),
    MatrixQuantity("coherence", "root of the coherence", r"$\sqrt{\lambda_{\max}(PCP)}$", np.sqrt),
)
NEGATIVE = MatrixQuantity("negative", "share of negative magnitudes")  # only Muown has magnitudes
RANK = MatrixQuantity("", "normalised effective rank")


class MatrixPlace(NamedTuple):
    """The place of a matrix in a model."""

    kind: str
    layer: int | None


@dataclass(frozen=True)
class Spread:
    """Quantiles of a number over several matrices and runs, at each step that any of them has."""

    steps: np.ndarray  # (S,)
    quantiles: np.ndarray  # (5, S): least, lower quartile, median, upper quartile, largest

    @property
    def median(self) -> np.ndarray:
        """(S,)."""
        return np.asarray(self.quantiles[2])


@dataclass(frozen=True)
class MatrixStats:
    """The numbers that were measured in the runs of a setting: for each run the steps and the values by name."""

    label: str
    runs: Sequence[Mapping[str, Series]]

    @cached_property
    def by_quantity(self) -> dict[str, list[tuple[MatrixPlace, Series]]]:
        """The numbers of single matrices in all runs."""
        by_quantity: dict[str, list[tuple[MatrixPlace, Series]]] = {}
        for run in self.runs:
            for name, series in run.items():
                if is_of_matrix(name):
                    by_quantity.setdefault(name.partition("/")[2], []).append((locate_matrix(name), series))
        return by_quantity

    @property
    def places(self) -> Iterable[MatrixPlace]:
        """The places of all matrices, in their order in the model, with repetitions."""
        return (place for numbers in self.by_quantity.values() for place, _ in numbers)

    def compute_spread(
        self, quantity: str | MatrixQuantity, kind: str | None = None, layer: int | None = None
    ) -> Spread:
        """Return the spread of a number over the matrices of a kind (or all), of a layer (or all), and over runs.

        Values that are not finite do not count.
        """
        key, _, _, transform = MatrixQuantity(quantity, "") if isinstance(quantity, str) else quantity
        by_step: dict[float, list[float]] = {}
        for place, (steps, values) in self.by_quantity.get(key, []):
            if kind in (None, place.kind) and layer in (None, place.layer):
                for step, value in zip(steps.tolist(), transform(values).tolist(), strict=True):
                    if np.isfinite(value):
                        by_step.setdefault(step, []).append(value)
        steps = np.array(sorted(by_step))
        quantiles = [np.quantile(by_step[step], (0, 0.25, 0.5, 0.75, 1)) for step in steps]
        return Spread(steps, np.array(quantiles).reshape(-1, 5).T)

    def get_singular_values(self, kind: str, layer: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the singular values at the last step: the share of smaller ones (Q,), 0 to 1, and the values (Q,).

        They are medians over layers and runs. Both are empty where quantiles were not measured.
        """
        values: dict[float, float] = {}
        prefix = "singular_value/"
        for quantity in self.by_quantity:
            if quantity.startswith(prefix):
                spread = self.compute_spread(quantity, kind, layer)
                if len(spread.steps):
                    values[float(quantity.removeprefix(prefix))] = float(spread.median[-1])
        shares = sorted(values)
        return np.array(shares), np.array([values[share] for share in shares])


def list_kinds(stats: Sequence[MatrixStats]) -> list[str]:
    """Return the kinds of matrices of all models, in their order there."""
    return list(dict.fromkeys(place.kind for each in stats for place in each.places))


def list_layers(stats: Sequence[MatrixStats]) -> list[int]:
    """Return the numbers of the layers of all models."""
    return sorted({place.layer for each in stats for place in each.places if place.layer is not None})


def is_of_matrix(name: str) -> bool:
    """Return whether a number is that of a single matrix."""
    return "." in name.partition("/")[0]


def locate_matrix(name: str) -> MatrixPlace:
    """Return the place of a matrix; blocks of a fused matrix are named by their letters, such as q, k and v of qkv."""
    matrix, _, block = name.partition("/")[0].partition(":")
    parts = matrix.removesuffix(".weight").split(".")
    layer = next((int(part) for part in parts if part.isdigit()), None)
    words = [part for part in parts if not part.isdigit() and part not in ("blocks", "layers")]
    if block:
        last = words[-1]
        words[-1] = last[int(block)] if last == "qkv" else f"{last}:{block}"
    kind = ".".join(words)
    return MatrixPlace(_KINDS.get(kind, kind), layer)


def read_probe(run: RunRecord, probe: str) -> dict[str, Series]:
    """Return all numbers of a probe by name.

    They are in metrics.jsonl as PROBE/MATRIX/QUANTITY and in RUN/analysis/PROBE.jsonl. Where both have a step, the
    latter counts: it was measured later and may be exact.
    """
    points: dict[str, dict[float, float]] = {}
    for key in run.columns:
        if key.startswith(f"{probe}/"):
            steps, values = run.series(key)
            points[key.removeprefix(f"{probe}/")] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    for line in run.read_lines(f"analysis/{probe}.jsonl"):
        for name, value in line.items():
            if is_of_matrix(name) and isinstance(value, int | float):
                points.setdefault(name, {})[line["step"]] = value
    return {
        name: (np.array(sorted(by_step)), np.array([by_step[step] for step in sorted(by_step)]))
        for name, by_step in points.items()
    }
