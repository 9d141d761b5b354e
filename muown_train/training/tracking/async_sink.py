"""A sink in a thread of its own, so that training neither waits for a slow sink nor ends with a broken one."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line, Sink
from muown_train.runtime.redaction import redact

_LONGEST_WAIT = 86400  # seconds that the end of a run may wait for a sink


class AsyncSink:
    """Passes everything on to another sink, in order, in one thread, which also starts and finishes that sink.

    Args:
        sink: a sink that only the thread calls. An error of it is reported once and ends it.
        name: the sink's name in messages.
        finish_timeout: seconds that `finish` waits for the sink to take what is left.
        max_waiting: the number of lines that may wait. Beyond it the oldest are dropped, which is reported once.
        late_hint: returns what to do about lines that the sink has not taken within the timeout.
        warn: called with a sentence for the user.

    Raises:
        ValueError: `finish_timeout` is below 0 or longer than a day.
    """

    def __init__(
        self,
        sink: Sink,
        name: str,
        finish_timeout: float = 60.0,
        max_waiting: int = 20_000,
        late_hint: Callable[[], str] = lambda: "the run's metrics.jsonl has all lines",
        warn: Callable[[str], None] = print,
    ) -> None:
        if not 0 <= finish_timeout <= _LONGEST_WAIT:
            raise ValueError(f"tracking.finish_timeout={finish_timeout!r} must be from 0 to {_LONGEST_WAIT} seconds")
        self.sink, self.name, self.finish_timeout = sink, name, finish_timeout
        self.late_hint, self.warn = late_hint, warn
        self.waiting: deque[Line] = deque(maxlen=max_waiting)
        self.changed = threading.Condition()  # guards `waiting` and `summary`
        self.summary: Mapping[str, Any] | None = None  # once it is set, no more lines come
        self.dropped = False
        self.thread: threading.Thread | None = None

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        """Start the thread, which starts the sink."""
        # The thread is a daemon, so the process can end even while the sink hangs.
        self.thread = threading.Thread(target=self._run, args=(folder, config, steps), name=self.name, daemon=True)
        self.thread.start()

    def write(self, lines: Sequence[Line]) -> None:
        """Queue lines for the sink; this has no effect once the sink has ended."""
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
        """Finish the sink with its summary and wait for that, at most until the timeout; only the first call counts."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        with self.changed:
            self.summary = summary
            self.changed.notify()
        thread.join(self.finish_timeout)
        if thread.is_alive():
            self.warn(f"{self.name} did not take everything within {self.finish_timeout:g} s: {self.late_hint()}")
            self.warn = lambda sentence: None  # further messages of the thread come too late

    def _run(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        try:
            self.sink.start(folder, config, steps)
            while lines := self._take_lines():
                self.sink.write(lines)
            self.sink.finish(self.summary or {})
        except Exception as error:  # any error, since training must not depend on a sink
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self.warn(f"{self.name}: {redact(reason)}; no longer recording there")

    def _take_lines(self) -> list[Line]:
        """Wait for lines and return all that there are; an empty list means the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.summary is not None)
            lines = list(self.waiting)
            self.waiting.clear()
        return lines
