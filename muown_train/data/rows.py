"""Rows of T+1 tokens by their number in the run: the one interface of prepared tokens and of streams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from muown_train.data.permutation import permute

BLOCK = 1024  # rows whose shuffled numbers are computed together: a call costs hundreds of microseconds


class RowSource(Protocol):
    """Row i of a run is a function of (data configuration, seq_len, seed, i) alone."""

    seq_len: int

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Rows of the run by number: (len(indices), T+1) int32."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Taken:
    """Which of `streams` streams a run has come by since its state was loaded; row i is of stream i % streams."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._first: int | None = None  # number of the first row
        self._reached = 0  # one more than the largest

    def add(self, index: int) -> None:
        self._first = index if self._first is None else self._first
        self._reached = max(self._reached, index + 1)

    def passed(self, number: int) -> bool:
        """Whether the run has come by this stream: if its cursor is not here, another rank has it."""
        return self._first is not None and self._first + (number - self._first) % self._streams < self._reached


class TokenRows:
    """Rows of prepared tokens, shuffled anew in each epoch; there is no state.

    `tokens` is a 1-D array, a memory map as a rule, or a sequence of them whose concatenation is meant: a row
    may begin in one and end in another. Row k of the tokens holds ids kT to kT + T inclusive, so each token but
    the first and the fewer than T at the end is a target once an epoch. Raises ValueError where the tokens do
    not make one row.
    """

    def __init__(self, tokens: np.ndarray | Sequence[np.ndarray], seq_len: int, seed: int) -> None:
        self._tokens = tokens
        parts = [tokens] if isinstance(tokens, np.ndarray) else tokens
        self._parts = [np.asarray(part) for part in parts if len(part)]  # slices of a memory map are slow to make
        ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        self.rows = (total - 1) // seq_len
        if self.rows < 1:
            raise ValueError(
                f"the training data have {total} tokens, fewer than one row of seq_len + 1 = "
                f"{seq_len + 1}: lower seq_len or give more data"
            )
        self.seq_len = seq_len
        self._begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
        self._seed = seed
        self._block: tuple[tuple[int, int], np.ndarray] = (-1, -1), np.empty(0, dtype=np.uint64)

    def take(self, indices: Sequence[int]) -> np.ndarray:
        length = self.seq_len + 1
        starts = self.numbers(indices).astype(np.int64) * self.seq_len
        parts = np.searchsorted(self._begins, starts, side="right") - 1
        result = np.empty((len(starts), length), dtype=np.int32)
        for row, part, begin in zip(result, parts.tolist(), (starts - self._begins[parts]).tolist(), strict=True):
            ids = self._parts[part][begin : begin + length]
            if len(ids) == length:
                row[:] = ids
            else:
                self._fill_across(row, part, begin)
        return result

    def _fill_across(self, row: np.ndarray, first: int, begin: int) -> None:
        filled = 0
        for part in count(first):
            ids = self._parts[part][begin : begin + len(row) - filled]
            row[filled : filled + len(ids)] = ids
            filled, begin = filled + len(ids), 0
            if filled == len(row):
                return

    def numbers(self, indices: Sequence[int]) -> np.ndarray:
        """Which row of the tokens each row of the run is; uint64."""
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self.rows)
        blocks = places // BLOCK
        result = np.empty(len(places), dtype=np.uint64)
        for epoch, block in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            here = (epochs == epoch) & (blocks == block)
            result[here] = self._numbers_of(epoch, block)[places[here] % BLOCK]
        return result

    def _numbers_of(self, epoch: int, block: int) -> np.ndarray:
        """The numbers of the rows of an epoch from block * BLOCK on; those asked for last are kept."""
        if self._block[0] != (epoch, block):
            places = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.rows))
            self._block = (epoch, block), permute(places, self.rows, (self._seed, epoch))
        return self._block[1]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
