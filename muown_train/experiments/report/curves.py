"""Figures of losses, of one run and of several settings side by side."""

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import style
from muown_train.runs.metrics import Line
from muown_train.runs.record import SMOOTHED, RunGroup, RunRecord, Series, list_devices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = "loss (nats per token)"
_EARLY = 0.2  # the share of a run, from its start, whose high losses may lie above the frame
_MAX_ENTRY = 34  # characters of an entry of a legend beside the axes
_CROWDED = 8  # single runs are drawn of this many settings at most
_FAR_APART = 10.0  # budgets that differ by more than this factor are drawn on a logarithmic axis

LossReader = Callable[[RunRecord, str], Series]  # returns a loss against step, tokens or time
_LOSSES: dict[str, LossReader] = {
    "validation": lambda run, against: run.series("valid/loss", against),
    "training": lambda run, against: run.smooth_training_loss(against),
}


def plot_losses(lines: Sequence[Line], path: Path, title: str, unigram: float | None = None) -> None:
    """Draw training and validation loss of one run against tokens, as a PNG."""
    styles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("train/loss", "training", {"linewidth": 0.8, "color": style.BLUE, "alpha": 0.7}),
        ("valid/loss", "validation", {"linewidth": 1.6, "color": style.VERMILLION, "marker": "o"}),
    )
    with style.new_figure(6, 3.6) as figure:
        axes = figure.subplots()
        for key, label, line_style in styles:
            points = [(line["tokens"], line[key]) for line in lines if isinstance(line.get(key), float)]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **line_style)
        if unigram is not None:
            axes.axhline(unigram, color="0.5", linewidth=0.8, linestyle="--", label="unigram model")
        axes.set(ylabel=LOSS, title=style.format_name(title, 80))
        style.label_count_axis(axes, "tokens")
        axes.legend()
        style.save_figure(figure, [path])


def plot_comparison(
    groups: Sequence[RunGroup], words: Sequence[Sequence[str]], paths: Sequence[Path], note: str = ""
) -> None:
    """Draw validation and training loss of settings against tokens and, if one kind of machine trained all, wall time.

    The legend is beside the axes; where its entries would be long it is a table below them, with a column for each key.

    For a setting with several runs the thick line is the mean over those that finished (or, where none has, over those
    that did not diverge, up to the step that all of them have reached), and thin lines are single runs. A run that
    diverged ends in a cross, at the frame's edge where it left the frame.

    Args:
        words: the words that name each group, such as `Muown` and `lr=0.01`, the same number for all; lines whose first
            words are equal have one colour (see `style.choose_styles`).
        paths: a file for each format.
        note: a sentence that follows the caption.
    """
    styles = style.choose_styles([each[0] for each in words])
    beside = len(words[0]) == 1 or max(len(" ".join(each)) for each in words) <= _MAX_ENTRY
    entries = (
        [style.format_name(" ".join(each), _MAX_ENTRY) for each in words] if beside else style.align_columns(words)
    )
    lines = sum(1 + entry.count("\n") for entry in entries)
    height = max(5.2, 0.3 + 0.17 * lines) if beside else 5.2
    unit, unit_name = style.choose_time_unit(max(run.last("time") or 0.0 for group in groups for run in group.runs))
    columns = {"tokens": 1.0} if len(list_devices(groups)) > 1 else {"tokens": 1.0, "time": unit}
    with style.new_figure(3 + 3 * len(columns), height) as figure:
        axes = figure.subplots(2, len(columns), sharey="row", sharex="col", squeeze=False)
        for row, (kind, read_loss) in zip(axes, _LOSSES.items(), strict=True):
            single = kind == "validation" and len(groups) <= _CROWDED
            _set_frame(row[0], groups, read_loss)
            for column, (against, scale) in zip(row, columns.items(), strict=True):
                for group, line_style in zip(groups, styles, strict=True):
                    _draw_group(column, group, read_loss, against, scale, line_style, single)
            row[0].set_ylabel(f"{kind} {LOSS}")
        labels = {"tokens": "tokens", "time": f"{unit_name} of training, without evaluation and saving"}
        for title, below, (against, scale) in zip(*axes, columns.items(), strict=True):
            title.set_title(f"against {against}")
            style.label_count_axis(below, labels[against], _choose_axis_start(groups, against, scale))
        if beside:
            named = zip(entries, styles, strict=True)
            handles = [axes[0, 0].plot([], [], label=entry, **line_style)[0] for entry, line_style in named]
            figure.legend(handles=handles, loc="outside right upper", handlelength=3.5)
            style.add_caption(figure, format_caption(groups), note)
        else:
            style.add_table_legend(figure, entries, styles, f"{format_caption(groups)} {note}")
        style.save_figure(figure, paths)


def format_caption(groups: Sequence[RunGroup]) -> str:
    """Return what a reader of the comparison must know."""
    parts = [f"Training loss: mean over {SMOOTHED:.0%} of a run's steps."]
    if any(len(group.runs) > 1 for group in groups):
        parts.append("Thick: mean over seeds" + ("; thin: single runs." if len(groups) <= _CROWDED else "."))
    if any(run.state == "diverged" for group in groups for run in group.runs):
        parts.append("Cross: diverged.")
    parts.append(f"The first {_EARLY:.0%} of a run may lie above the frame.")
    if len(list_devices(groups)) > 1:
        parts.append("Not against time: the runs were trained on different machines.")
    return " ".join(parts)


def average_losses(runs: Sequence[RunRecord], read_loss: LossReader, against: str) -> Series:
    """Return the mean of a loss over runs, and that of `against`, at the steps that all runs have."""
    losses = [read_loss(run, "step") for run in runs]
    places = [run.series(against) for run in runs]
    steps = reduce(np.intersect1d, [x for x, _ in (*losses, *places)])
    positions = [x[np.isin(of, steps)] for of, x in places]
    values = [y[np.isin(of, steps)] for of, y in losses]
    return np.mean(positions, axis=0), np.mean(values, axis=0)


def _draw_group(
    axes: "Axes",
    group: RunGroup,
    read_loss: LossReader,
    against: str,
    scale: float,
    line_style: dict[str, Any],
    single: bool,
) -> None:
    plain = {key: value for key, value in line_style.items() if key != "marker"}
    averaged = _list_averaged_runs(group)
    for run in group.runs:
        x, y = read_loss(run, against)
        if run not in averaged or (single and len(averaged) > 1):
            axes.plot(x / scale, y, linewidth=0.6, alpha=0.5, **plain)
        if run.state == "diverged" and np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            edge = axes.get_ylim()[1]
            axes.plot(x[last] / scale, min(y[last], edge), "x", color=line_style["color"], markersize=6, clip_on=False)
    if averaged:
        x, y = average_losses(averaged, read_loss, against)
        # markers at every tenth of a line tell lines apart without hiding them
        axes.plot(x / scale, y, linewidth=1.2, markevery=max(1, len(x) // 10), **line_style)


def _list_averaged_runs(group: RunGroup) -> Sequence[RunRecord]:
    """Return the runs that the line of a group is the mean of."""
    return group.finished or [run for run in group.runs if run.state != "diverged"]


def _set_frame(axes: "Axes", groups: Sequence[RunGroup], read_loss: LossReader) -> None:
    """Frame the losses after the first steps, where the differences are, or all losses if there are no later ones."""
    late, all_losses = [np.empty(0)], [np.empty(0)]
    averaged = [runs for group in groups if (runs := _list_averaged_runs(group))]
    for runs in averaged or [group.runs for group in groups]:
        x, y = average_losses(runs, read_loss, "step")
        planned = max(run.steps or run.step for run in runs)
        late.append(y[(x >= _EARLY * planned) & np.isfinite(y)])
        all_losses.append(y[np.isfinite(y)])
    values = np.concatenate(late)
    if not len(values):
        values = np.concatenate(all_losses)
    if len(values) and values.max() > values.min():
        room = 0.07 * (values.max() - values.min())
        axes.set_ylim(values.min() - room, values.max() + room)


def _choose_axis_start(groups: Sequence[RunGroup], key: str, scale: float) -> float | None:
    """Return where a logarithmic axis begins, if the runs that finished end far apart."""
    ends = [end for group in groups for run in group.finished if (end := run.last(key))]
    return _EARLY / 10 * min(ends) / scale if ends and max(ends) > _FAR_APART * min(ends) else None
