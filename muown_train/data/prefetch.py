"""An iterator that a thread runs ahead, so that slow sources are waited for side by side."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
POLL = 0.1  # seconds between looks at whether a waiting reader was closed
PATIENCE = 10.0  # seconds that the end of all threads is waited for


class ReadAhead(Generic[T]):
    """The items of an iterator, of which at most `depth` wait and one more is on its way.

    What the iterator raises, `__next__` raises, now and later; after `stop` it raises RuntimeError.
    """

    def __init__(self, items: Iterator[T], depth: int, name: str = "stream") -> None:
        self._queue: queue.Queue[T | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        arguments = (items, self._queue, self._stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        while self._error is None:
            if self._stop.is_set():
                raise RuntimeError("the data were closed while they were read")
            try:
                item = self._queue.get(timeout=POLL)
            except queue.Empty:
                continue
            if not isinstance(item, BaseException):
                return item
            self._error = item
        raise self._error

    def stop(self) -> None:
        """Tells the thread to end, which it does after the item that it reads; returns at once."""
        self._stop.set()
        while True:  # a thread that waits for room finds it, and then sees that it is to end
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()


def end(readers: Iterable[ReadAhead[T]]) -> bool:
    """Stops all, and waits a while for their threads: one that still reads at exit can abort the process.

    Returns whether all have ended.
    """
    readers = list(readers)
    for reader in readers:
        reader.stop()
    deadline = time.monotonic() + PATIENCE
    ended = [reader.join(deadline - time.monotonic()) for reader in readers]
    return all(ended)


def _fill(items: Iterator[T], out: queue.Queue[T | BaseException], stop: threading.Event) -> None:
    try:
        for item in items:
            if stop.is_set():
                return
            out.put(item)
            if stop.is_set():
                return
    except BaseException as error:
        if not stop.is_set():
            out.put(error)
