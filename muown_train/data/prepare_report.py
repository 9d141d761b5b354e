"""How far a preparation is: one line that changes on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

EVERY = {True: 0.2, False: 5.0}  # seconds, on a terminal and elsewhere
FIRST = {True: 0.2, False: 2.0}


class Report:
    """Tokens, tokens a second and time left, on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._start = self._next = 0.0
        self._tokens = self._before = 0
        self._total: int | None = None
        self._done_before: float | None = None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        self.__exit__(None, None, None)
        self._console.print(message, markup=False)

    def start(self, tokens: int, total: int | None) -> None:
        """`tokens` of `total` (None: not known) are there already."""
        self._tokens = self._before = tokens
        self._total = total
        self._start = time.monotonic()
        self._next = self._start + FIRST[self._console.is_terminal]
        if tokens:
            self.say(f"going on after {tokens:,} tokens")

    def add(self, tokens: int, done: float) -> None:
        """`done` is the part of the source that is read: it tells the time left where the total is not known."""
        self._tokens += tokens
        if self._done_before is None:
            self._done_before = done
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY[self._console.is_terminal]
        line = self._line(now - self._start, done)
        if not self._console.is_terminal:
            return self._console.print(line, markup=False)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def _line(self, elapsed: float, done: float) -> str:
        new = self._tokens - self._before
        begin = self._done_before or 0.0
        if self._total:
            begin, done = self._before / self._total, min(1.0, self._tokens / self._total)
        line = f"{self._tokens:,} tokens"
        if self._total:
            line += f" of {self._total:,}"
        line += f", {new / elapsed:,.0f} tokens/s"
        if done > begin:
            line += f", {_duration(elapsed * (1 - done) / (done - begin))} left"
        return line


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
