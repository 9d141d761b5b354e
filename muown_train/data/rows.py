"""Rows of T+1 tokens by their number in the run: the one interface of prepared tokens and of streams.

The order of prepared tokens is a shuffle of range(n) that is computed index by index: no list, no state, the same
integers on every machine. A balanced Feistel network is a bijection of a power of four; an index that it sends out of
range(n) is sent through it again until it comes back (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

BLOCK = 1024  # rows whose shuffled numbers are computed together: a call costs hundreds of microseconds
ROUNDS = 8  # rounds of the Feistel network


class RowSource(Protocol):
    """Rows of a run; row i is a function of (data configuration, seq_len, seed, i) alone.

    By default they have no state.
    """

    seq_len: int

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Return rows by their number in the run, (len(indices), T+1) int32."""
        ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`."""
        return


@runtime_checkable
class StreamedRows(RowSource, Protocol):
    """Rows of streams: row i is of stream i % streams.

    The state is {"streams": {number of a stream: cursor}}. Only the stream knows what its cursor means; a cursor
    before the rows asked for will do.
    """

    streams: int


@runtime_checkable
class Closable(Protocol):
    """Rows whose `take` may wait; `close`, from any thread, ends it with an error."""

    def close(self) -> None: ...


class StreamsVisited:
    """The streams, of `streams` in all, that a run has read since its state was loaded; row i is of stream i % streams.

    Streams between the first and the last row of this rank count as visited, whichever rank read their rows.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._first: int | None = None  # number of the first row
        self._end = 0  # one more than the largest number of a row

    def add(self, index: int) -> None:
        """Note that row `index` was read."""
        self._first = index if self._first is None else self._first
        self._end = max(self._end, index + 1)

    def __contains__(self, stream: int) -> bool:
        """Return whether the run has passed this stream: if its cursor is not on this rank, another rank has it."""
        return self._first is not None and self._first + (stream - self._first) % self._streams < self._end


class TokenRows(RowSource):
    """Rows of prepared tokens, shuffled anew in each epoch; there is no state.

    Row k of the tokens holds ids kT to kT + T inclusive, so each token is a target once an epoch, except the first
    and the fewer than T at the end.

    Args:
        tokens: 1-D ids, usually a memory map, or several whose concatenation is meant: a row may begin in one and end
            in another.

    Raises:
        ValueError: the tokens do not make one row.
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
        starts = self.shuffle(indices).astype(np.int64) * self.seq_len
        parts = np.searchsorted(self._begins, starts, side="right") - 1
        result = np.empty((len(starts), length), dtype=np.int32)
        for row, part, begin in zip(result, parts.tolist(), (starts - self._begins[parts]).tolist(), strict=True):
            filled = 0
            while filled < length:  # more than once for a row that ends in a later part
                ids = self.read_part(part, begin, begin + length - filled)
                row[filled : filled + len(ids)] = ids
                filled, part, begin = filled + len(ids), part + 1, 0
        return result

    def read_part(self, part: int, begin: int, end: int) -> np.ndarray:
        """Return the ids from number `begin` up to `end` of one of the parts that are not empty, or to its end."""
        return self._parts[part][begin:end]

    def shuffle(self, indices: Sequence[int]) -> np.ndarray:
        """Return for each row of the run which row of the tokens it is, uint64."""
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self.rows)
        blocks = places // BLOCK
        result = np.empty(len(places), dtype=np.uint64)
        for epoch, block in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            selected = (epochs == epoch) & (blocks == block)
            result[selected] = self._shuffle_block(epoch, block)[places[selected] % BLOCK]
        return result

    def _shuffle_block(self, epoch: int, block: int) -> np.ndarray:
        """Return the shuffled numbers of the rows of an epoch from block * BLOCK on; the last block is kept."""
        if self._block[0] != (epoch, block):
            places = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.rows))
            self._block = (epoch, block), permute(places, self.rows, (self._seed, epoch))
        return self._block[1]


def permute(index: np.ndarray | int, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where the shuffle of range(n) with this key, such as (seed, epoch), sends each index; uint64.

    Indices must lie in range(n). The expected cost is at most four passes for any n below 2^62.
    """
    values = np.atleast_1d(np.asarray(index, dtype=np.uint64)).copy()
    assert 0 < n < 1 << 62, n
    assert values.size == 0 or int(values.max()) < n, (int(values.max()), n)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _derive_round_keys(key)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _apply_feistel(values[outside], half, keys)
        outside = outside[values[outside] >= np.uint64(n)]
    return values.reshape(np.shape(index))


def _apply_feistel(values: np.ndarray, half: int, keys: np.ndarray) -> Any:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: Any) -> Any:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _derive_round_keys(key: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(repr(tuple(int(part) for part in key)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
