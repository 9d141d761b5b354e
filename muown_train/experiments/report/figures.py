"""Figures of an experiment by its `report`: final losses against the learning rate, curves, what else is measured."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import stat_figures as measured_figures
from muown_train.experiments.report import style
from muown_train.experiments.report.curves import LOSS, plot_comparison
from muown_train.runs.record import RunGroup
from muown_train.runtime.formatting import format_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from muown_train.experiments.report.results import Report, Result

_ROOM = 0.05  # of the frame's height, below and above
_TICKS = 6  # that have room beside one another


def plot_rates(report: "Report", paths: Sequence[Path]) -> bool:
    """Means over seeds against the learning rate, seeds' span shaded; the paper's numbers dotted.

    What diverged, or lies far above the others, is marked at the upper edge.

    Returns:
        Whether there was something to draw.
    """
    lines = _lines(report)
    means = [mean for results in lines.values() for mean in _means(results, report.comparable)]
    if not means and not any(result.diverged for result in report.results):
        return False
    panels = list(dict.fromkeys(panel for panel, _ in lines))
    families = list(dict.fromkeys(label for _, label in lines))
    looks = dict(zip(families, style.of_lines(families), strict=True))
    low, high = _window(means)
    with style.new_figure(1.9 + 2.6 * len(panels), 3.0) as figure:
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for panel, axes in zip(panels, row, strict=True):
            axes.set(xscale="log", yscale="log" if low > 0 and high > 2 * low else "linear", title=panel)
            _frame(axes, low, high)
            for (of, label), results in lines.items():
                if of == panel:
                    _draw(axes, results, looks[label], report.comparable)
            _rate_axis(axes, [result.lr for (of, _), results in lines.items() if of == panel for result in results])
        unit = LOSS if report.experiment.quantity == "loss" else "perplexity"
        row[0].set_ylabel(f"validation {unit}")
        handles = [row[0].plot([], [], label=style.name(label, 26), **look)[0] for label, look in looks.items()]
        if report.comparable:
            handles += row[0].plot([], [], color="0.35", linestyle=":", label="the paper's")
        figure.legend(handles=handles, loc="outside right upper", handlelength=3.0)
        style.caption(figure, _caption(report, row[0].get_ylim()[1]), report.of_scale)
        style.save(figure, paths)
    return True


def plot_curves(report: "Report", paths: Sequence[Path]) -> bool:
    """Losses of every setting that has runs, against tokens and time.

    Returns:
        Whether there was something to draw.
    """
    names = dict(report.columns())
    groups, words = [], []
    for result in report.results:
        runs = tuple(found.run for found in result.runs if found.run and found.run.columns)
        if runs:
            groups.append(RunGroup(runs))
            words.append([f"{names[result.series.key, result.value]},", f"lr {format_lr(result.lr)}"])
    if groups:
        plot_comparison(groups, words, paths, report.of_scale)
    return bool(groups)


# of each report the figures by the names of their files, the first of them the paper's
FIGURES: dict[str, dict[str, Callable[["Report", Sequence[Path]], bool]]] = {
    "rates": {"figure": plot_rates},
    "curves": {"figure": plot_curves},
    **{report: figures | {"losses": plot_curves} for report, figures in measured_figures.FIGURES.items()},
}


def _lines(report: "Report") -> dict[tuple[str, str], list["Result"]]:
    """The results of each line, by panel and label; those without anything to draw are left out."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        if not (_means([result], report.comparable) or result.diverged):
            continue
        if report.experiment.over is None:
            key = result.series.panel, result.series.label
        else:
            key = result.series.label, f"{report.axis} {result.value:g}"
        found.setdefault(key, []).append(result)
    return {key: sorted(results, key=lambda each: each.lr) for key, results in found.items()}


def _means(results: Sequence["Result"], with_paper: bool) -> list[float]:
    numbers = [mean for each in results for mean in (each.mean, each.of_paper[0] if with_paper else None)]
    return [mean for mean in numbers if mean is not None and np.isfinite(mean)]


def _window(means: Sequence[float]) -> tuple[float, float]:
    """The values to frame: all but those above the upper quartile by more than 1.5 times the quartiles' distance."""
    if not means:
        return 1.0, 2.0
    lower, upper = np.quantile(means, [0.25, 0.75])
    return min(means), max(mean for mean in means if mean <= max(upper + 1.5 * (upper - lower), min(means)))


def _frame(axes: "Axes", low: float, high: float) -> None:
    if axes.get_yscale() == "log":
        factor = (high / low) ** _ROOM
        axes.set_ylim(low / factor, high * factor**2)
        style.plain_ticks(axes)
    else:
        room = _ROOM * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - room, high + 2 * room)


def _rate_axis(axes: "Axes", rates: Sequence[float]) -> None:
    """Ticks at powers of two where the grid is of them; else at decades and as much between as has room."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    grid = sorted(set(rates))
    if all(np.frexp(lr)[0] == 0.5 for lr in grid):
        ticks = grid[:: 1 + (len(grid) - 1) // _TICKS]
        labels = [f"$2^{{{np.log2(tick):.0f}}}$" for tick in ticks]
    else:
        apart = np.log(1.44 * grid[-1] / grid[0]) / (_TICKS + 1)  # or the labels touch
        decades = range(math.floor(math.log10(grid[0])), math.ceil(math.log10(grid[-1])) + 1)
        for between in ((1, 2, 4, 6, 8), (1, 2, 5), (1, 3), (1,)):
            ticks = [tick for k in decades for n in between if grid[0] <= (tick := float(f"{n}e{k}")) <= grid[-1]]
            if all(np.diff(np.log(ticks)) >= apart):
                break
        ticks = ticks or grid[:_TICKS]
        labels = [format_lr(tick) for tick in ticks]
    axes.set_xlim(grid[0] / 1.2, grid[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate")


def _draw(axes: "Axes", results: Sequence["Result"], look: dict[str, Any], with_paper: bool) -> None:
    edge = axes.get_ylim()[1]
    there = [(each.lr, each.mean, min(each.values), max(each.values)) for each in results if each.mean is not None]
    if there:
        rates, means, least, largest = zip(*there, strict=True)
        axes.plot(rates, means, linewidth=1.2, **look)
        if any(low != high for low, high in zip(least, largest, strict=True)):
            axes.fill_between(rates, least, largest, color=look["color"], alpha=0.18, linewidth=0)
    above = [each.lr for each in results if _above(each, edge)]
    lost = [each.lr for each in results if each.count("diverged")]
    for at, marker, size in ((above, r"$\uparrow$", 10), (lost, "x", 6)):
        if at:
            axes.plot(
                at, [edge] * len(at), linestyle="", marker=marker, color=look["color"], markersize=size, clip_on=False
            )
    if with_paper:
        points = [(each.lr, mean) for each in results if (mean := each.of_paper[0]) is not None]
        if points:
            plain = {"color": look["color"], "marker": look["marker"], "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), linestyle=":", linewidth=1.0, **plain)


def _caption(report: "Report", edge: float) -> str:
    """What is not plain from the figure: of spans and marks those that it has."""
    parts = ["Mean over seeds, shaded from the lowest to the highest."] * any(len(r.runs) > 1 for r in report.results)
    parts += ["Arrow at the upper edge: above the frame."] * any(_above(result, edge) for result in report.results)
    if any(result.count("diverged") for result in report.results):
        survivors = any(result.count("diverged") > 0 < len(result.values) for result in report.results)
        parts.append(f"Cross: diverged{'; a mean there is over the other seeds' * survivors}.")
    return " ".join(parts)


def _above(result: "Result", edge: float) -> bool:
    return result.mean is not None and not result.mean <= edge
