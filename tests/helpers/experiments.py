"""Folders of runs of an experiment, with final perplexities that a test gives them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from muown_train.experiments.grid import Cell
from tests.helpers.folders import line, write
from tests.helpers.paths import SHARED

TARGETS = SHARED / "paper" / "targets.yaml"


def fill(out: Path, cells: Sequence[Cell], perplexity: Callable[[Cell], float | str | None]) -> None:
    """A run for each cell: finished with this perplexity, diverged, or (None) none."""
    for cell in cells:
        end = perplexity(cell)
        if end is None:
            continue
        lines = [line(0, valid=math.log(50_000)), line(1, 9.0)]
        if end != "diverged":
            lines.append(line(2, 3.0, valid=math.log(end)) | {"valid/perplexity": end})
        state = "diverged" if end == "diverged" else "finished"
        write(out / cell.name, lines, dict(cell.config), state, steps=2)


def of_paper(numbers, seeds: Sequence[int]) -> Callable[[Cell], float | str | None]:
    """What each run must have come to for the means and deviations of the paper: m - s, m, m + s for three seeds.

    Args:
        numbers: by series and lr: null, diverged, a mean, or [mean, deviation].
    """

    def end(cell: Cell) -> float | str | None:
        stated = numbers[cell.series.key][cell.lr]
        if isinstance(stated, list | tuple):
            mean, deviation = stated
            return mean + (seeds.index(cell.seed) - 1) * deviation
        return stated

    return end


def targets() -> dict[str, Any]:
    """The paper's numbers; skips the test where they are not."""
    if not TARGETS.exists():
        pytest.skip(f"no {TARGETS}, the paper's numbers")
    return yaml.safe_load(TARGETS.read_text())
