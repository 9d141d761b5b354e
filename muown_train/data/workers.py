"""Rows of streams out of worker processes: the same rows and the same state as without, by more cores.

A rank takes every size-th row of the run, so after some rows, a cycle, it is at the same streams again. The
rows of a cycle are dealt out to the workers in turn; thus each owns some streams and nobody else reads them.
A worker sends its rows in blocks that have no stream twice, each row with the cursor of its stream after it,
so that the state is of the rows taken, whatever was read ahead. Pipes bound what is read ahead: a block is
computed while AHEAD others wait and one is being sent.

This module and what a worker runs must not import torch: processes would start slowly and be large.
"""

from __future__ import annotations

import atexit
import copy
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from muown_train.data.prefetch import ReadAhead
from muown_train.data.rows import RowSource, Taken
from muown_train.data.text.tokenizer import threads

BLOCK = 64  # rows sent together, at most
AHEAD = 2  # blocks of a worker that wait to be sent
AUTOMATIC = 4  # workers, at most, where no number is asked for
# set before the libraries of tokenizers and arrays are imported: a worker is for one core
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# what is sent to all processes of a terminal or a job is for the main process alone to act upon
NOT_FOR_WORKERS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

Row = tuple[np.ndarray, dict[str, Any]]  # ids and the cursor after them


@runtime_checkable
class Streamed(RowSource, Protocol):
    """Rows of which number i is of stream i % streams. The state is {"streams": {number of a stream: cursor}},
    the cursor a stream's own matter; a cursor before the rows asked for will do."""

    streams: int


def clone_rows(rows: RowSource) -> RowSource:
    """The same rows with a state of their own, of rows not yet used: to read some besides those of a run."""
    if isinstance(rows, Streamed):
        copied: RowSource = pickle.loads(pickle.dumps(rows))
        return copied
    return copy.copy(rows)  # prepared tokens stay one memory map


def with_workers(rows: RowSource, count: int | None) -> RowSource:
    """`rows` by so many workers; None: one less than this rank's share of the cores, at most 4.

    Prepared tokens are only copied, so that they stay as they are.
    """
    if not isinstance(rows, Streamed):
        return rows
    count = min(threads() - 1, AUTOMATIC) if count is None else count
    return Workers(rows, count) if count else rows


class Workers:
    """A source of rows that `count` processes compute: `rows`, not yet used and picklable, is sent to each.

    The processes start with the first `take` and read ahead along the arithmetic progression that its indices
    make; where later ones leave it they start again, which is slow but right. What `rows` raises in a worker,
    `take` raises, up to a block before its row and until `load_state_dict`. Raises ChildProcessError where a
    worker died, RuntimeError after `close`.
    """

    def __init__(self, rows: Streamed, count: int) -> None:
        assert count >= 1, count
        self.seq_len, self.streams = rows.seq_len, rows.streams
        self._rows = rows  # for its checks of states; rows are taken of the copies alone
        self._pickled = pickle.dumps(rows)
        self._count = count
        self._team: _Team | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._forget()

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for k, index in enumerate(map(int, indices)):
            if self._closed or self._error:
                raise self._error or RuntimeError("the data were closed")
            if self._team is None or self._team.place.index != index:
                behind = index - self._last if self._last is not None else 1
                step = int(indices[k + 1]) - index if k + 1 < len(indices) else behind
                self._start(Place(index, step if step > 0 else 1))
            result[k] = self._next_row(index)
        return result

    def state_dict(self) -> dict[str, Any]:
        loaded = self._rows.state_dict()["streams"]
        kept = {key: cursor for key, cursor in loaded.items() if not self._past.passed(int(key))}
        cursors = kept | self._taken
        return {"streams": {key: dict(cursors[key]) for key in sorted(cursors, key=int)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ends the processes; the next `take` starts others. Raises what `rows` raises for a wrong state."""
        self.close()
        self._rows.load_state_dict(state)
        self._forget()
        self._team = self._error = None
        self._closed = False

    def close(self) -> None:
        """Ends the processes, from any thread: a `take` under way raises RuntimeError, as do later ones until
        `load_state_dict`."""
        self._closed = True
        team = self._team
        if team is not None:
            team.close()

    def _forget(self) -> None:
        self._taken: dict[str, dict[str, Any]] = {}  # cursors of streams after the rows taken
        self._past = Taken(self.streams)
        self._last: int | None = None  # index taken since the state was loaded

    def _start(self, place: Place) -> None:
        if self._team is not None:
            self._team.close()
        self._team = _Team(self._pickled, self.state_dict(), place, self.streams, self._count)
        weakref.finalize(self, self._team.close)
        if self._closed:  # while they started
            self._team.close()

    def _next_row(self, index: int) -> np.ndarray:
        assert self._team is not None
        try:
            row, self._taken[str(index % self.streams)] = self._team.next_row()
        except BaseException as error:
            self._team.close()
            self._team = None
            if self._closed:
                raise RuntimeError("the data were closed while they were read") from None
            self._error = error if isinstance(error, Exception) else None
            raise
        self._past.add(index)
        self._last = index
        return row


@dataclass(frozen=True)
class Place:
    """In a progression of indices."""

    index: int
    step: int


@dataclass(frozen=True)
class Share:
    """What one worker computes: of each `cycle` rows of the progression from `start` on, number, number + count, …"""

    start: Place
    cycle: int
    number: int
    count: int

    def blocks(self) -> Iterator[list[int]]:
        """Indices for ever, in lists within which no stream comes twice."""
        begin = 0
        while True:
            own = range(begin + self.number, begin + self.cycle, self.count)
            for k in range(0, len(own), BLOCK):
                yield [self.start.index + row * self.start.step for row in own[k : k + BLOCK]]
            begin += self.cycle


class _Team:
    """Processes that compute the rows of a progression of indices, each some of the streams."""

    def __init__(self, pickled: bytes, state: dict[str, Any], start: Place, streams: int, count: int) -> None:
        self.place = start  # of the next row
        self._cycle = streams // math.gcd(streams, start.step)
        self._row = 0
        self._members: list[_Member] = []
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the processes
        count = min(count, self._cycle)
        try:
            for number in range(count):
                self._members.append(_start(pickled, state, Share(start, self._cycle, number, count), streams))
        except BaseException:
            self.close()
            raise

    def next_row(self) -> Row:
        member = self._members[self._row % self._cycle % len(self._members)]
        if not member.rows:
            member.receive()
        self._row += 1
        self.place = Place(self.place.index + self.place.step, self.place.step)
        return member.rows.popleft()

    def close(self) -> None:
        """Ends the processes at once, and their entries in the system's table. Pipes are closed with the last
        reference, since another thread may be reading from one."""
        atexit.unregister(self.close)
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()


@dataclass
class _Member:
    name: str
    process: multiprocessing.process.BaseProcess
    pipe: connection.Connection
    rows: deque[Row]  # received

    def receive(self) -> None:
        """Waits for the next block. Raises what the worker met, or ChildProcessError where it is no more."""
        connection.wait([self.pipe, self.process.sentinel])
        try:
            if not self.pipe.poll():
                raise EOFError
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise ChildProcessError(self._obituary()) from None
        if isinstance(answer, Failure):
            raise answer.error()
        self.rows.extend(zip(*answer, strict=True))

    def _obituary(self) -> str:
        code = self.process.exitcode or 0
        who = f"{self.name}, process {self.process.pid},"
        if code == -signal.SIGKILL:
            return f"{who} was killed, as the system does when memory runs out: a smaller number of workers needs less"
        return f"{who} ended " + (f"by signal {-code}" if code < 0 else f"with status {code}")


def _start(pickled: bytes, state: dict[str, Any], share: Share, streams: int) -> _Member:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    name = f"data worker {share.number + 1} of {share.count}"
    arguments = (pickled, state, share, streams, sender)
    process = context.Process(target=_work, args=arguments, name=name, daemon=True)
    with _blocked(NOT_FOR_WORKERS):
        process.start()
    sender.close()  # the worker has the only one, so that its end is seen
    return _Member(name, process, receiver, deque())


@contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """A process started here never sees these signals, not even while it imports."""
    resource_tracker.ensure_running()  # process.start would, and it unblocks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Failure(NamedTuple):
    """What a worker met, as far as it can be sent."""

    pickled: bytes | None
    builtin: type[BaseException]
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        pickled = None
        with suppress(Exception):
            raw = pickle.dumps(error)
            pickled = raw if str(pickle.loads(raw)) == str(error) else None
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return cls(pickled, builtin, str(error), traceback.format_exc())

    def error(self) -> BaseException:
        """As it was, or of the nearest built-in type with the same message."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled) if self.pickled is not None else self.builtin(self.message)
        except Exception:
            error = RuntimeError(self.message)
        error.add_note(f"In the worker:\n{self.trace}")
        return error


def _work(pickled: bytes, state: dict[str, Any], share: Share, streams: int, out: connection.Connection) -> None:
    """Sends pairs ((k, T+1) int32, k cursors), or a Failure and ends."""
    os.environ.update(ONE_THREAD)
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    try:
        for answer in _answers(pickled, state, share, streams):
            out.send(answer)
    finally:
        os._exit(0)  # threads of the source may still be reading


def _answers(pickled: bytes, state: dict[str, Any], share: Share, streams: int) -> Iterator[Any]:
    try:
        rows = pickle.loads(pickled)
        rows.load_state_dict(state)
        yield from ReadAhead(_blocks(rows, share, streams), AHEAD)
    except GeneratorExit:
        raise
    except BaseException as error:
        yield Failure.of(error)


def _blocks(rows: Streamed, share: Share, streams: int) -> Iterator[tuple[np.ndarray, list[dict[str, Any]]]]:
    for indices in share.blocks():
        ids = rows.take(indices)
        cursors = rows.state_dict()["streams"]
        yield ids, [cursors[str(index % streams)] for index in indices]


def _end_with_the_main_process() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os._exit(1)
