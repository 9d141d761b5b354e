"""An iterator that a thread reads ahead, so that its consumer does not wait for each item.

Four places read ahead, each against a wait of its own:

- a stream of the hub (hub/streaming.py) holds texts, so that all streams wait for the network side by side;
- a worker process (workers.py) holds encoded blocks, so that it computes on while its pipe, which takes less than one
  block, is full;
- the loader (loader.py) holds batches, so that hashing and copying to pinned memory happen during the step;
- preparation (shards/reader.py) holds documents of the next files, so that encoding does not wait for the network.

Without worker processes a stream's thread and the loader's are in a row, but not around the same iterator: one waits
for the network, the other encodes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
POLL = 0.1  # seconds after which a waiting consumer looks whether the prefetcher was stopped
PATIENCE = 10.0  # seconds to wait for the end of all threads


class Prefetcher(Generic[T]):
    """The items of an iterator, of which at most `depth` wait while one more is being read.

    `__next__` raises an error of the iterator, at that call and at all later ones. After `stop` it raises
    RuntimeError.
    """

    def __init__(self, items: Iterator[T], depth: int, name: str = "stream") -> None:
        self._queue: queue.Queue[T | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        arguments = (items, self._queue, self._stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
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
        """Tell the thread to end after the item that it reads, and return at once."""
        self._stop.set()
        while True:  # a thread that waits for room gets it here, and then sees that it must end
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def join(self, timeout: float) -> bool:
        """Wait for the thread and return whether it has ended."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()


def stop_all(prefetchers: Iterable[Prefetcher[T]]) -> bool:
    """Stop all, wait at most PATIENCE seconds for their threads, and return whether all have ended.

    A thread that still reads when the interpreter exits can abort the process.
    """
    prefetchers = list(prefetchers)
    for prefetcher in prefetchers:
        prefetcher.stop()
    deadline = time.monotonic() + PATIENCE
    ended = [prefetcher.join(deadline - time.monotonic()) for prefetcher in prefetchers]
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
