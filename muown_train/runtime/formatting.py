"""Numbers and stored text as text for people: one function for each kind."""

import math
import re
import shutil
import textwrap
from typing import Any

# control characters except tab and newline, and halves of surrogate pairs, which no terminal can show
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return text in which control characters are spelt out, such as \\x1b, which begins the commands of terminals.

    Text that is stored, or drawn from a model, may otherwise move the cursor, change the title or hide what stands
    around it. Tabs and newlines stay.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def fit_terminal(text: str) -> str:
    """Return text whose paragraphs are no wider than the terminal; text that is narrow enough stays as it is.

    A line such as `name    meaning` keeps its two columns; what follows it, as deep as the second one, belongs to it.
    Other indented lines, such as commands, are paragraphs of their own.
    """
    width = shutil.get_terminal_size().columns
    if max(map(len, text.splitlines()), default=0) <= width:
        return text
    paragraphs: list[tuple[int, list[str]]] = []  # how deep further lines of each stand, and its lines
    for line in text.splitlines():
        row = re.match(r" *\S.*?  +(?=\S)", line)
        depth = len(line) - len(line.lstrip())
        above, lines = paragraphs[-1] if paragraphs else (0, [""])
        if lines[-1] and line and not row and depth == above and (depth == 0 or re.search(r"\S  ", lines[0])):
            lines.append(line.strip())
        else:
            paragraphs.append((row.end() if row else depth, [line]))
    wrapped = [
        textwrap.wrap(" ".join(lines), width, subsequent_indent=" " * depth, break_on_hyphens=False) or [""]
        for depth, lines in paragraphs
    ]
    return "\n".join(line for lines in wrapped for line in lines)


def format_perplexity(value: float) -> str:
    """Return a perplexity as text; that of a run that has diverged would have hundreds of digits."""
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"


def format_speed(tokens_per_second: float) -> str:
    """Return a speed as text: 12345.6 as "12,346 tokens/s", 1234567 as "1.235M tokens/s"."""
    if tokens_per_second >= 999_999.5:
        return f"{tokens_per_second / 1e6:.3f}M tokens/s"
    return f"{tokens_per_second:,.0f} tokens/s"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 90 as "1m30s", 3720 as "1h02m"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def format_count(value: float) -> str:
    """Return a number of things, such as tokens, with three digits: 500 as "500", 2.5e6 as "2.5M", 1e10 as "10B"."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:  # three digits of a slightly smaller number round to the unit
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def format_gib(size: float) -> str:
    """Return a number of bytes in GiB, without the unit: 2**30 as "1.00"."""
    return f"{size / 2**30:.2f}"


def format_setting(value: Any) -> str:
    """Return the value of a setting as the command line takes it: true, false, null, or its text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_lr(lr: float) -> str:
    """Return a learning rate as people write it: 4e-3, 7.5e-4; a power of two as 2^-10."""
    mantissa, exponent = math.frexp(lr)
    if mantissa == 0.5:
        return f"2^{exponent - 1}"
    digits, _, power = f"{lr:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"
