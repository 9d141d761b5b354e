"""Tables of numbers as text: for a terminal, Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from muown_train.runs.record import ABSENT
from muown_train.runtime.formatting import escape_controls

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells as people read them; the first column is text, the others are set to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()  # columns that a narrow terminal does without, the first of them first

    @property
    def is_empty(self) -> bool:
        """True if no cell besides those of the first column shows anything."""
        return all(cell in ("", ABSENT) for row in self.rows for cell in row[1:])

    def format_markdown(self, level: int = 2) -> str:
        """Return a heading of that level and the table."""
        lines = [self.head, ["---"] + ["---:"] * (len(self.head) - 1), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{'#' * level} {self.title}\n\n{body}\n"

    def format_latex(self) -> str:
        """Return a tabular of the package booktabs, with the title in a comment above."""
        lines = [" & ".join(map(escape_latex, line)) + r" \\" for line in (self.head, *self.rows)]
        columns = "l" + "r" * (len(self.head) - 1)
        body = "\n".join([lines[0], r"\midrule", *lines[1:]])
        return f"% {self.title}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"

    def format_rich(self, width: int) -> "RichTable":
        """Return the table for a terminal of `width` columns; where it is still too wide, its text is folded."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        widths = {name: max(len(row[i]) for row in (self.head, *self.rows)) + 3 for i, name in enumerate(self.head)}
        for name in self.spare:
            if sum(widths.values()) > width:
                del widths[name]
        table = RichTable(title=Text(self.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(widths):
            table.add_column(Text(escape_controls(name)), justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            cells = dict(zip(self.head, row, strict=True))
            # Text is no markup: names contain brackets
            table.add_row(*(Text(escape_controls(cells[name])) for name in widths))
        return table


def escape_latex(text: str) -> str:
    """Return text for LaTeX, with learning rates as powers."""
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    text = re.sub(r"\b([\d.]+)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", text)
    text = re.sub(r"\b2\^(-?\d+)\b", r"$2^{\1}$", text)
    return text.replace("±", r"$\pm$").replace("×", r"$\times$").replace("—", "---").replace("≥", r"$\geq$")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and the standard deviation of a sample (n - 1), which is None for a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def format_mean(values: Sequence[float], digits: int) -> str:
    """Return mean and deviation as `3.5673 ± 0.0040`, a single value without a deviation, and ABSENT for no values."""
    if not values:
        return ABSENT
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def format_range(values: Sequence[Any], form: str) -> str:
    """Return the value that all values have in this format, or `a to b`; None is left out."""
    present = [value for value in values if value is not None]
    ends = dict.fromkeys(format(value, form) for value in (min(present), max(present))) if present else [ABSENT]
    return " to ".join(ends)


def format_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return CSV of rows that have the same keys, which the first line names; None is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
