"""The figures of each kind of report: final losses against the learning rate, curves, and what else is measured."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import stat_figures, style
from muown_train.experiments.report.curves import LOSS, plot_comparison
from muown_train.experiments.report.results import Report, Result
from muown_train.runs.record import RunGroup
from muown_train.runtime.formatting import format_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 0.05  # empty share of the frame's height, below and above
_MAX_TICKS = 6  # this many have room beside one another


def plot_rates(report: Report, paths: Sequence[Path]) -> bool:
    """Draw means over seeds against the learning rate, their span shaded and the paper's means dotted.

    Runs that diverged and results far above the others are marked at the upper edge.

    Returns:
        Whether there was something to draw.
    """
    lines = _group_lines(report)
    means = [mean for results in lines.values() for mean in _list_means(results, report.is_comparable)]
    if not means and not any(result.diverged for result in report.results):
        return False
    panels = list(dict.fromkeys(panel for panel, _ in lines))
    families = list(dict.fromkeys(label for _, label in lines))
    styles = dict(zip(families, style.choose_styles(families), strict=True))
    low, high = _choose_window(means)
    with style.new_figure(1.9 + 2.6 * len(panels), 3.0) as figure:
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for panel, axes in zip(panels, row, strict=True):
            axes.set(xscale="log", yscale="log" if low > 0 and high > 2 * low else "linear", title=panel)
            _set_frame(axes, low, high)
            for (of, label), results in lines.items():
                if of == panel:
                    _draw_line(axes, results, styles[label], report.is_comparable)
            _label_rate_axis(
                axes, [result.lr for (of, _), results in lines.items() if of == panel for result in results]
            )
        unit = LOSS if report.grid.quantity == "loss" else "perplexity"
        row[0].set_ylabel(f"validation {unit}")
        handles = [row[0].plot([], [], label=style.format_name(name, 26), **look)[0] for name, look in styles.items()]
        if report.is_comparable:
            handles += row[0].plot([], [], color="0.35", linestyle=":", label="the paper's")
        figure.legend(handles=handles, loc="outside right upper", handlelength=3.0)
        style.add_caption(figure, _format_caption(report, row[0].get_ylim()[1]), report.scale_note)
        style.save_figure(figure, paths)
    return True


def plot_curves(report: Report, paths: Sequence[Path]) -> bool:
    """Draw losses of every setting that has runs, against tokens and time.

    Returns:
        Whether there was something to draw.
    """
    names = report.names
    groups, words = [], []
    for result in report.results:
        runs = tuple(status.run for status in result.runs if status.run and status.run.columns)
        if runs:
            groups.append(RunGroup(runs))
            words.append([f"{names[result.key]},", f"lr {format_lr(result.lr)}"])
    if groups:
        plot_comparison(groups, words, paths, report.scale_note)
    return bool(groups)


# The figures of each kind of report by the names of their files, the paper's figure first. A function that draws one
# takes a file for each format and returns whether there was something to draw.
FIGURES: dict[str, dict[str, Callable[[Report, Sequence[Path]], bool]]] = {
    "rates": {"figure": plot_rates},
    "curves": {"figure": plot_curves},
    **{report: figures | {"losses": plot_curves} for report, figures in stat_figures.FIGURES.items()},
    "copying": {**stat_figures.FIGURES["copying"], "rates": plot_rates, "losses": plot_curves},
}


def _group_lines(report: Report) -> dict[tuple[str, str], list[Result]]:
    """Return the results of each line by panel and label, without results that have nothing to draw."""
    lines: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        if not (_list_means([result], report.is_comparable) or result.diverged):
            continue
        if report.grid.over is None:
            key = result.curve.panel, result.curve.label
        else:
            key = result.curve.label, f"{report.axis} {result.value:g}"
        lines.setdefault(key, []).append(result)
    return {key: sorted(results, key=lambda result: result.lr) for key, results in lines.items()}


def _list_means(results: Sequence[Result], with_paper: bool) -> list[float]:
    numbers = [mean for each in results for mean in (each.mean, each.paper_mean if with_paper else None)]
    return [mean for mean in numbers if mean is not None and np.isfinite(mean)]


def _choose_window(means: Sequence[float]) -> tuple[float, float]:
    """Return the range to frame, without values 1.5 times the quartiles' distance above the upper quartile."""
    if not means:
        return 1.0, 2.0
    lower, upper = np.quantile(means, [0.25, 0.75])
    return min(means), max(mean for mean in means if mean <= max(upper + 1.5 * (upper - lower), min(means)))


def _set_frame(axes: "Axes", low: float, high: float) -> None:
    if axes.get_yscale() == "log":
        factor = (high / low) ** _ROOM
        axes.set_ylim(low / factor, high * factor**2)
        style.set_plain_ticks(axes)
    else:
        room = _ROOM * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - room, high + 2 * room)


def _label_rate_axis(axes: "Axes", rates: Sequence[float]) -> None:
    """Put ticks at powers of two if all rates are such, else at decades and as many numbers between as have room."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    grid = sorted(set(rates))
    if all(np.frexp(lr)[0] == 0.5 for lr in grid):
        ticks = grid[:: 1 + (len(grid) - 1) // _MAX_TICKS]
        labels = [f"$2^{{{np.log2(tick):.0f}}}$" for tick in ticks]
    else:
        distance = np.log(1.44 * grid[-1] / grid[0]) / (_MAX_TICKS + 1)  # closer labels would touch
        decades = range(math.floor(math.log10(grid[0])), math.ceil(math.log10(grid[-1])) + 1)
        for between in ((1, 2, 4, 6, 8), (1, 2, 5), (1, 3), (1,)):
            ticks = [tick for k in decades for n in between if grid[0] <= (tick := float(f"{n}e{k}")) <= grid[-1]]
            if all(np.diff(np.log(ticks)) >= distance):
                break
        ticks = ticks or grid[:_MAX_TICKS]
        labels = [format_lr(tick) for tick in ticks]
    axes.set_xlim(grid[0] / 1.2, grid[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate")


def _draw_line(axes: "Axes", results: Sequence[Result], line_style: dict[str, Any], with_paper: bool) -> None:
    edge = axes.get_ylim()[1]
    drawn = [(each.lr, each.mean, min(each.values), max(each.values)) for each in results if each.mean is not None]
    if drawn:
        rates, means, least, largest = zip(*drawn, strict=True)
        axes.plot(rates, means, linewidth=1.2, **line_style)
        if any(low != high for low, high in zip(least, largest, strict=True)):
            axes.fill_between(rates, least, largest, color=line_style["color"], alpha=0.18, linewidth=0)
    above = [each.lr for each in results if _is_above(each, edge)]
    diverged = [each.lr for each in results if each.count("diverged")]
    for marked, marker, size in ((above, r"$\uparrow$", 10), (diverged, "x", 6)):
        mark = {"linestyle": "", "marker": marker, "color": line_style["color"], "markersize": size}
        if marked:
            axes.plot(marked, [edge] * len(marked), clip_on=False, **mark)
    if with_paper:
        points = [(each.lr, mean) for each in results if (mean := each.paper_mean) is not None]
        if points:
            plain = {"color": line_style["color"], "marker": line_style["marker"], "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), linestyle=":", linewidth=1.0, **plain)


def _format_caption(report: Report, edge: float) -> str:
    """Return what the spans and marks mean that the figure has."""
    parts = ["Mean over seeds, shaded from the lowest to the highest."] * any(len(r.runs) > 1 for r in report.results)
    parts += ["Arrow at the upper edge: above the frame."] * any(_is_above(result, edge) for result in report.results)
    if any(result.count("diverged") for result in report.results):
        survivors = any(result.count("diverged") > 0 < len(result.values) for result in report.results)
        parts.append(f"Cross: diverged{'; a mean there is over the other seeds' * survivors}.")
    return " ".join(parts)


def _is_above(result: Result, edge: float) -> bool:
    return result.mean is not None and not result.mean <= edge
