"""Rows -> batches of one rank, read ahead in a thread; the state is what was handed out, not read."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from muown_train.data.prefetch import ReadAhead, end
from muown_train.data.rows import RowSource


class Batch(NamedTuple):
    tokens: torch.Tensor  # (B / ranks, T+1) int64
    hash: int  # int64; summed over ranks modulo 2^64 it is the hash of the global batch


@runtime_checkable
class Closable(Protocol):
    """Rows that may be waited for: `close`, from any thread, ends a `take` with an error."""

    def close(self) -> None: ...


class Loader:
    """Batches of rank `rank` of `size`: of the global batch of rows n to n + batch_rows, every size-th.

    The order of rows depends neither on the number of ranks nor on `batch_rows` nor on where a run was
    interrupted. `prefetch` batches are read ahead by a thread, 0 reads them in `__next__`. What the reading
    raises, `__next__` raises. Raises ValueError where `batch_rows` is not a positive multiple of `size`.
    """

    def __init__(
        self,
        rows: RowSource,
        batch_rows: int,
        rank: int = 0,
        size: int = 1,
        pin_memory: bool = False,
        prefetch: int = 2,
    ) -> None:
        if batch_rows < 1 or batch_rows % size:
            raise ValueError(f"{batch_rows} rows in a batch cannot be dealt out to {size} ranks: take a multiple")
        assert 0 <= rank < size, (rank, size)
        self._rows = rows
        self._deal = (batch_rows, rank, size)
        self._pin_memory = pin_memory
        self._prefetch = prefetch
        self._state: dict[str, Any] = {"rows": 0, **rows.state_dict()}
        self._batches: Iterator[Item] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = _batches(self._rows, self._state, *self._deal, self._pin_memory)
            if self._prefetch:
                self._batches = ReadAhead(self._batches, self._prefetch, "loader")
                # a thread that still computes when the interpreter goes down can abort the process
                weakref.finalize(self, end, [self._batches])
        batch, self._state = next(self._batches)
        return batch

    @property
    def place(self) -> int:
        """Number of the row after the last that was handed out to any rank."""
        rows: int = self._state["rows"]
        return rows

    def skip(self, spans: Sequence[tuple[int, int]]) -> None:
        """From here on do not hand out the rows of these spans (first, one after the last), each a whole batch.

        They are a part of the state, and gone with the next `load_state_dict`; all ranks do alike.
        """
        self.load_state_dict(self.state_dict() | {"skipped": list(map(list, spans))})

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """The spans that are not handed out."""
        return [(first, end_of_span) for first, end_of_span in self._state.get("skipped", [])]

    def state_dict(self) -> dict[str, Any]:
        """Rows consumed over all ranks, those to skip, and this rank's cursors of streams; JSON."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after `state`, the union of the states of all ranks at a step, whatever their number was."""
        self.close()
        if self._batches is not None:
            raise RuntimeError("the thread that reads the data hangs: a new loader is needed")
        self._rows.load_state_dict(state)
        self._state = dict(state)

    def close(self) -> None:
        """Ends the thread and the workers; what was read ahead will be read again.

        Rows that cannot be closed may leave a thread behind that hangs.
        """
        if self._batches is None:
            return
        thread = [self._batches] if isinstance(self._batches, ReadAhead) else []
        for reader in thread:
            reader.stop()
        if isinstance(self._rows, Closable):
            self._rows.close()
        if end(thread):
            self._batches = None
            self._rows.load_state_dict(self._state)


Item = tuple[Batch, dict[str, Any]]


def row_hash(ids: np.ndarray, place: int) -> int:
    """blake2b-64 of a row's ids (little-endian int32) and its place in the global batch (int64); unsigned."""
    raw = ids.astype("<i4", copy=False).tobytes() + int(place).to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _batches(
    rows: RowSource, state: Mapping[str, Any], batch_rows: int, rank: int, size: int, pin_memory: bool
) -> Iterator[Item]:
    places = range(rank, batch_rows, size)
    start, skipped = state["rows"], state.get("skipped", [])
    kept = {"skipped": skipped} if skipped else {}
    while True:
        ids = rows.take([start + place for place in places])
        if any(first <= start < end_of_span for first, end_of_span in skipped):
            start += batch_rows  # read all the same: streams and their cursors go on in turn
            continue
        total = sum(row_hash(row, place) for row, place in zip(ids, places, strict=True)) % 2**64
        tokens = torch.from_numpy(ids).to(torch.int64)
        if pin_memory:
            tokens = tokens.pin_memory()
        start += batch_rows
        yield Batch(tokens, total - 2**64 if total >= 2**63 else total), {"rows": start, **kept, **rows.state_dict()}
