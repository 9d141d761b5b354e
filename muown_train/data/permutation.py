"""A shuffle of range(n) that is computed index by index: no list, no state, the same integers on every
machine.

A balanced Feistel network is a bijection of a power of four; indices that leave range(n) are sent through
it again until they come back (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

ROUNDS = 8


def permute(index: np.ndarray | int, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Where the shuffle of range(n) that `key` (such as (seed, epoch)) stands for sends each index; uint64.

    Expected cost: at most four passes for any n below 2^62. Indices must lie in range(n).
    """
    values = np.atleast_1d(np.asarray(index, dtype=np.uint64)).copy()
    assert 0 < n < 1 << 62, n
    assert values.size == 0 or int(values.max()) < n, (int(values.max()), n)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= np.uint64(n)]
    return values.reshape(np.shape(index))


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> Any:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: Any) -> Any:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(repr(tuple(int(part) for part in key)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
