"""Worker processes that compute the rows of streams: the same rows and the same state, by more cores.

A rank takes every size-th row of the run, so after some rows, a cycle, it is at the same streams again. The rows of a
cycle are dealt out to the workers in turn, so each worker owns some streams, which no other reads. A worker sends its
rows in blocks in which no stream comes twice, each row with the cursor of its stream after it, so that the state is
that of the rows taken, whatever was read ahead. Pipes bound the reading ahead: a worker computes one block while AHEAD
others wait and one is being sent.

DataLoader of torch does not do: its workers cannot hand back a cursor with each row, so a resume would count the rows
read ahead as consumed.

This module and all that a worker runs must not import torch: processes would start slowly and be large.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import Any

import numpy as np

from muown_train.data.mixed_rows import MixedRows
from muown_train.data.prefetch import Prefetcher
from muown_train.data.rows import RowSource, StreamedRows, StreamsVisited
from muown_train.data.text.tokenizer import count_threads

BLOCK = 64  # rows sent together, at most
AHEAD = 2  # blocks of a worker that wait to be sent
AUTOMATIC = 4  # workers, at most, if no number is asked for
# environment of a worker, which uses one core; set before the libraries of tokenizers and arrays are imported
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# signals that a terminal or a job sends to all its processes; the main process alone acts upon them
NOT_FOR_WORKERS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

Row = tuple[np.ndarray, dict[str, Any]]  # ids (T+1,) and the cursor of their stream after them


def clone_rows(rows: RowSource) -> RowSource:
    """Return a copy of rows not yet used, with a state of its own, to read some rows besides those of a run."""
    if isinstance(rows, StreamedRows):
        clone: RowSource = pickle.loads(pickle.dumps(rows))
        return clone
    if isinstance(rows, MixedRows):
        return rows.replace_sources(clone_rows)
    return copy.copy(rows)  # prepared tokens stay one memory map


def add_workers(rows: RowSource, count: int | None) -> RowSource:
    """Return rows that `count` workers compute; None means one less than this rank's share of the cores, at most 4.

    Prepared tokens are only copied, which needs no workers, so they are returned as they are. So are mixed rows: the
    rows of a rank are of any stream of their sources, so no worker could own one.
    """
    if not isinstance(rows, StreamedRows):
        return rows
    count = min(count_threads() - 1, AUTOMATIC) if count is None else count
    return Workers(rows, count) if count else rows


class Workers:
    """A source of rows that `count` processes compute, each with a copy of `rows`, which is picklable and not yet used.

    The processes start with the first `take` and read ahead along the arithmetic progression that its indices make. An
    index outside this progression makes them start again, which is slow but correct. `take` raises the error of `rows`
    in a worker, up to a block before the row that failed and until `load_state_dict`; it raises ChildProcessError if a
    worker died, and RuntimeError after `close`.
    """

    def __init__(self, rows: StreamedRows, count: int) -> None:
        assert count >= 1, count
        self.seq_len, self.streams = rows.seq_len, rows.streams
        self._rows = rows  # checks states; rows come from the copies alone
        self._pickled = pickle.dumps(rows)
        self._count = count
        self._pool: _Pool | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._forget()

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for k, index in enumerate(map(int, indices)):
            if self._closed or self._error:
                raise self._error or RuntimeError("the data were closed")
            if self._pool is None or self._pool.remaining[0] != index:
                behind = index - self._last if self._last is not None else 1
                step = int(indices[k + 1]) - index if k + 1 < len(indices) else behind
                self._start(range(index, 1 << 62, step if step > 0 else 1))
            result[k] = self._next_row(index)
        return result

    def state_dict(self) -> dict[str, Any]:
        loaded = self._rows.state_dict()["streams"]
        kept = {key: cursor for key, cursor in loaded.items() if int(key) not in self._visited}
        cursors = kept | self._cursors
        return {"streams": {key: dict(cursors[key]) for key in sorted(cursors, key=int)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """End the processes; the next `take` starts others. Raises the error of `rows` for a wrong state."""
        self.close()
        self._rows.load_state_dict(state)
        self._forget()
        self._pool = self._error = None
        self._closed = False

    def close(self) -> None:
        """End the processes, from any thread; a `take` under way and later ones raise RuntimeError.

        `load_state_dict` opens the rows again.
        """
        self._closed = True
        pool = self._pool
        if pool is not None:
            pool.close()

    def _forget(self) -> None:
        self._cursors: dict[str, dict[str, Any]] = {}  # stream -> cursor after the rows taken
        self._visited = StreamsVisited(self.streams)
        self._last: int | None = None  # last index taken since the state was loaded

    def _start(self, indices: range) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = _Pool(self._pickled, self.state_dict(), indices, self.streams, self._count)
        weakref.finalize(self, self._pool.close)
        if self._closed:  # `close` was called while they started
            self._pool.close()

    def _next_row(self, index: int) -> np.ndarray:
        assert self._pool is not None
        try:
            row, self._cursors[str(index % self.streams)] = self._pool.next_row()
        except BaseException as error:
            self._pool.close()
            self._pool = None
            if self._closed:
                raise RuntimeError("the data were closed while they were read") from None
            self._error = error if isinstance(error, Exception) else None
            raise
        self._visited.add(index)
        self._last = index
        return row


Share = tuple[range, int, int, int]  # the arguments of `iterate_blocks`


def iterate_blocks(indices: range, cycle: int, number: int, count: int) -> Iterator[list[int]]:
    """Yield the indices of worker `number` of `count`, in lists within which no stream comes twice.

    Of each `cycle` indices they are number, number + count, …
    """
    for begin in itertools.count(step=cycle):
        own = indices[begin + number : begin + cycle : count]
        for k in range(0, len(own), BLOCK):
            yield list(own[k : k + BLOCK])


class _Pool:
    """Processes that compute the rows of a progression of indices; each owns some of the streams."""

    def __init__(self, pickled: bytes, state: dict[str, Any], indices: range, streams: int, count: int) -> None:
        self.remaining = indices  # begins with the next row
        self._cycle = streams // math.gcd(streams, indices.step)
        self._row = 0
        self._workers: list[_Worker] = []
        atexit.register(self.close)  # runs before multiprocessing's own, which would wait for the processes
        count = min(count, self._cycle)
        try:
            for number in range(count):
                self._workers.append(_start_worker(pickled, state, (indices, self._cycle, number, count), streams))
        except BaseException:
            self.close()
            raise

    def next_row(self) -> Row:
        worker = self._workers[self._row % self._cycle % len(self._workers)]
        if not worker.rows:
            worker.receive()
        self._row += 1
        self.remaining = self.remaining[1:]
        return worker.rows.popleft()

    def close(self) -> None:
        """End the processes at once and remove their entries from the system's table.

        A pipe is closed with the last reference to it, since another thread may be reading from it.
        """
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()


@dataclass
class _Worker:
    name: str
    process: multiprocessing.process.BaseProcess
    pipe: connection.Connection
    rows: deque[Row]  # received

    def receive(self) -> None:
        """Wait for the next block; raise the error of the worker, or ChildProcessError if it died."""
        connection.wait([self.pipe, self.process.sentinel])
        try:
            if not self.pipe.poll():
                raise EOFError
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise ChildProcessError(self._describe_end()) from None
        if isinstance(answer, BaseException):
            raise answer
        self.rows.extend(zip(*answer, strict=True))

    def _describe_end(self) -> str:
        code = self.process.exitcode or 0
        who = f"{self.name}, process {self.process.pid},"
        if code == -signal.SIGKILL:
            return f"{who} was killed, as the system does when memory runs out: a smaller number of workers needs less"
        return f"{who} ended " + (f"by signal {-code}" if code < 0 else f"with status {code}")


def _start_worker(pickled: bytes, state: dict[str, Any], share: Share, streams: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    name = f"data worker {share[2] + 1} of {share[3]}"
    arguments = (pickled, state, share, streams, sender)
    process = context.Process(target=_run_worker, args=arguments, name=name, daemon=True)
    with _block_signals(NOT_FOR_WORKERS):
        process.start()
    sender.close()  # the worker has the only other end, so its death closes the pipe
    return _Worker(name, process, receiver, deque())


@contextmanager
def _block_signals(signals: set[signal.Signals]) -> Iterator[None]:
    """Hide these signals from a process that is started here, even while it imports."""
    resource_tracker.ensure_running()  # process.start would run it, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_sendable(error: BaseException) -> BaseException:
    """Return an exception that can be pickled, with the worker's traceback as a note.

    It is the exception itself, or one of its nearest built-in type with the same message.
    """
    message = str(error)
    try:
        is_sendable = str(pickle.loads(pickle.dumps(error))) == message
    except Exception:
        is_sendable = False
    if not is_sendable:
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        try:
            error = builtin(message)
        except TypeError:  # this kind takes other arguments
            error = RuntimeError(message)
    error.add_note(f"In the worker:\n{traceback.format_exc()}")
    return error


def _run_worker(pickled: bytes, state: dict[str, Any], share: Share, streams: int, out: connection.Connection) -> None:
    """Send pairs ((k, T+1) int32, k cursors) until an exception, which is the last; the main function of a worker."""
    os.environ.update(ONE_THREAD)
    threading.Thread(target=_exit_with_main_process, daemon=True).start()
    try:
        for answer in _compute_answers(pickled, state, share, streams):
            out.send(answer)
    finally:
        os._exit(0)  # threads of the source may still be reading


def _compute_answers(pickled: bytes, state: dict[str, Any], share: Share, streams: int) -> Iterator[Any]:
    try:
        rows = pickle.loads(pickled)
        rows.load_state_dict(state)
        yield from Prefetcher(_compute_blocks(rows, share, streams), AHEAD)
    except GeneratorExit:
        raise
    except BaseException as error:
        yield make_sendable(error)


def _compute_blocks(
    rows: StreamedRows, share: Share, streams: int
) -> Iterator[tuple[np.ndarray, list[dict[str, Any]]]]:
    for indices in iterate_blocks(*share):
        ids = rows.take(indices)
        cursors = rows.state_dict()["streams"]
        yield ids, [cursors[str(index % streams)] for index in indices]


def _exit_with_main_process() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os._exit(1)
