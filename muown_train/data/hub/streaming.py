"""Rows straight from a stream of documents: a fixed number of virtual streams, each with a cursor of its own.

Row i of the run is row i // S of stream i % S, where S depends on the data alone, so neither ranks nor
batches change the order. A stream reads its units (files or parts of files) in an order of each epoch's own,
and shuffles the documents in windows. Window and order are computed from (seed, epoch, stream, number), so
that nothing of a buffer is stored: a cursor names where the window begins, the place in it and the token
where the next row begins. A resume reads the window again and encodes it from the place on.

A thread for each stream reads texts ahead, 128 documents or one window more than the one in use (a window
has at most 4M characters, or one document). So all streams wait for the network side by side, and while
one waits for a hub that fails the others go on reading until their next windows are there; rows are handed
out in their order, so in the end the run waits for the slowest. Encoding is left to whoever asks for rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from muown_train.data.permutation import permute
from muown_train.data.prefetch import ReadAhead, end
from muown_train.data.rows import Taken
from muown_train.data.text.documents import grouped
from muown_train.data.text.tokenizer import Tokenizer, encode_documents

AT_ONCE = 1 << 16  # characters encoded together: little, for all streams begin at the same time
AHEAD = 128  # documents read ahead, at least one window
WINDOW_CHARACTERS = 1 << 22  # a window ends with the document that reaches it: books must fit in memory too

# (a unit, number of a document in it) -> that document and those after it
Documents = Callable[[Any, int], Iterator[str]]


@dataclass(frozen=True)
class Cursor:
    """Where the next row of a stream begins."""

    position: int = 0  # rows of the stream before it
    epoch: int = 0
    window: int = 0  # number in the epoch
    unit: int = 0  # in the order of the epoch, of the window's first document
    document: int = 0  # in the unit, of the window's first document
    place: int = 0  # in the shuffled window
    token: int = 0  # in the document at that place


@dataclass(frozen=True)
class Shuffle:
    """The order of a stream's documents: of units in an epoch, of `window` documents among themselves."""

    window: int = 1  # 1: units and documents as they come
    seed: int = 0
    stream: int = 0

    def units(self, epoch: int, count: int) -> list[int]:
        return self._order(count, (self.seed, epoch, self.stream))

    def documents(self, epoch: int, window: int, count: int) -> list[int]:
        return self._order(count, (self.seed, epoch, self.stream, window))

    def _order(self, count: int, key: tuple[int, ...]) -> list[int]:
        order = np.arange(count)
        return (permute(order, count, key) if self.window > 1 and count > 1 else order).tolist()


@dataclass(frozen=True)
class Window:
    start: Cursor
    texts: list[str]  # shuffled


def read_windows(documents: Documents, units: Sequence[Any], shuffle: Shuffle, start: Cursor) -> Iterator[Window]:
    """Windows from the one that begins at `start` on, epoch after epoch; each document is in one of an epoch.

    Raises ValueError where the units hold no text.
    """
    epoch, number, first = start.epoch, start.window, (start.unit, start.document)
    barren = 0  # epochs in a row without a document; the first may have begun at the end of the units
    while barren < 2:
        barren += 1
        order = [units[k] for k in shuffle.units(epoch, len(units))]
        located = _located(documents, order, *first)
        for own in grouped(located, shuffle.window, WINDOW_CHARACTERS, lambda one: len(one[1])):
            barren = 0
            (unit, document), texts = own[0][0], [text for _, text in own]
            chosen = [texts[k] for k in shuffle.documents(epoch, number, len(texts))]
            yield Window(Cursor(epoch=epoch, window=number, unit=unit, document=document), chosen)
            number += 1
        epoch, number, first = epoch + 1, 0, (0, 0)
    raise ValueError(f"{', '.join(map(str, units))} of the data, which make up a stream, hold no text")


def _located(
    documents: Documents, units: Sequence[Any], unit: int, first: int
) -> Iterator[tuple[tuple[int, int], str]]:
    for k in range(unit, len(units)):
        for number, text in enumerate(documents(units[k], first), first):
            if text:  # no text is no document, but it is counted
                yield (k, number), text
        first = 0


class Stream:
    """Rows of T+1 ids with stride T out of the documents of some units, over and over; end-of-text after
    each.

    Raises what reading raises, and ValueError where the units hold no text.
    """

    def __init__(
        self,
        documents: Documents,
        units: Sequence[Any],
        tokenizer: Tokenizer,
        seq_len: int,
        cursor: Cursor | None = None,
        shuffle: Shuffle | None = None,
    ) -> None:
        self.cursor = cursor or Cursor()
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        shuffle = shuffle or Shuffle()
        windows = read_windows(documents, units, shuffle, self.cursor)
        self.reader = ReadAhead(windows, max(1, AHEAD // shuffle.window))
        weakref.finalize(self, self.reader.stop)
        self._source = _encoded(self.reader, tokenizer, self.cursor.place)
        self._ahead: deque[tuple[Cursor, np.ndarray]] = deque()  # from the document of the cursor on
        self._tokens = -self.cursor.token  # in `_ahead`, from the cursor on

    def next_row(self) -> np.ndarray:
        """The T+1 ids from the cursor on, int32; the cursor moves on by T."""
        while self._tokens <= self._seq_len:
            place, ids = next(self._source)
            self._ahead.append((place, ids))
            self._tokens += len(ids)
        row = self._read(self._seq_len + 1)
        token = self.cursor.token + self._seq_len
        while token >= len(self._ahead[0][1]):
            token -= len(self._ahead.popleft()[1])
        self._tokens -= self._seq_len
        self.cursor = replace(self._ahead[0][0], token=token, position=self.cursor.position + 1)
        return row

    def _read(self, count: int) -> np.ndarray:
        row = np.empty(count, dtype=np.int32)
        filled, token = 0, self.cursor.token
        for _, ids in self._ahead:
            piece = ids[token : token + count - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            token = 0
            if filled == count:
                break
        return row


def _encoded(windows: Iterator[Window], tokenizer: Tokenizer, place: int) -> Iterator[tuple[Cursor, np.ndarray]]:
    """Pairs (cursor of a document, its ids with end-of-text), from that at `place` of the first window on."""
    for window in windows:
        for number, ids in enumerate(encode_documents(window.texts[place:], tokenizer, AT_ONCE), place):
            yield replace(window.start, place=number), ids
        place = 0


class StreamRows:
    """Rows dealt out in turn by streams, one for each list of units; a stream is opened when first asked for.

    `shuffle` is the number of documents in a window, 1 for the order of the data. `interrupt` ends what
    `documents` may be waiting for. Rows asked for out of order are right but slow: those in between are
    skipped, and to go back a stream begins again. The state is {"streams": {number of a stream: cursor}};
    that of a run is the union over its ranks, where any cursor will do if several ranks know the same stream:
    a resume skips what is behind.
    """

    def __init__(
        self,
        documents: Documents,
        units: Sequence[Sequence[Any]],
        tokenizer: Tokenizer,
        seq_len: int,
        shuffle: int = 1,
        seed: int = 0,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        assert units and all(units), units
        self.seq_len = seq_len
        self._documents = documents
        self._units = units
        self.streams = len(units)  # row i is of stream i % streams
        self._tokenizer = tokenizer
        self._shuffle = (shuffle, seed)
        self._interrupt = interrupt
        self._cursors: dict[int, Cursor] = {}
        self._streams: dict[int, Stream] = {}
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False
        self._taken = Taken(len(units))

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        places = [divmod(int(index), len(self._units)) for index in indices]
        for position, number in places:  # all begin to read before the first is waited for
            self._at(number, position)
        for k, (position, number) in enumerate(places):
            stream = self._at(number, position)
            while stream.cursor.position < position:
                stream.next_row()
            result[k] = stream.next_row()
            self._taken.add(int(indices[k]))
        return result

    def state_dict(self) -> dict[str, Any]:
        kept = {number: cursor for number, cursor in self._cursors.items() if not self._taken.passed(number)}
        cursors = kept | {number: stream.cursor for number, stream in self._streams.items()}
        return {"streams": {str(number): asdict(cursor) for number, cursor in sorted(cursors.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state is of other data, with more streams or more units in one, or of
        another version."""
        known = {field.name for field in fields(Cursor)}
        cursors = {}
        for key, values in state.get("streams", {}).items():
            number = int(key)
            if not known.issuperset(values):
                raise ValueError(
                    f"the saved position of stream {number} has {', '.join(sorted(set(values) - known))}, which this "
                    "version does not know: go on with the version that saved it"
                )
            cursor = cursors[number] = Cursor(**values)
            if number >= len(self._units) or cursor.unit >= len(self._units[number]):
                raise ValueError(
                    f"the saved position is in part {cursor.unit} of stream {number}, but these data have "
                    f"{len(self._units)} streams of at most {max(map(len, self._units))} parts: not the same data"
                )
        end(stream.reader for stream in self._streams.values())
        self._streams.clear()
        self._cursors = cursors
        self._taken = Taken(len(self._units))
        self._closed = False

    def close(self) -> None:
        """Ends the reading from any thread: a `take` under way raises RuntimeError, as do later ones until
        `load_state_dict`."""
        self._closed = True
        for stream in list(self._streams.values()):
            stream.reader.stop()
        if self._interrupt is not None:
            self._interrupt()

    def _at(self, number: int, position: int) -> Stream:
        """The stream, opened where need be, at the position or before it."""
        if self._closed:
            raise RuntimeError("the data were closed")
        stream = self._streams.get(number)
        if stream is not None and stream.cursor.position <= position:
            return stream
        cursor = self._cursors.get(number) if stream is None else None
        if cursor is not None and cursor.position > position:
            cursor = None
        if stream is not None:
            stream.reader.stop()
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, _end, self._streams, self._interrupt)
        shuffle = Shuffle(self._shuffle[0], self._shuffle[1], number)
        stream = Stream(self._documents, self._units[number], self._tokenizer, self.seq_len, cursor, shuffle)
        self._streams[number] = stream
        return stream


def _end(streams: dict[int, Stream], interrupt: Callable[[], None] | None) -> None:
    for stream in streams.values():
        stream.reader.stop()
    if interrupt is not None:
        interrupt()
    end(stream.reader for stream in streams.values())
