"""Rows straight from documents that are read from the hub: a fixed number of virtual streams, each with a cursor.

Row i of the run is row i // S of stream i % S, where S depends on the data alone, so neither ranks nor batches change
the order. A stream reads its units (files or parts of files) in another order each epoch, and shuffles the documents
in windows. Order and windows are computed from (seed, epoch, stream, number), so no buffer is stored: a cursor says
where the window begins, and the place in it and the token in the document where the next row begins. A resume reads
the window again and encodes it from that place on.

A thread for each stream reads texts ahead: 128 documents, or one window besides the one in use (a window has at most
4M characters, or one document). So all streams wait for the network side by side, and while one waits for a hub that
fails, the others read on until their next windows are there. Rows are handed out in order, so in the end the run waits
for the slowest stream. The caller of `take` encodes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from muown_train.data.prefetch import Prefetcher, stop_all
from muown_train.data.rows import StreamsVisited, permute
from muown_train.data.text.documents import group_documents
from muown_train.data.text.tokenizer import Tokenizer, encode_documents

T = TypeVar("T")
AT_ONCE = 1 << 16  # characters that are encoded together: few, since all streams begin at the same time
AHEAD = 128  # documents that are read ahead, but at least one window
WINDOW_CHARACTERS = 1 << 22  # a window ends with the document that reaches this, so that books fit in memory too

# (a unit, number of a document in it) -> that document and those after it
Documents = Callable[[Any, int], Iterator[str]]


@dataclass(frozen=True)
class Cursor:
    """The place in its data where the next row of a stream begins."""

    position: int = 0  # rows of the stream before this one
    epoch: int = 0
    window: int = 0  # number of the window in the epoch
    unit: int = 0  # the unit of the window's first document, in the order of the epoch
    document: int = 0  # the number of the window's first document in that unit
    place: int = 0  # number of the document in the shuffled window
    token: int = 0  # number of the token in that document


@dataclass(frozen=True)
class Shuffle:
    """The order of a stream's units in an epoch, and of the documents in a window."""

    window: int = 1  # documents in a window; 1 leaves units and documents in the order of the data
    seed: int = 0
    stream: int = 0

    def reorder(self, items: Sequence[T], epoch: int, *window: int) -> list[T]:
        """Return the units of an epoch, or the documents of a window with this number, in their order."""
        order = np.arange(len(items))
        if self.window > 1 and len(items) > 1:
            order = permute(order, len(items), (self.seed, epoch, self.stream, *window))
        return [items[k] for k in order.tolist()]


@dataclass(frozen=True)
class Window:
    """Documents that are shuffled together."""

    start: Cursor
    texts: list[str]  # shuffled


def read_windows(documents: Documents, units: Sequence[Any], shuffle: Shuffle, start: Cursor) -> Iterator[Window]:
    """Yield windows from the one that begins at `start` on, epoch after epoch; a window is never of two epochs.

    Raises:
        ValueError: the units hold no text.
    """
    epoch, number, first = start.epoch, start.window, (start.unit, start.document)
    empty_epochs = 0  # empty epochs in a row; the first may have begun at the end of the units
    while empty_epochs < 2:
        empty_epochs += 1
        located = _read_located(documents, shuffle.reorder(units, epoch), *first)
        for group in group_documents(located, shuffle.window, WINDOW_CHARACTERS, lambda pair: len(pair[1])):
            empty_epochs = 0
            (unit, document), texts = group[0][0], [text for _, text in group]
            start = Cursor(epoch=epoch, window=number, unit=unit, document=document)
            yield Window(start, shuffle.reorder(texts, epoch, number))
            number += 1
        epoch, number, first = epoch + 1, 0, (0, 0)
    raise ValueError(f"{', '.join(map(str, units))} of the data, which make up a stream, hold no text")


def _read_located(
    documents: Documents, units: Sequence[Any], unit: int, first: int
) -> Iterator[tuple[tuple[int, int], str]]:
    for k in range(unit, len(units)):
        for number, text in enumerate(documents(units[k], first), first):
            if text:  # an empty text is not a document, but it has a number
                yield (k, number), text
        first = 0


class Stream:
    """Rows of T+1 ids with stride T from the documents of some units, over and over, each ended by end-of-text.

    `next_row` raises the errors of reading, and ValueError if the units hold no text.
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
        self.prefetcher = Prefetcher(windows, max(1, AHEAD // shuffle.window))
        weakref.finalize(self, self.prefetcher.stop)
        self._source = _encode_windows(self.prefetcher, tokenizer, self.cursor.place)
        self._ahead: deque[tuple[Cursor, np.ndarray]] = deque()  # encoded documents from that of the cursor on
        self._tokens = -self.cursor.token  # number of tokens in `_ahead` from the cursor on

    def next_row(self) -> np.ndarray:
        """Return the T+1 ids from the cursor on, int32, and move the cursor on by T."""
        while self._tokens <= self._seq_len:
            place, ids = next(self._source)
            self._ahead.append((place, ids))
            self._tokens += len(ids)
        token, length = self.cursor.token, self._seq_len + 1
        first, *others = (ids for _, ids in self._ahead)
        row = np.concatenate([first[token : token + length], *(ids[:length] for ids in others)])[:length]
        token += self._seq_len
        while token >= len(self._ahead[0][1]):
            token -= len(self._ahead.popleft()[1])
        self._tokens -= self._seq_len
        self.cursor = replace(self._ahead[0][0], token=token, position=self.cursor.position + 1)
        return row.astype(np.int32)


def _encode_windows(windows: Iterator[Window], tokenizer: Tokenizer, place: int) -> Iterator[tuple[Cursor, np.ndarray]]:
    """Yield (cursor of a document, its ids with end-of-text) from the document at `place` of the first window on."""
    for window in windows:
        for number, ids in enumerate(encode_documents(window.texts[place:], tokenizer, AT_ONCE), place):
            yield replace(window.start, place=number), ids
        place = 0


class StreamRows:
    """Rows that streams, one for each list of units, deal out in turn; a stream is opened when a row of it is needed.

    Rows out of order are correct but slow: a stream skips those in between, and begins again to go back. The
    state is {"streams": {number of a stream: cursor}}. The state of a run is the union over its ranks; if several
    ranks know the same stream any of their cursors will do, since a resume skips the rows that are behind.

    Args:
        shuffle: the number of documents in a window; 1 keeps the order of the data.
        interrupt: ends a wait of `documents`.
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
        self._visited = StreamsVisited(len(units))

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        places = [divmod(int(index), len(self._units)) for index in indices]
        for position, number in places:  # all streams begin to read before the first is waited for
            self._open(number, position)
        for k, (position, number) in enumerate(places):
            stream = self._open(number, position)
            while stream.cursor.position < position:
                stream.next_row()
            result[k] = stream.next_row()
            self._visited.add(int(indices[k]))
        return result

    def state_dict(self) -> dict[str, Any]:
        kept = {number: cursor for number, cursor in self._cursors.items() if number not in self._visited}
        cursors = kept | {number: stream.cursor for number, stream in self._streams.items()}
        return {"streams": {str(number): asdict(cursor) for number, cursor in sorted(cursors.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`.

        Raises:
            ValueError: the state is of other data, with more streams or more units in one, or of another version.
        """
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
        stop_all(stream.prefetcher for stream in self._streams.values())
        self._streams.clear()
        self._cursors = cursors
        self._visited = StreamsVisited(len(self._units))
        self._closed = False

    def close(self) -> None:
        """End the reading, from any thread; a `take` under way and later ones raise RuntimeError.

        `load_state_dict` opens the rows again.
        """
        self._closed = True
        for stream in list(self._streams.values()):
            stream.prefetcher.stop()
        if self._interrupt is not None:
            self._interrupt()

    def _open(self, number: int, position: int) -> Stream:
        """Return the stream, opened if need be, at the position or before it."""
        if self._closed:
            raise RuntimeError("the data were closed")
        stream = self._streams.get(number)
        if stream is not None and stream.cursor.position <= position:
            return stream
        cursor = self._cursors.get(number) if stream is None else None
        if cursor is not None and cursor.position > position:
            cursor = None
        if stream is not None:
            stream.prefetcher.stop()
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, _end_streams, self._streams, self._interrupt)
        shuffle = Shuffle(self._shuffle[0], self._shuffle[1], number)
        stream = Stream(self._documents, self._units[number], self._tokenizer, self.seq_len, cursor, shuffle)
        self._streams[number] = stream
        return stream


def _end_streams(streams: dict[int, Stream], interrupt: Callable[[], None] | None) -> None:
    for stream in streams.values():
        stream.prefetcher.stop()
    if interrupt is not None:
        interrupt()
    stop_all(stream.prefetcher for stream in streams.values())
