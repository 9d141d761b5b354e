"""Rows straight from a stream of documents: a fixed number of virtual streams, each with a cursor of its own.

Row i of the run is row i // S of stream i % S, where S depends on the data alone, so neither ranks nor
batches change the order. A cursor names the document and the token within it where the next row begins, so
that a resume reads on from there and encodes one document again; nothing of a buffer needs to be stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from muown_train.data.tokenizer import Tokenizer, encode_documents

AT_ONCE = 1 << 16  # characters encoded together: little, for all streams begin at the same time

# (number of a file, number of a document in it) -> that document and those after it
Documents = Callable[[int, int], Iterator[str]]


@dataclass(frozen=True)
class Cursor:
    """Where the next row of a stream begins."""

    position: int = 0  # rows of the stream before it
    epoch: int = 0
    file: int = 0  # in the stream's list of files
    document: int = 0  # in the file
    token: int = 0  # in the document


class Stream:
    """Rows of T+1 ids with stride T out of the documents of some files, over and over; end-of-text after
    each.

    Raises ValueError where the files hold no document.
    """

    def __init__(
        self,
        documents: Documents,
        files: Sequence[int],
        tokenizer: Tokenizer,
        seq_len: int,
        cursor: Cursor | None = None,
    ) -> None:
        self.cursor = cursor or Cursor()
        self._documents = documents
        self._files = files
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._source = self._encoded(self.cursor)
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

    def _encoded(self, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
        epoch, file, document = start.epoch, start.file, start.document
        barren = 0  # epochs in a row without a document; the first may have begun at the end of the files
        while barren < 2:
            barren += 1
            for k in range(file, len(self._files)):
                encoded = encode_documents(self._documents(self._files[k], document), self._tokenizer, AT_ONCE)
                for number, ids in enumerate(encoded, document):
                    barren = 0
                    yield Cursor(epoch=epoch, file=k, document=number), ids
                document = 0
            file, epoch = 0, epoch + 1
        raise ValueError(f"the data files {list(self._files)} of a stream hold no document")


class StreamRows:
    """Rows dealt out in turn by streams, one for each list of files; a stream is opened when first asked for.

    Rows asked for out of order are right but slow: those in between are skipped, and to go back a stream
    begins again. The state is {"streams": {number of a stream: cursor}}; that of a run is the union over its
    ranks, where any cursor will do if several ranks know the same stream: a resume skips what is behind.
    """

    def __init__(
        self, documents: Documents, files: Sequence[Sequence[int]], tokenizer: Tokenizer, seq_len: int
    ) -> None:
        assert files and all(files), files
        self.seq_len = seq_len
        self._documents = documents
        self._files = files
        self._tokenizer = tokenizer
        self._cursors: dict[int, Cursor] = {}
        self._streams: dict[int, Stream] = {}
        self._first: int | None = None  # number of the first row taken since the cursors were loaded
        self._reached = 0  # one more than the largest

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for k, index in enumerate(indices):
            position, number = divmod(int(index), len(self._files))
            result[k] = self._row(number, position)
            self._first = int(index) if self._first is None else self._first
            self._reached = max(self._reached, int(index) + 1)
        return result

    def state_dict(self) -> dict[str, Any]:
        kept = {number: cursor for number, cursor in self._cursors.items() if not self._left_behind(number)}
        cursors = kept | {number: stream.cursor for number, stream in self._streams.items()}
        return {"streams": {str(number): asdict(cursor) for number, cursor in sorted(cursors.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state is of other data: more streams, or more files in one."""
        cursors = {int(number): Cursor(**cursor) for number, cursor in state.get("streams", {}).items()}
        for number, cursor in cursors.items():
            if number >= len(self._files) or cursor.file >= len(self._files[number]):
                raise ValueError(
                    f"the saved position is in file {cursor.file} of stream {number}, but these data have "
                    f"{len(self._files)} streams of at most {len(self._files[0])} files: not the same data"
                )
        self._cursors, self._streams = cursors, {}
        self._first, self._reached = None, 0

    def _left_behind(self, number: int) -> bool:
        """Whether the run has come by the stream since loading: if not here, another rank has its cursor."""
        if self._first is None:
            return False
        return self._first + (number - self._first) % len(self._files) < self._reached

    def _row(self, number: int, position: int) -> np.ndarray:
        stream = self._streams.get(number) or self._open(number, self._cursors.get(number))
        if stream.cursor.position > position:
            stream = self._open(number, None)
        while stream.cursor.position < position:
            stream.next_row()
        return stream.next_row()

    def _open(self, number: int, cursor: Cursor | None) -> Stream:
        stream = Stream(self._documents, self._files[number], self._tokenizer, self.seq_len, cursor)
        self._streams[number] = stream
        return stream
