"""A sink in a thread of its own: however slow or broken it is, training neither waits for it nor ends by it."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line, Sink
from muown_train.runtime.redaction import redact


class Background:
    """Hands everything on to another sink, in order, in one thread, which also starts and ends it.

    Args:
        sink: only the thread calls it. What it raises is said once, and ends it.
        name: of the sink, in sentences for the user.
        patience: seconds that `finish` waits for what is still to be handed on.
        limit: lines that may wait; of more the oldest are dropped, which is said once.
        late: a sentence on what to do about lines that the sink had not taken when patience ended.
        warn: called with a sentence for the user.
    """

    def __init__(
        self,
        sink: Sink,
        name: str,
        patience: float = 60.0,
        limit: int = 20_000,
        late: Callable[[], str] = lambda: "the run's metrics.jsonl has all lines",
        warn: Callable[[str], None] = print,
    ) -> None:
        self.sink, self.name, self.patience, self.late, self.warn = sink, name, patience, late, warn
        self.waiting: deque[Line] = deque(maxlen=limit)
        self.changed = threading.Condition()  # guards `waiting` and `summary`
        self.summary: Mapping[str, Any] | None = None  # set: no more lines come
        self.dropped = False
        self.thread: threading.Thread | None = None

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        """Start the sink, some time."""
        # a daemon: where the sink hangs the process can end all the same
        self.thread = threading.Thread(target=self._work, args=(folder, config, steps), name=self.name, daemon=True)
        self.thread.start()

    def lines(self, lines: Sequence[Line]) -> None:
        """Hand lines on, some time; without effect once the sink has ended."""
        if self.thread is None or not self.thread.is_alive():
            return
        with self.changed:
            full = len(self.waiting) + len(lines) > (self.waiting.maxlen or 0)
            self.waiting.extend(lines)
            self.changed.notify()
        if full and not self.dropped:
            self.dropped = True
            self.warn(f"{self.name} is slower than training: it does not get all lines; metrics.jsonl has them")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the sink with its summary, and wait for that, but not longer than patience; once."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        with self.changed:
            self.summary = summary
            self.changed.notify()
        thread.join(self.patience)
        if thread.is_alive():
            self.warn(f"{self.name} did not take everything within {self.patience:g} s: {self.late()}")
            self.warn = lambda sentence: None  # what the thread still has to say comes too late

    def _work(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        try:
            self.sink.start(folder, config, steps)
            while lines := self._next():
                self.sink.lines(lines)
            self.sink.finish(self.summary or {})
        except Exception as error:  # whatever it is: training must not depend on it
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            self.warn(f"{self.name}: {redact(first)}; no longer recording there")

    def _next(self) -> list[Line]:
        """All lines that wait, once there are any; none at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.summary is not None)
            lines = list(self.waiting)
            self.waiting.clear()
        return lines
