"""How far a preparation is: one line that changes on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from muown_train.runtime.formatting import format_duration

EVERY = {True: 0.2, False: 5.0}  # seconds, on a terminal and elsewhere
FIRST = {True: 0.2, False: 2.0}
AVERAGED = 20.0  # seconds over which the rate is measured: documents come in batches
SHORTEST = 3.0  # of these that a first rate takes


class Report:
    """Tokens, tokens a second and time left, on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._next = 0.0
        self._tokens = 0
        self._total: float | None = None
        self._known = False  # whether the total was given, not estimated
        self._done: float | None = None
        self._lately: deque[tuple[float, int]] = deque()  # time and tokens of the lines of the last seconds

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
        self._tokens = tokens
        self._total, self._known = total, total is not None
        self._next = time.monotonic() + FIRST[self._console.is_terminal]
        if tokens:
            self.say(f"going on after {tokens:,} tokens")

    def add(self, tokens: int, done: float) -> None:
        """`done` is the part of the source's files that is read: where the total is not known each file tells it."""
        if done != self._done:
            if self._done is not None and not self._known:
                self._total = self._tokens / done
            self._done = done
        self._tokens += tokens
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY[self._console.is_terminal]
        line = self._line(now)
        if not self._console.is_terminal:
            return self._console.print(line, markup=False)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def _line(self, now: float) -> str:
        line = f"{self._tokens:,} tokens"
        if self._known:
            line += f" of {self._total:,}"
        rate = self._rate(now)
        if rate:
            line += f", {rate:,.0f} tokens/s"
            if self._total is not None and self._total > self._tokens:
                line += f", {format_duration((self._total - self._tokens) / rate)} left"
        return line

    def _rate(self, now: float) -> float | None:
        """Tokens a second over the last seconds; None before there are enough of them."""
        self._lately.append((now, self._tokens))
        while len(self._lately) > 2 and now - self._lately[1][0] >= AVERAGED:
            self._lately.popleft()
        begin, before = self._lately[0]
        return (self._tokens - before) / (now - begin) if now - begin >= SHORTEST else None
