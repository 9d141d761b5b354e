"""Rows -> batches of one rank, read ahead in a thread; the state counts what was handed out, not what was read."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from muown_train.data.prefetch import Prefetcher, stop_all
from muown_train.data.rows import Closable, RowSource


class Batch(NamedTuple):
    """The rows of one step that a rank gets."""

    tokens: torch.Tensor  # (B / ranks, T+1) int64
    hash: int  # int64; the sum over ranks modulo 2^64 is the hash of the global batch


class Loader:
    """Batches of rank `rank` of `size`, which gets every size-th row of each global batch of `batch_rows` rows.

    The order of rows depends neither on the number of ranks nor on `batch_rows` nor on where a run was interrupted.
    `__next__` raises the errors of the reading.

    Args:
        device: where the batches will be moved to; for a GPU they lie in pinned memory.
        prefetch: batches that a thread reads ahead; with 0 `__next__` reads them.

    Raises:
        ValueError: `batch_rows` is not a positive multiple of `size`.
    """

    def __init__(
        self,
        rows: RowSource,
        batch_rows: int,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        prefetch: int = 2,
    ) -> None:
        if batch_rows < 1 or batch_rows % size:
            raise ValueError(f"{batch_rows} rows in a batch cannot be dealt out to {size} ranks: take a multiple")
        assert 0 <= rank < size, (rank, size)
        self._rows = rows
        self._deal = (batch_rows, rank, size)
        self._device = device
        self._prefetch = prefetch
        self._state: dict[str, Any] = {"rows": 0, **rows.state_dict()}
        self._batches: Iterator[Item] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = _make_batches(self._rows, self._state, *self._deal, self._device)
            if self._prefetch:
                self._batches = Prefetcher(self._batches, self._prefetch, "loader")
                # a thread that still computes when the interpreter exits can abort the process
                weakref.finalize(self, stop_all, [self._batches])
        batch, self._state = next(self._batches)
        return batch

    @property
    def next_row(self) -> int:
        """The number of the first row that was not handed out to any rank yet."""
        rows: int = self._state["rows"]
        return rows

    def skip(self, spans: Sequence[tuple[int, int]]) -> None:
        """Do not hand out the rows of these spans from here on; all ranks must call it alike.

        The spans are a part of the state, and the next `load_state_dict` replaces them.

        Args:
            spans: pairs (first row, one after the last), each a whole batch.
        """
        self.load_state_dict(self.state_dict() | {"skipped": list(map(list, spans))})

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """The spans whose rows are not handed out."""
        return [(first, end_of_span) for first, end_of_span in self._state.get("skipped", [])]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows consumed by all ranks, the spans to skip and this rank's stream cursors; JSON."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`, the union of the states of all ranks at a step, whatever their number was."""
        self.close()
        if self._batches is not None:
            raise RuntimeError("the thread that reads the data hangs: make a new loader")
        self._rows.load_state_dict(state)
        self._state = dict(state)

    def close(self) -> None:
        """End the thread and the workers; what was read ahead will be read again.

        A thread that waits for rows that cannot be closed may stay behind.
        """
        if self._batches is None:
            return
        prefetchers = [self._batches] if isinstance(self._batches, Prefetcher) else []
        for prefetcher in prefetchers:
            prefetcher.stop()
        if isinstance(self._rows, Closable):
            self._rows.close()
        if stop_all(prefetchers):
            self._batches = None
            self._rows.load_state_dict(self._state)


Item = tuple[Batch, dict[str, Any]]


def hash_row(ids: np.ndarray, place: int) -> int:
    """Return blake2b-64 of a row's ids (little-endian int32) and its place in the global batch (int64), unsigned."""
    raw = ids.astype("<i4", copy=False).tobytes() + int(place).to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _make_batches(
    rows: RowSource, state: Mapping[str, Any], batch_rows: int, rank: int, size: int, device: torch.device | None
) -> Iterator[Item]:
    places = range(rank, batch_rows, size)
    start, skipped = state["rows"], state.get("skipped", [])
    kept = {"skipped": skipped} if skipped else {}
    pinned = device is not None and device.type == "cuda"
    if pinned:  # a thread starts on the first GPU, where pinned memory would make every rank a context
        torch.cuda.set_device(device)
    while True:
        ids = rows.take([start + place for place in places])
        if any(first <= start < end_of_span for first, end_of_span in skipped):
            start += batch_rows  # the rows were read all the same, so that every stream moves on in turn
            continue
        total = sum(hash_row(row, place) for row, place in zip(ids, places, strict=True)) % 2**64
        tokens = torch.from_numpy(ids).to(torch.int64)
        if pinned:
            tokens = tokens.pin_memory()
        start += batch_rows
        yield Batch(tokens, total - 2**64 if total >= 2**63 else total), {"rows": start, **kept, **rows.state_dict()}
