"""How figures look: readable in print, in grey, and by those who see few colours.

The palette is that of Okabe and Ito (Color Universal Design, 2008) without its yellow, which is lost on white.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.runtime.formatting import format_count

if TYPE_CHECKING:  # a run that only trains does not load matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
_OPTIMIZERS = ("muown", "muon", "normuon", "adamw", "soap", "lion")  # that have the first colours
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"
_LONGEST = 20  # letters of a value in a legend
_TICKS = 3  # that a logarithmic axis has at least
_LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # letters stay letters, as journals ask
    "savefig.dpi": 200,
}


@contextmanager
def new_figure(width: float, height: float) -> Iterator["Figure"]:
    """A figure of this size in inches, whose parts make room for one another; nothing global is changed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_LOOK):
        yield Figure(figsize=(width, height), layout="constrained")


def of_lines(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, line and marker of each line; no two look the same up to 28 lines.

    Args:
        labels: of lines, of which those that begin with the same word have one colour, if there are others and colours
            for all; an optimizer the same one in every figure. Else every line has the next colour.
    """
    families = [label.partition(" ")[0].rstrip(",").lower() for label in labels]
    if len(set(families)) == 1:
        families = list(labels)
    own = {family: _OPTIMIZERS.index(family) for family in families if family in _OPTIMIZERS}
    free = iter([colour for colour in range(len(COLOURS)) if colour not in own.values()])
    for family in dict.fromkeys(families):
        if family not in own:
            own[family] = next(free, len(COLOURS))
    looks = []
    for index, family in enumerate(families):
        if max(own.values()) < len(COLOURS):
            colour, turn = own[family], families[:index].count(family)
            marker = colour + turn
        else:
            turn, colour = divmod(index, len(COLOURS))
            marker = index + turn
        look = {
            "color": COLOURS[colour],
            "linestyle": LINES[turn % len(LINES)],
            "marker": MARKERS[marker % len(MARKERS)],
        }
        looks.append(look)
    return looks


def count_axis(axes: "Axes", label: str, least: float | None = None) -> None:
    """The x axis counts something: 10M, 2.5B.

    Args:
        least: where a logarithmic axis begins; None for a linear one.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if least is not None:
        axes.set_xscale("log", nonpositive="mask")
        axes.set_xlim(left=least)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))


def plain_ticks(axes: "Axes") -> None:
    """The y axis, logarithmic over few decades, has numbers such as 0.15 or 20 instead of powers of ten."""
    low, high = axes.get_ylim()
    for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), np.arange(1, 10, 0.5), np.arange(1, 10, 0.1)):
        ticks = [tick for k in range(-9, 9) for part in parts if low <= (tick := float(f"{part:g}e{k}")) <= high]
        if len(ticks) >= _TICKS:
            break
    if len(ticks) >= 2:
        axes.set_yticks(ticks[:: 1 + len(ticks) // (2 * _TICKS)], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")


def name(text: str, width: int) -> str:
    """A name of a run or a setting in a figure: as it is but for powers of two, in lines of so many characters."""
    return re.sub(r"\b2\^(-?\d+)\b", r"$2^{\1}$", fill(text, width).replace("$", r"\$"))


def aligned(words: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table for a legend in letters of one width, its head first.

    Args:
        words: of each row as many, `key=value`, or a value alone, which is an optimizer, a model, a schedule.
    """
    columns = []
    for column in zip(*words, strict=True):
        key = column[0].partition("=")[0]
        if not all(word.startswith(f"{key}=") for word in column):
            key = ""
        values = _short([word.removeprefix(f"{key}=") for word in column])
        width = max(map(len, (key, *values)))
        columns.append([text.ljust(width) for text in (key, *values)])
    return ["  ".join(row).rstrip().replace("$", r"\$") for row in zip(*columns, strict=True)]


def _short(values: Sequence[str]) -> list[str]:
    """Three digits of numbers and the last letters of texts, where no two values become the same."""

    def short(value: str) -> str:
        try:
            return f"{float(value):.3g}"
        except ValueError:
            return value if len(value) <= _LONGEST else f"…{value[1 - _LONGEST :]}"

    found = [short(value) for value in values]
    return found if len(set(found)) == len(set(values)) else list(values)


def table_below(figure: "Figure", entries: Sequence[str], looks: Sequence[dict[str, Any]], title: str) -> None:
    """A legend below the axes, in as many columns as fit; the figure grows by it.

    Args:
        entries: see `aligned`; looks: of the lines, one less; title: a sentence above it.
    """
    from matplotlib.lines import Line2D

    size = 7.0
    width = (0.61 * max(map(len, entries)) + 8) * size / 72  # inches; letters are 0.6 as wide as high, a line 3.5, gaps
    across = min(len(looks), max(1, int(figure.get_figwidth() / width)))
    handles = []
    for part in np.array_split(np.arange(len(looks)), across):  # as matplotlib fills columns
        handles.append(Line2D([], [], linestyle="none", label=entries[0]))
        handles += [Line2D([], [], label=entries[1 + i], **looks[i]) for i in part]
    figure.set_figwidth(max(figure.get_figwidth(), width))
    figure.set_figheight(figure.get_figheight() + 0.15 * (1 + -(-len(handles) // across)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=across,
        handlelength=3.5,
        prop={"family": "monospace", "size": size},
        title=title,
        title_fontproperties={"size": 6.5},
        alignment="left",
    )


def caption(figure: "Figure", *sentences: str) -> None:
    """Small lines below the axes, broken to the figure's width; empty sentences do not count."""
    text = " ".join(filter(None, sentences))
    figure.supxlabel(name(text, round(21 * figure.get_figwidth())), x=0.01, ha="left", fontsize=6.5, color="0.35")


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which an axis up to so many seconds reads well: its seconds, its name."""
    for unit, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return unit, name
    return 1.0, "seconds"


def save(figure: "Figure", paths: Sequence[Path]) -> None:
    """Write a figure in the formats of the paths' suffixes; the same figure gives the same bytes."""
    for path in paths:
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
