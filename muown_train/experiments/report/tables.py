"""Tables of numbers as text: for the terminal, Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.runs.record import ABSENT

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells as people read them; the first column is text, the others are set to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()  # columns that a narrow terminal does without, the first of them first

    def markdown(self, level: int = 2) -> str:
        """A heading of that level and the table."""
        lines = [self.head, ["---"] + ["---:"] * (len(self.head) - 1), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{'#' * level} {self.title}\n\n{body}\n"

    def latex(self) -> str:
        """A tabular of the package booktabs, the title in a comment above."""
        lines = [" & ".join(map(tex, line)) + r" \\" for line in (self.head, *self.rows)]
        columns = "l" + "r" * (len(self.head) - 1)
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        return f"% {self.title}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"

    def rich(self, width: int) -> "RichTable":
        """For a terminal of so many columns; where it is too narrow all the same text folds."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        widths = {name: max(len(row[i]) for row in (self.head, *self.rows)) + 3 for i, name in enumerate(self.head)}
        for name in self.spare:
            if sum(widths.values()) > width:
                del widths[name]
        table = RichTable(title=Text(self.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(widths):
            table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            cells = dict(zip(self.head, row, strict=True))
            table.add_row(*(Text(cells[name]) for name in widths))  # no markup: names have brackets
        return table


def tex(text: str) -> str:
    """Text for LaTeX, learning rates as powers."""
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    text = re.sub(r"\b([\d.]+)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", text)
    text = re.sub(r"\b2\^(-?\d+)\b", r"$2^{\1}$", text)
    return text.replace("±", r"$\pm$").replace("×", r"$\times$").replace("—", "---").replace("≥", r"$\geq$")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation of a sample (n - 1), None for a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def with_deviation(values: Sequence[float], digits: int) -> str:
    """`3.5673 ± 0.0040`; a single value without a deviation; ABSENT without any."""
    if not values:
        return ABSENT
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def spanned(values: Sequence[Any], form: str) -> str:
    """The value that all are, in this format, or `a to b`; None counts for nothing."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(format(value, form) for value in (min(there), max(there))) if there else [ABSENT]
    return " to ".join(ends)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """CSV of rows with the same keys, the first line naming them; None is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
