"""Figures of losses: of one run, and of several settings side by side."""

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.experiments.report import style
from muown_train.runs.metrics import Line
from muown_train.runs.record import SMOOTHED, Group, RunRecord, Series, machines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = "loss (nats per token)"
_EARLY = 0.2  # the part of a run whose high losses may lie above the frame
_BESIDE = 34  # characters of an entry of a legend beside the axes
_CROWDED = 8  # with more settings than these single runs are not drawn
_FAR_APART = 10.0  # budgets that differ by this factor are drawn on a logarithmic axis

Curve = Callable[[RunRecord, str], Series]  # a loss against step, tokens or time
_CURVES: dict[str, Curve] = {
    "validation": lambda run, against: run.series("valid/loss", against),
    "training": lambda run, against: run.smoothed_training_loss(against),
}


def plot_losses(lines: Sequence[Line], path: Path, title: str, unigram: float | None = None) -> None:
    """Training and validation loss of one run against tokens, as a PNG."""
    styles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("train/loss", "training", {"linewidth": 0.8, "color": style.BLUE, "alpha": 0.7}),
        ("valid/loss", "validation", {"linewidth": 1.6, "color": style.VERMILLION, "marker": "o"}),
    )
    with style.new_figure(6, 3.6) as figure:
        axes = figure.subplots()
        for key, label, look in styles:
            points = [(line["tokens"], line[key]) for line in lines if isinstance(line.get(key), float)]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **look)
        if unigram is not None:
            axes.axhline(unigram, color="0.5", linewidth=0.8, linestyle="--", label="unigram model")
        axes.set(ylabel=LOSS, title=style.name(title, 80))
        style.count_axis(axes, "tokens")
        axes.legend()
        style.save(figure, [path])


def plot_comparison(
    groups: Sequence[Group], words: Sequence[Sequence[str]], paths: Sequence[Path], note: str = ""
) -> None:
    """Validation and training loss of settings against tokens and, if one kind of machine has trained all, wall time.

    The legend is beside the axes, or where its entries were long below them, a table with a column for each setting.

    Of a setting with several runs the thick line is the mean over those that finished (or, where none has, over those
    that did not diverge, as far as all of them have come), and thin ones are single runs. A run that diverged ends in a
    cross, at the frame's edge where it left the frame.

    Args:
        words: of each group as many, such as `Muown` and `lr=0.01`; those whose first
            one begins with the same word have one colour: see `style.of_lines`.
        note: follows the caption.
        paths: a file for each format.
    """
    looks = style.of_lines([each[0] for each in words])
    beside = len(words[0]) == 1 or max(len(" ".join(each)) for each in words) <= _BESIDE
    entries = [style.name(" ".join(each), _BESIDE) for each in words] if beside else style.aligned(words)
    lines = sum(1 + entry.count("\n") for entry in entries)
    height = max(5.2, 0.3 + 0.17 * lines) if beside else 5.2
    unit, unit_name = style.time_unit(max(run.last("time") or 0.0 for group in groups for run in group.runs))
    columns = {"tokens": 1.0} if len(machines(groups)) > 1 else {"tokens": 1.0, "time": unit}
    with style.new_figure(3 + 3 * len(columns), height) as figure:
        axes = figure.subplots(2, len(columns), sharey="row", sharex="col", squeeze=False)
        for row, (what, curve) in zip(axes, _CURVES.items(), strict=True):
            single = what == "validation" and len(groups) <= _CROWDED
            _frame(row[0], groups, curve)
            for column, (against, scale) in zip(row, columns.items(), strict=True):
                for group, look in zip(groups, looks, strict=True):
                    _draw(column, group, curve, against, scale, look, single)
            row[0].set_ylabel(f"{what} {LOSS}")
        labels = {"tokens": "tokens", "time": f"{unit_name} of training, without evaluation and saving"}
        for title, below, (against, scale) in zip(*axes, columns.items(), strict=True):
            title.set_title(f"against {against}")
            style.count_axis(below, labels[against], _least(groups, against, scale))
        if beside:
            handles = [axes[0, 0].plot([], [], label=e, **look)[0] for e, look in zip(entries, looks, strict=True)]
            figure.legend(handles=handles, loc="outside right upper", handlelength=3.5)
            style.caption(figure, caption(groups), note)
        else:
            style.table_below(figure, entries, looks, f"{caption(groups)} {note}")
        style.save(figure, paths)


def caption(groups: Sequence[Group]) -> str:
    """What a reader of the comparison must know."""
    parts = [f"Training loss: mean over {SMOOTHED:.0%} of a run's updates."]
    if any(len(group.runs) > 1 for group in groups):
        parts.append("Thick: mean over seeds" + ("; thin: single runs." if len(groups) <= _CROWDED else "."))
    if any(run.state == "diverged" for group in groups for run in group.runs):
        parts.append("Cross: diverged.")
    parts.append(f"The first {_EARLY:.0%} of a run may lie above the frame.")
    if len(machines(groups)) > 1:
        parts.append("Not against time: the runs were trained on different machines.")
    return " ".join(parts)


def mean_curve(runs: Sequence[RunRecord], curve: Curve, against: str) -> Series:
    """The mean of curves, and of their places, over the steps that all runs have."""
    curves = [curve(run, "step") for run in runs]
    places = [run.series(against) for run in runs]
    steps = reduce(np.intersect1d, [x for x, _ in (*curves, *places)])
    at = [x[np.isin(of, steps)] for of, x in places]
    values = [y[np.isin(of, steps)] for of, y in curves]
    return np.mean(at, axis=0), np.mean(values, axis=0)


def _draw(
    axes: "Axes", group: Group, curve: Curve, against: str, scale: float, look: dict[str, Any], single: bool
) -> None:
    plain = {key: value for key, value in look.items() if key != "marker"}
    averaged = _averaged(group)
    for run in group.runs:
        x, y = curve(run, against)
        if run not in averaged or (single and len(averaged) > 1):
            axes.plot(x / scale, y, linewidth=0.6, alpha=0.5, **plain)
        if run.state == "diverged" and np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            edge = axes.get_ylim()[1]
            axes.plot(x[last] / scale, min(y[last], edge), "x", color=look["color"], markersize=6, clip_on=False)
    if averaged:
        x, y = mean_curve(averaged, curve, against)
        # markers at tenths of the line tell lines apart without hiding them
        axes.plot(x / scale, y, linewidth=1.2, markevery=max(1, len(x) // 10), **look)


def _averaged(group: Group) -> Sequence[RunRecord]:
    """The runs that a group's line is the mean of."""
    return group.finished or [run for run in group.runs if run.state != "diverged"]


def _frame(axes: "Axes", groups: Sequence[Group], curve: Curve) -> None:
    """Frame what comes after the first updates, where the differences are; all there is, where nothing comes after."""
    late, all_of_them = [np.empty(0)], [np.empty(0)]
    for runs in [found for group in groups if (found := _averaged(group))] or [group.runs for group in groups]:
        x, y = mean_curve(runs, curve, "step")
        planned = max(run.steps or run.step for run in runs)
        late.append(y[(x >= _EARLY * planned) & np.isfinite(y)])
        all_of_them.append(y[np.isfinite(y)])
    values = np.concatenate(late)
    if not len(values):
        values = np.concatenate(all_of_them)
    if len(values) and values.max() > values.min():
        room = 0.07 * (values.max() - values.min())
        axes.set_ylim(values.min() - room, values.max() + room)


def _least(groups: Sequence[Group], key: str, scale: float) -> float | None:
    """Where a logarithmic axis is to begin, if the runs that finished end far apart."""
    ends = [end for group in groups for run in group.finished if (end := run.last(key))]
    return _EARLY / 10 * min(ends) / scale if ends and max(ends) > _FAR_APART * min(ends) else None
