"""Folders of runs of an experiment, whose final perplexities a test chooses."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from muown_train.experiments.grid import GridPoint
from tests.helpers.folders import line, write
from tests.helpers.paths import FIXTURES


def fill(out: Path, points: Sequence[GridPoint], perplexity: Callable[[GridPoint], float | str | None]) -> None:
    """Write a run for each point: finished with this perplexity, diverged, or (for None) no run."""
    for point in points:
        end = perplexity(point)
        if end is None:
            continue
        lines = [line(0, valid=math.log(50_000)), line(1, 9.0)]
        if end != "diverged":
            lines.append(line(2, 3.0, valid=math.log(end)) | {"valid/perplexity": end})
        state = "diverged" if end == "diverged" else "finished"
        write(out / point.name, lines, dict(point.config), state, steps=2)


def match_paper(numbers, seeds: Sequence[int]) -> Callable[[GridPoint], float | str | None]:
    """Return a function that gives each run a perplexity such that means and deviations are the paper's.

    A run of a series without numbers does not exist. Three seeds have m - s, m and m + s.

    Args:
        numbers: by series and lr: null, diverged, a mean, or [mean, deviation].
    """

    def end(point: GridPoint) -> float | str | None:
        stated = numbers.get(point.curve.key, {}).get(point.lr)
        if isinstance(stated, list | tuple):
            mean, deviation = stated
            return mean + (seeds.index(point.seed) - 1) * deviation
        return stated

    return end


def targets() -> dict[str, Any]:
    """Return the paper's numbers."""
    return yaml.safe_load((FIXTURES / "paper_targets.yaml").read_text())
