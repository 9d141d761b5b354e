"""The form of printed lines: folded between words on a terminal, with the time before them in the log of a job."""

import os
import re
import shutil
import sys
import textwrap
import time
from typing import Any, TextIO

_COLUMN = re.compile(r"(?:^|  ) *(?=\S)")  # where a column of a line begins: after two or more spaces


class FoldedStream:
    """A stream to a terminal that folds lines which are longer than the terminal is wide.

    What follows on a line that is not ended, such as text that a model writes, passes as it is, and so does text with
    control sequences, which its writer has fitted to the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True  # whether the next character begins a line

    def write(self, text: str) -> int:
        is_plain = "\x1b" not in text
        folds = self._at_start and is_plain
        if text:  # a writer of control sequences leaves the cursor where a line begins
            self._at_start = text.endswith("\n") or not is_plain
        self._stream.write(fold_lines(text, shutil.get_terminal_size().columns) if folds else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TimedStream:
    """A stream to a log whose lines begin with the time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True  # whether the next character begins a line

    def write(self, text: str) -> int:
        now = time.strftime("%H:%M:%S ")
        for line in text.splitlines(keepends=True):
            self._stream.write(f"{now}{line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fold_lines(text: str, columns: int) -> str:
    """Return text whose lines have at most this many columns, but for longer words; the rest of a line is indented."""
    return "\n".join(_fold_line(line, columns) if len(line) > columns else line for line in text.split("\n"))


def _fold_line(line: str, columns: int) -> str:
    """Fold a line below the last of a few columns; a line of many columns goes on below the first, further in."""
    begins = [found.end() for found in _COLUMN.finditer(line)]
    is_list = len(begins) <= 3 and begins[-1] <= columns // 2
    indent = " " * (begins[-1] if is_list else begins[0] + 4 * (len(begins) > 1))
    rules: dict[str, Any] = {
        "break_long_words": False,
        "break_on_hyphens": False,
        "replace_whitespace": False,
        "expand_tabs": False,
    }
    return "\n".join(textwrap.wrap(line, columns, subsequent_indent=indent, **rules))


def format_output() -> None:
    """Fold what this process prints on a terminal, and put the time before each line in the log of a job of SLURM."""
    is_task = {"SLURM_JOB_ID", "RANK"} <= os.environ.keys()  # the ranks that train.sbatch starts
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            setattr(sys, name, FoldedStream(stream))
        elif stream is not None and is_task:
            setattr(sys, name, TimedStream(stream))
