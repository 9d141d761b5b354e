"""Figures of what is measured besides losses: spectra, effective ranks, gradient noise, step times, copying.

The functions that draw a figure take a file for each format and return whether there was something to draw.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import style
from muown_train.experiments.report.matrix_stats import (
    RANK,
    SPECTRAL,
    MatrixQuantity,
    MatrixStats,
    Spread,
    list_kinds,
    list_layers,
)
from muown_train.experiments.report.results import Report
from muown_train.experiments.report.stat_tables import COPYING
from muown_train.runs.record import RunRecord
from muown_train.runtime.formatting import format_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMN, _ROW, _LEGEND = 1.45, 1.5, 1.6  # inches
_DEPTHS = (4 / 22, 8 / 22, 12 / 22, 16 / 22)  # the paper shows these of 22 blocks one by one
_DEPTH = _DEPTHS[-1]  # the paper shows the singular values of this one
_BINS = 30


def plot_spectral(report: Report, paths: Sequence[Path]) -> bool:
    """Draw the factors of Proposition 1 for each kind of matrix against the step: median and span of all layers."""
    rows = [(quantity, None, f"{quantity.title}\n{quantity.symbol}") for quantity in SPECTRAL]
    return _plot_grid(report, rows, paths, "log")


def plot_blocks(quantity: MatrixQuantity, report: Report, paths: Sequence[Path]) -> bool:
    """Draw one of the factors in some blocks, one by one."""
    rows = [(quantity, layer, f"block {layer + 1}\n{quantity.symbol}") for layer in choose_blocks(report.stats)]
    return _plot_grid(report, rows, paths, "log")


def plot_effective_rank(report: Report, paths: Sequence[Path]) -> bool:
    """Draw the normalised effective rank of minibatch gradients: median and span of all layers."""
    return _plot_grid(report, [(RANK, None, RANK.title.replace(" ", "\n", 1))], paths, "linear")


def plot_singular_values(report: Report, paths: Sequence[Path]) -> bool:
    """Draw histograms and distributions of the singular values of a late block after the last measured step."""
    lines = report.stats
    layers = list_layers(lines)
    if not layers:
        return False
    block = layers[_find_layer_at(_DEPTH, len(layers))]
    by_kind = {kind: [line.get_singular_values(kind, block) for line in lines] for kind in list_kinds(lines)}
    kinds = [kind for kind, curves in by_kind.items() if any(len(shares) for shares, _ in curves)]
    if not kinds:
        return False
    # these lines have no markers, so that they must differ otherwise
    styles = style.choose_styles([line.label for line in lines])
    styles = [line_style | {"linestyle": style.LINES[i % 4]} for i, line_style in enumerate(styles)]
    with _new_figure(len(kinds), 2) as figure:
        axes = figure.subplots(2, len(kinds), squeeze=False)
        for column, kind in enumerate(kinds):
            above, below = axes[:, column]
            above.set_title(kind)
            largest = max((values[-1] for _, values in by_kind[kind] if len(values)), default=1.0)
            for (shares, values), line_style in zip(by_kind[kind], styles, strict=True):
                if not len(shares):
                    continue
                plain = {"color": line_style["color"], "linestyle": line_style["linestyle"]}
                spread = np.interp(np.linspace(0, 1, 4000), shares, values)
                density, edges = np.histogram(spread, _BINS, (0, largest), density=True)
                above.stairs(density, edges, linewidth=1.0, **plain)
                below.plot(shares, values, linewidth=1.1, **plain)
            above.set_xlabel("singular value")
            below.set_xlabel("fraction below")
        axes[0, 0].set_ylabel("density")
        axes[1, 0].set_ylabel("singular value")
        _add_legend(figure, axes[0, 0], lines, styles, markers=False)
        style.add_caption(figure, f"Block {block + 1}, after the last step that was measured.", report.scale_note)
        style.save_figure(figure, paths)
    return True


def plot_noise(report: Report, paths: Sequence[Path]) -> bool:
    """Draw the noise terms of Muon and Muown at checkpoints, and their ratio: medians and quartiles over matrices."""
    lines = report.stats
    terms = [(line, key, line.compute_spread(key)) for line in lines for key in ("muon", "muown")]
    terms = [(line, key, spread) for line, key, spread in terms if len(spread.steps)]
    if not terms:
        return False
    names = {"muon": r"$\zeta_W\sigma_W$", "muown": r"$\zeta_g\sigma_g+\zeta_R\sigma_R$"}
    styles = style.choose_styles([key for _, key, _ in terms])
    with style.new_figure(8.4, 2.8) as figure:
        left, right = figure.subplots(1, 2)
        for i, ((line, key, spread), line_style) in enumerate(zip(terms, styles, strict=True)):
            label = f"{names[key]} along {style.format_name(line.label, 60)}"
            _draw_quartiles(left, spread, i - (len(terms) - 1) / 2, label, line_style)
        left.set(ylabel="noise term", yscale="log")
        style.set_plain_ticks(left)
        ratios = [(line, line.compute_spread("muon/muown")) for line in lines]
        ratios = [(line, spread) for line, spread in ratios if len(spread.steps)]
        styles = style.choose_styles([line.label for line, _ in ratios])
        for i, ((line, spread), line_style) in enumerate(zip(ratios, styles, strict=True)):
            label = f"ratio along {style.format_name(line.label, 60)}"
            _draw_quartiles(right, spread, i - (len(ratios) - 1) / 2, label, line_style | {"color": style.BLACK})
        right.axhline(1, color="0.35", linewidth=0.8, linestyle=":")
        right.set(ylabel=f"{names['muon']} / ({names['muown']})")
        for axes in (left, right):
            style.label_count_axis(axes, "step")
        figure.legend(loc="outside right upper", handlelength=3.0)
        caption = "Medians over matrices, with quartiles; points are beside one another."
        style.add_caption(figure, caption, report.scale_note)
        style.save_figure(figure, paths)
    return True


def plot_step_times(report: Report, paths: Sequence[Path]) -> bool:
    """Draw median and quartiles of the time of a step, and the paper's median as an open square."""
    rows = []
    for result in report.results:
        times = [run.step_times for run in result.done if len(run.step_times)]
        if times:
            quartiles = np.quantile(np.concatenate(times), (0.25, 0.5, 0.75))
            rows.append((report.names[result.key], quartiles, result.paper_mean))
    if not rows:
        return False
    with style.new_figure(5.4, 0.7 + 0.32 * len(rows)) as figure:
        axes = figure.subplots()
        for row, (_, (low, median, high), paper_mean) in enumerate(rows):
            whiskers = [[median - low], [high - median]]
            axes.errorbar(median, row, xerr=whiskers, fmt="o", color=style.BLUE, capsize=3, linewidth=1.2)
            if report.is_comparable and paper_mean is not None:
                axes.plot(paper_mean, row, "s", color=style.VERMILLION, markerfacecolor="none")
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set_xlabel("seconds per step")
        paper = " Open square: the paper's median." * report.is_comparable
        style.add_caption(figure, f"Circle: median, with quartiles.{paper}", report.scale_note)
        style.save_figure(figure, paths)
    return True


def plot_copying(report: Report, paths: Sequence[Path]) -> bool:
    """Draw what copying is worth on random tokens and in text, and the loss, in a column for each learning rate.

    Each run has a line, since a mean over runs of which some copy is the loss of none.
    """
    results = [result for result in report.results if any(len(run.series(COPYING)[0]) for run in result.done)]
    if not results:
        return False
    rows = {
        COPYING: "random tokens:\nsecond - first",
        "copying/late_minus_early": "text:\nlate - early",
        "valid/loss": "validation loss",
    }
    rates = sorted({result.lr for result in results})
    names = list(dict.fromkeys(report.names[result.key] for result in results))
    styles = dict(zip(names, style.choose_styles(names), strict=True))
    with style.new_figure(_LEGEND + 2.0 * len(rates) + 0.6, 0.6 + 1.4 * len(rows)) as figure:
        axes = figure.subplots(len(rows), len(rates), sharex=True, sharey="row", squeeze=False)
        for row, (key, label) in zip(axes, rows.items(), strict=True):
            row[0].set_ylabel(label)
            for result in results:
                panel, look = row[rates.index(result.lr)], styles[report.names[result.key]]
                for run in result.done:
                    panel.plot(*run.series(key), linewidth=0.8, color=look["color"], linestyle=look["linestyle"])
        losses = [loss for result in results for run in result.done for loss in _list_late_losses(run)]
        axes[-1, 0].set_ylim(min(losses) - 0.05, max(losses) + 0.05)
        for panel, lr in zip(axes[0], rates, strict=True):
            panel.set_title(f"lr {format_lr(lr)}")
        for panel in axes[-1]:
            style.label_count_axis(panel, "step")
        lines = [{key: value for key, value in look.items() if key != "marker"} for look in styles.values()]
        handles = [
            axes[0, 0].plot([], [], label=style.format_name(name, 26), **look)[0]
            for name, look in zip(names, lines, strict=True)
        ]
        figure.legend(handles=handles, loc="outside right upper", handlelength=3.0)
        caption = "A line for each run; differences in nats. The losses of the first half may lie above the frame."
        style.add_caption(figure, caption, report.scale_note)
        style.save_figure(figure, paths)
    return True


def _list_late_losses(run: RunRecord) -> list[float]:
    steps, losses = run.series("valid/loss")
    return [loss for step, loss in zip(steps.tolist(), losses.tolist(), strict=True) if 2 * step >= steps[-1]]


def choose_blocks(lines: Sequence[MatrixStats]) -> list[int]:
    """Return the blocks to show one by one: all of up to four, else those at the depths that the paper shows."""
    layers = list_layers(lines)
    if len(layers) <= 4:
        return layers
    return [layers[at] for at in sorted({_find_layer_at(depth, len(layers)) for depth in _DEPTHS})]


def _find_layer_at(depth: float, layers: int) -> int:
    return max(0, round(depth * layers) - 1)


def _new_figure(columns: int, rows: int) -> Any:
    return style.new_figure(max(4.5, _LEGEND + _COLUMN * columns), 0.6 + _ROW * rows)


def _plot_grid(
    report: Report, rows: Sequence[tuple[MatrixQuantity, int | None, str]], paths: Sequence[Path], scale: str
) -> bool:
    """Draw a panel for each kind of matrix and each row, with a line for each setting.

    Args:
        rows: the quantity, the layer (None for all) and the label of each.
        scale: of the y axes.
    """
    lines = report.stats
    kinds, styles = list_kinds(lines), style.choose_styles([line.label for line in lines])
    if not kinds or not any(len(line.compute_spread(rows[0][0].key).steps) for line in lines):
        return False
    with _new_figure(len(kinds), len(rows)) as figure:
        axes = figure.subplots(len(rows), len(kinds), sharex=True, sharey="row", squeeze=False)
        for row, (quantity, layer, label) in zip(axes, rows, strict=True):
            for panel, kind in zip(row, kinds, strict=True):
                for line, line_style in zip(lines, styles, strict=True):
                    _draw_spread(panel, line.compute_spread(quantity, kind, layer), line_style)
            row[0].set(ylabel=label, yscale=scale)
            if scale == "log":
                style.set_plain_ticks(row[0])
        for panel, kind in zip(axes[0], kinds, strict=True):
            panel.set_title(kind)
        for panel in axes[-1]:
            style.label_count_axis(panel, "step")
            panel.locator_params(axis="x", nbins=3)
        _add_legend(figure, axes[0, 0], lines, styles)
        over_layers = rows[0][1] is None and any(len(list_layers([line])) > 1 or len(line.runs) > 1 for line in lines)
        caption = "Lines: medians over layers and seeds; shaded: from the least to the largest." * over_layers
        style.add_caption(figure, caption, report.scale_note)
        style.save_figure(figure, paths)
    return True


def _draw_spread(axes: "Axes", spread: Spread, line_style: dict[str, Any]) -> None:
    if not len(spread.steps):
        return
    axes.plot(spread.steps, spread.median, linewidth=1.2, markevery=max(1, len(spread.steps) // 5), **line_style)
    least, *_, largest = spread.quantiles
    axes.fill_between(spread.steps, least, largest, color=line_style["color"], alpha=0.15, linewidth=0)


def _draw_quartiles(axes: "Axes", spread: Spread, shift: float, label: str, line_style: dict[str, Any]) -> None:
    """Draw error bars, shifted by `shift` sixtieths of the width so that those of several lines stay apart."""
    low, high = spread.median - spread.quantiles[1], spread.quantiles[3] - spread.median
    at = spread.steps + shift / 60 * spread.steps[-1]
    axes.errorbar(
        at, spread.median, yerr=[low, high], linewidth=1.2, elinewidth=0.8, capsize=2, label=label, **line_style
    )


def _add_legend(
    figure: "Figure", axes: "Axes", lines: Sequence[MatrixStats], styles: Sequence[dict[str, Any]], markers: bool = True
) -> None:
    handles = []
    for line, line_style in zip(lines, styles, strict=True):
        line_style = line_style if markers else {key: value for key, value in line_style.items() if key != "marker"}
        handles += axes.plot([], [], label=style.format_name(line.label, 22), **line_style)
    figure.legend(handles=handles, loc="outside right upper", handlelength=3.0)


FIGURES: dict[str, dict[str, Callable[[Report, Sequence[Path]], bool]]] = {
    "spectral": {
        "figure": plot_spectral,
        **{f"blocks_{quantity.key}": partial(plot_blocks, quantity) for quantity in SPECTRAL},
        "singular_values": plot_singular_values,
    },
    "effective_rank": {"figure": plot_effective_rank},
    "gradient_noise": {"figure": plot_noise},
    "step_time": {"figure": plot_step_times},
    "copying": {"figure": plot_copying},
}
