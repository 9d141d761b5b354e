"""Figures of what is measured besides losses: spectra, effective ranks, gradient noise, step times."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import style
from muown_train.experiments.report.matrix_stats import RANK, SPECTRAL, Measured, OfMatrix, Spread, all_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from muown_train.experiments.report.results import Report

_COLUMN, _ROW, _LEGEND = 1.45, 1.5, 1.6  # inches
_DEPTHS = (4 / 22, 8 / 22, 12 / 22, 16 / 22)  # the blocks of 22 that the paper shows one by one
_DEPTH = _DEPTHS[-1]  # and that whose singular values it shows
_BINS = 30


def plot_spectral(report: "Report", paths: Sequence[Path]) -> bool:
    """The factors of Proposition 1 of each kind of matrix against the update: median and span of all layers."""
    rows = [(quantity, None, f"{quantity.title}\n{quantity.symbol}") for quantity in SPECTRAL]
    return _grid(report, rows, paths, "log")


def plot_blocks(quantity: OfMatrix, report: "Report", paths: Sequence[Path]) -> bool:
    """One of the factors in some blocks, one by one."""
    rows = [(quantity, layer, f"block {layer + 1}\n{quantity.symbol}") for layer in shown_blocks(report.measured)]
    return _grid(report, rows, paths, "log")


def plot_effective_rank(report: "Report", paths: Sequence[Path]) -> bool:
    """The normalised effective rank of minibatch gradients: median and span of all layers."""
    return _grid(report, [(RANK, None, RANK.title.replace(" ", "\n", 1))], paths, "linear")


def plot_singular_values(report: "Report", paths: Sequence[Path]) -> bool:
    """Histograms and distributions of the singular values of a late block after the last update measured."""
    lines = report.measured
    layers = all_layers(lines)
    if not layers:
        return False
    block = layers[_at_depth(_DEPTH, len(layers))]
    found = {kind: [line.singular_values(kind, block) for line in lines] for kind in _kinds(lines)}
    kinds = [kind for kind, of_kind in found.items() if any(len(parts) for parts, _ in of_kind)]
    if not kinds:
        return False
    looks = [look | {"linestyle": style.LINES[i % 4]} for i, look in enumerate(_looks(lines))]  # there are no markers
    with _figure(len(kinds), 2) as figure:
        axes = figure.subplots(2, len(kinds), squeeze=False)
        for column, kind in enumerate(kinds):
            above, below = axes[:, column]
            above.set_title(kind)
            largest = max((values[-1] for _, values in found[kind] if len(values)), default=1.0)
            for (parts, values), look in zip(found[kind], looks, strict=True):
                if not len(parts):
                    continue
                plain = {"color": look["color"], "linestyle": look["linestyle"]}
                spread = np.interp(np.linspace(0, 1, 4000), parts, values)  # as many as the quantile function gives
                density, edges = np.histogram(spread, _BINS, (0, largest), density=True)
                above.stairs(density, edges, linewidth=1.0, **plain)
                below.plot(parts, values, linewidth=1.1, **plain)
            above.set_xlabel("singular value")
            below.set_xlabel("fraction below")
        axes[0, 0].set_ylabel("density")
        axes[1, 0].set_ylabel("singular value")
        _legend(figure, axes[0, 0], lines, looks, markers=False)
        style.caption(figure, f"Block {block + 1}, after the last update that was measured.", report.of_scale)
        style.save(figure, paths)
    return True


def plot_noise(report: "Report", paths: Sequence[Path]) -> bool:
    """The noise terms of Muon and Muown at checkpoints, and their ratio: medians and quartiles over matrices."""
    lines = report.measured
    terms = [(line, key, line.spread(key)) for line in lines for key in ("muon", "muown")]
    terms = [(line, key, spread) for line, key, spread in terms if len(spread.steps)]
    if not terms:
        return False
    names = {"muon": r"$\zeta_W\sigma_W$", "muown": r"$\zeta_g\sigma_g+\zeta_R\sigma_R$"}
    looks = style.of_lines([key for _, key, _ in terms])
    with style.new_figure(8.4, 2.8) as figure:
        left, right = figure.subplots(1, 2)
        for i, ((line, key, spread), look) in enumerate(zip(terms, looks, strict=True)):
            label = f"{names[key]} along {style.name(line.label, 60)}"
            _draw_quartiles(left, spread, i - (len(terms) - 1) / 2, label, look)
        left.set(ylabel="noise term", yscale="log")
        style.plain_ticks(left)
        ratios = [(line, line.spread("muon/muown")) for line in lines]
        ratios = [(line, spread) for line, spread in ratios if len(spread.steps)]
        looks = style.of_lines([line.label for line, _ in ratios])
        for i, ((line, spread), look) in enumerate(zip(ratios, looks, strict=True)):
            label = f"ratio along {style.name(line.label, 60)}"
            _draw_quartiles(right, spread, i - (len(ratios) - 1) / 2, label, look | {"color": style.BLACK})
        right.axhline(1, color="0.35", linewidth=0.8, linestyle=":")
        right.set(ylabel=f"{names['muon']} / ({names['muown']})")
        for axes in (left, right):
            style.count_axis(axes, "update")
        figure.legend(loc="outside right upper", handlelength=3.0)
        style.caption(figure, "Medians over matrices, with quartiles; points are beside one another.", report.of_scale)
        style.save(figure, paths)
    return True


def plot_step_times(report: "Report", paths: Sequence[Path]) -> bool:
    """Median and quartiles of the time of an update; the paper's median as an open square."""
    columns, found = dict(report.columns()), []
    for result in report.results:
        times = [run.step_times for run in result.done if len(run.step_times)]
        if times:
            name = columns[result.series.key, result.value]
            found.append((name, np.quantile(np.concatenate(times), (0.25, 0.5, 0.75)), result.of_paper[0]))
    if not found:
        return False
    with style.new_figure(5.4, 0.7 + 0.32 * len(found)) as figure:
        axes = figure.subplots()
        for row, (_, (low, median, high), of_paper) in enumerate(found):
            axes.errorbar(
                median, row, xerr=[[median - low], [high - median]], fmt="o", color=style.BLUE, capsize=3, linewidth=1.2
            )
            if report.comparable and of_paper is not None:
                axes.plot(of_paper, row, "s", color=style.VERMILLION, markerfacecolor="none")
        axes.set_yticks(range(len(found)), [name for name, _, _ in found])
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set_xlabel("seconds an update")
        paper = " Open square: the paper's median." * report.comparable
        style.caption(figure, f"Circle: median, with quartiles.{paper}", report.of_scale)
        style.save(figure, paths)
    return True


def shown_blocks(lines: Sequence[Measured]) -> list[int]:
    """The blocks that are shown one by one: all of a few, else those at the depths of the paper's."""
    layers = all_layers(lines)
    if len(layers) <= 4:
        return layers
    return [layers[at] for at in sorted({_at_depth(depth, len(layers)) for depth in _DEPTHS})]


def _at_depth(depth: float, layers: int) -> int:
    return max(0, round(depth * layers) - 1)


def _kinds(lines: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(kind for line in lines for kind in line.kinds()))


def _looks(lines: Sequence[Measured]) -> list[dict[str, Any]]:
    return style.of_lines([line.label for line in lines])


def _figure(columns: int, rows: int) -> Any:
    return style.new_figure(max(4.5, _LEGEND + _COLUMN * columns), 0.6 + _ROW * rows)


def _grid(
    report: "Report", rows: Sequence[tuple[OfMatrix, int | None, str]], paths: Sequence[Path], scale: str
) -> bool:
    """A panel for each kind of matrix and each row, with a line for each setting."""
    lines = report.measured
    kinds, looks = _kinds(lines), _looks(lines)
    if not kinds or not any(len(line.spread(rows[0][0].key).steps) for line in lines):
        return False
    with _figure(len(kinds), len(rows)) as figure:
        axes = figure.subplots(len(rows), len(kinds), sharex=True, sharey="row", squeeze=False)
        for row, (quantity, layer, label) in zip(axes, rows, strict=True):
            for panel, kind in zip(row, kinds, strict=True):
                for line, look in zip(lines, looks, strict=True):
                    _draw(panel, line.spread(quantity, kind, layer), look)
            row[0].set(ylabel=label, yscale=scale)
            if scale == "log":
                style.plain_ticks(row[0])
        for panel, kind in zip(axes[0], kinds, strict=True):
            panel.set_title(kind)
        for panel in axes[-1]:
            style.count_axis(panel, "update")
            panel.locator_params(axis="x", nbins=3)
        _legend(figure, axes[0, 0], lines, looks)
        of_all = rows[0][1] is None and any(len(line.layers()) > 1 or len(line.runs) > 1 for line in lines)
        spread = "Lines: medians over layers and seeds; shaded: from the least to the largest." * of_all
        style.caption(figure, spread, report.of_scale)
        style.save(figure, paths)
    return True


def _draw(axes: "Axes", found: Spread, look: dict[str, Any]) -> None:
    if not len(found.steps):
        return
    axes.plot(found.steps, found.median, linewidth=1.2, markevery=max(1, len(found.steps) // 5), **look)
    axes.fill_between(
        found.steps, found.quantiles[0], found.quantiles[-1], color=look["color"], alpha=0.15, linewidth=0
    )


def _draw_quartiles(axes: "Axes", found: Spread, shift: float, label: str, look: dict[str, Any]) -> None:
    """Shifted by so many sixtieths of the width: bands of several lines with few points would hide one another."""
    low, high = found.median - found.quantiles[1], found.quantiles[3] - found.median
    at = found.steps + shift / 60 * found.steps[-1]
    axes.errorbar(at, found.median, yerr=[low, high], linewidth=1.2, elinewidth=0.8, capsize=2, label=label, **look)


def _legend(
    figure: "Figure", axes: "Axes", lines: Sequence[Measured], looks: Sequence[dict[str, Any]], markers: bool = True
) -> None:
    handles = []
    for line, look in zip(lines, looks, strict=True):
        look = look if markers else {key: value for key, value in look.items() if key != "marker"}
        handles += axes.plot([], [], label=style.name(line.label, 22), **look)
    figure.legend(handles=handles, loc="outside right upper", handlelength=3.0)


FIGURES: dict[str, dict[str, Callable[["Report", Sequence[Path]], bool]]] = {
    "spectral": {
        "figure": plot_spectral,
        **{f"blocks_{quantity.key}": partial(plot_blocks, quantity) for quantity in SPECTRAL},
        "singular_values": plot_singular_values,
    },
    "effective_rank": {"figure": plot_effective_rank},
    "gradient_noise": {"figure": plot_noise},
    "step_time": {"figure": plot_step_times},
}
