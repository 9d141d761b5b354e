"""The look of figures: readable in print, in grey, and by people who see few colours.

The palette is that of Okabe and Ito (Color Universal Design, 2008) without its yellow, which is lost on white.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.runtime.atomic_files import write_atomic
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
_OPTIMIZERS = ("muown", "muon", "normuon", "adamw", "soap", "lion")  # these have the first colours, in this order
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"
_MAX_VALUE = 20  # letters of a value in a legend
_MIN_TICKS = 3  # a logarithmic axis has at least this many
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
    "pdf.fonttype": 42,  # keeps letters as letters, as journals ask
    "savefig.dpi": 200,
}


@contextmanager
def new_figure(width: float, height: float) -> Iterator["Figure"]:
    """Open a figure of this size in inches whose parts make room for one another; no global setting is changed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_LOOK):
        yield Figure(figsize=(width, height), layout="constrained")


def choose_styles(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, line style and marker of each line; up to 28 lines no two are alike.

    Lines whose labels begin with the same word have the same colour, if there are other words and colours for all, and
    an optimizer has the same colour in every figure. Otherwise every line has the next colour.
    """
    families = [label.partition(" ")[0].rstrip(",").lower() for label in labels]
    if len(set(families)) == 1:
        families = list(labels)
    own = {family: _OPTIMIZERS.index(family) for family in families if family in _OPTIMIZERS}
    free = iter([colour for colour in range(len(COLOURS)) if colour not in own.values()])
    for family in dict.fromkeys(families):
        if family not in own:
            own[family] = next(free, len(COLOURS))
    styles = []
    for index, family in enumerate(families):
        if max(own.values()) < len(COLOURS):
            colour, turn = own[family], families[:index].count(family)
            marker = colour + turn
        else:
            turn, colour = divmod(index, len(COLOURS))
            marker = index + turn
        style = {
            "color": COLOURS[colour],
            "linestyle": LINES[turn % len(LINES)],
            "marker": MARKERS[marker % len(MARKERS)],
        }
        styles.append(style)
    return styles


def label_count_axis(axes: "Axes", label: str, start: float | None = None) -> None:
    """Label the x axis as one that counts something: 10M, 2.5B.

    Args:
        start: where a logarithmic axis begins; None makes a linear axis.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if start is not None:
        axes.set_xscale("log", nonpositive="mask")
        axes.set_xlim(left=start)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))


def set_plain_ticks(axes: "Axes") -> None:
    """Put numbers such as 0.15 or 20 on a y axis that is logarithmic over few decades, instead of powers of ten."""
    low, high = axes.get_ylim()
    for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), np.arange(1, 10, 0.5), np.arange(1, 10, 0.1)):
        ticks = [tick for k in range(-9, 9) for part in parts if low <= (tick := float(f"{part:g}e{k}")) <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    if len(ticks) >= 2:
        axes.set_yticks(ticks[:: 1 + len(ticks) // (2 * _MIN_TICKS)], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")


def format_name(text: str, width: int) -> str:
    """Return a name of a run or a setting for a figure, in lines of `width` characters, with powers of two as such."""
    return re.sub(r"\b2\^(-?\d+)\b", r"$2^{\1}$", fill(text, width).replace("$", r"\$"))


def align_columns(words: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table for a legend in letters of one width, its head first.

    Args:
        words: the cells of each row, `key=value` or a value alone, which is an optimizer, a model or a schedule.
    """
    columns = []
    for column in zip(*words, strict=True):
        key = column[0].partition("=")[0]
        if not all(word.startswith(f"{key}=") for word in column):
            key = ""
        values = _shorten_values([word.removeprefix(f"{key}=") for word in column])
        width = max(map(len, (key, *values)))
        columns.append([text.ljust(width) for text in (key, *values)])
    return ["  ".join(row).rstrip().replace("$", r"\$") for row in zip(*columns, strict=True)]


def _shorten_values(values: Sequence[str]) -> list[str]:
    """Return numbers with three digits and the last letters of texts, unless two values would become the same."""

    def shorten(value: str) -> str:
        try:
            return f"{float(value):.3g}"
        except ValueError:
            return value if len(value) <= _MAX_VALUE else f"…{value[1 - _MAX_VALUE :]}"

    shortened = [shorten(value) for value in values]
    return shortened if len(set(shortened)) == len(set(values)) else list(values)


def add_table_legend(figure: "Figure", entries: Sequence[str], styles: Sequence[dict[str, Any]], title: str) -> None:
    """Add a legend below the axes, in as many columns as fit; the figure grows by its height.

    Args:
        entries: as `align_columns` returns them.
        styles: those of the lines, one fewer than the entries.
        title: a sentence above the legend.
    """
    from matplotlib.lines import Line2D

    size = 7.0
    width = (0.61 * max(map(len, entries)) + 8) * size / 72  # inches: letters are 0.6 of their height wide, a line 3.5
    columns = min(len(styles), max(1, int(figure.get_figwidth() / width)))
    handles = []
    for part in np.array_split(np.arange(len(styles)), columns):  # matplotlib fills the columns so
        handles.append(Line2D([], [], linestyle="none", label=entries[0]))
        handles += [Line2D([], [], label=entries[1 + i], **styles[i]) for i in part]
    figure.set_figwidth(max(figure.get_figwidth(), width))
    figure.set_figheight(figure.get_figheight() + 0.15 * (1 + -(-len(handles) // columns)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        handlelength=3.5,
        prop={"family": "monospace", "size": size},
        title=title,
        title_fontproperties={"size": 6.5},
        alignment="left",
    )


def add_caption(figure: "Figure", *sentences: str) -> None:
    """Add small lines below the axes, broken to the figure's width; empty sentences are left out."""
    text = " ".join(filter(None, sentences))
    figure.supxlabel(
        format_name(text, round(21 * figure.get_figwidth())), x=0.01, ha="left", fontsize=6.5, color="0.35"
    )


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which an axis up to `seconds` reads well, as its seconds and its name."""
    for unit, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return unit, name
    return 1.0, "seconds"


def save_figure(figure: "Figure", paths: Sequence[Path]) -> None:
    """Write a figure in the formats that the suffixes of the paths name; the same figure gives the same bytes.

    Raises:
        OSError: a file cannot be written; the error names it, and the file is as before.
    """
    for path in paths:
        content, metadata = io.BytesIO(), {"CreationDate": None} if path.suffix == ".pdf" else None
        figure.savefig(content, format=path.suffix.removeprefix("."), metadata=metadata)
        write_atomic(path, content.getvalue())
