import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.permutation import permute

KEYS = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 10**6))


@given(st.integers(1, 3000), KEYS)
def test_bijective(n, key):
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(st.integers(1, 2**61), KEYS, st.data())
def test_equals_a_reference_on_python_integers(n, key, data):
    index = data.draw(st.integers(0, n - 1))
    assert int(permute(index, n, key)) == reference(index, n, key)


@given(st.integers(2, 2**50), KEYS, st.data())
def test_an_index_is_sent_the_same_way_alone_and_among_others(n, key, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(np.array(indices), n, key)
    assert together.tolist() == [int(permute(i, n, key)) for i in indices]


def test_the_key_decides_and_places_are_even():
    n, keys = 12, 4800
    first = np.array([int(permute(0, n, (seed, 0))) for seed in range(keys)])
    counts = np.bincount(first, minlength=n)
    chi_square = float(((counts - keys / n) ** 2 / (keys / n)).sum())
    assert chi_square < 40, counts  # 11 degrees of freedom: beyond 40 once in 30,000

    orders = {tuple(permute(np.arange(50), 50, (0, epoch)).tolist()) for epoch in range(100)}
    assert len(orders) == 100


def test_large_shuffles_leave_no_runs():
    order = permute(np.arange(100_000), 100_000, (1, 2)).astype(np.int64)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert (np.diff(order) == 1).sum() < 10


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17])
def test_smallest(n):
    assert sorted(permute(np.arange(n), n, (0, 0)).tolist()) == list(range(n))


def reference(index: int, n: int, key: tuple[int, ...]) -> int:
    """The same network written on Python's integers."""
    half = 1
    while n > 1 and 4**half < n:
        half += 1
    digest = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    words = [int.from_bytes(digest[8 * k : 8 * k + 8], "little") for k in range(8)]
    while True:
        left, right = divmod(index, 2**half)
        for word in words:
            x = right ^ word
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            x ^= x >> 31
            left, right = right, left ^ (x % 2**half)
        index = left * 2**half + right
        if index < n:
            return index
