"""Show how far long work has come: a live line on a terminal, a plain line now and then in a log."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

from muown_train.runtime.formatting import escape_controls, format_duration, format_speed

_BAR = 16  # columns
_LIVE_EVERY = 0.2  # seconds between two changes of a live line
_RATE_WINDOW = 20.0  # seconds over which a rate is measured: work comes in bursts
_RATE_AFTER = 3.0  # seconds that the first rate takes


def print_line(message: str) -> None:
    """Print one line on standard error."""
    print(escape_controls(message), file=sys.stderr, flush=True)


def discard_line(message: str) -> None:
    """Print nothing, in place of `print_line`, where another rank says the same; workers take it along."""


class Activity:
    """The name of what a process is doing besides its main work, for whoever shows it.

    `with activity("evaluating"):` sets it.
    """

    def __init__(self) -> None:
        self.name = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before


State = tuple[str, float | None, float | None]  # the arguments of StatusLine.show


class StatusLine:
    """A line about the state of some work.

    On a terminal it stays at the bottom, with a bar and the time gone by, and is drawn by rich, which is not imported
    elsewhere. In a log a line is printed now and then.

    Args:
        stream: where to write; standard error by default.
        every: seconds between two lines in a log.
        first: seconds before the first line, so that short work shows none.
        transient: whether the live line vanishes at the end.
        poll: returns what the live line is to show. It is called four times a second, by another thread.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        every: float = 10.0,
        first: float = 0.0,
        transient: bool = True,
        poll: Callable[[], State] | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.is_live = self.stream.isatty()
        self.interval = _LIVE_EVERY if self.is_live else every
        self.transient = transient
        self.poll = poll
        self._next = time.monotonic() + min(first, self.interval)
        self._progress: Any = None  # rich.progress.Progress

    def is_due(self) -> bool:
        """Return whether the time has come for the next line."""
        return time.monotonic() >= self._next

    def show(self, text: str, fraction: float | None = None, seconds_left: float | None = None) -> None:
        """Replace the live line; in a log print the line if it is due.

        Args:
            fraction: the part of the work that is done, if known.
            seconds_left: seconds until the end of the work, if known.
        """
        if self.is_live:
            self._draw(text, fraction, seconds_left)
        elif self.is_due():
            self.print(text if seconds_left is None else f"{text}, {_format_left(seconds_left)}")
        else:
            return
        self._next = time.monotonic() + self.interval

    def print(self, text: str) -> None:
        """Print a line that stays, above the live line."""
        if self._progress is None:
            print(text, file=self.stream, flush=True)
        else:
            self._progress.console.print(text, highlight=False, markup=False)
        self._next = time.monotonic() + self.interval

    def close(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def count_columns() -> int:
        """Return how many columns of the terminal a live line has for its text."""
        beside = len("  0:00:00  59m59s left ")
        return shutil.get_terminal_size().columns - _BAR - beside

    def _draw(self, text: str, fraction: float | None, seconds_left: float | None) -> None:
        if self._progress is None:
            self._progress = self._start()
        total = None if fraction is None else 1.0  # without a total the bar pulses
        left = "" if seconds_left is None else _format_left(seconds_left)
        self._progress.update(self._task, description=text, completed=fraction or 0.0, total=total, left=left)

    def _start(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        def make_column() -> Column:
            return Column(no_wrap=True, overflow="ellipsis")

        class PolledProgress(Progress):
            def get_renderables(line) -> Any:
                if self.poll is not None and self._progress is not None:
                    self._draw(*self.poll())
                return super().get_renderables()

        progress = PolledProgress(
            BarColumn(bar_width=_BAR),
            TextColumn("{task.description}", markup=False, table_column=make_column()),
            TimeElapsedColumn(table_column=make_column()),
            TextColumn("[dim]{task.fields[left]}", table_column=make_column()),
            console=Console(file=self.stream),
            transient=self.transient,
            refresh_per_second=4,
            # Other output of the process appears above the line, unless it goes to a file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = progress.add_task("", total=None, left="")
        progress.start()
        return progress


def _format_left(seconds: float) -> str:
    return f"{format_duration(seconds)} left"


class Progress:
    """Counts tokens and shows their number, their rate and the time left on a status line.

    Args:
        line: the line, which the caller closes.
        total: the number of tokens in all, if known.
        done: tokens that are done already.
        label: the beginning of the line.
    """

    def __init__(self, line: StatusLine, total: int | None = None, done: int = 0, label: str = "") -> None:
        self.line, self.total, self.label = line, total, f"{label}: " if label else ""
        self._recent = deque([(time.monotonic(), done)])  # (time, tokens done) at the lines of the last seconds

    def update(self, done: int, expected_total: float | None = None) -> None:
        """Show the number of tokens done, if a line is due.

        Args:
            expected_total: where the total is not known, an estimate for the time left.
        """
        if not self.line.is_due():
            return
        rate = self._measure_rate(done)
        total = expected_total if self.total is None else self.total
        of_total = "" if self.total is None else f" of {self.total:,}"
        text = f"{self.label}{done:,}{of_total} tokens" + (f", {format_speed(rate)}" if rate else "")
        fraction = min(done / total, 1.0) if total else None
        self.line.show(text, fraction, (total - done) / rate if total and rate and total > done else None)

    def _measure_rate(self, done: int) -> float | None:
        """Return tokens per second over the last seconds; None at the beginning."""
        now = time.monotonic()
        self._recent.append((now, done))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _RATE_WINDOW:
            self._recent.popleft()
        began, before = self._recent[0]
        return (done - before) / (now - began) if now - began >= _RATE_AFTER else None
