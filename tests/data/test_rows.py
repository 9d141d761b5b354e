import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.data.rows import BLOCK, TokenRows, permute


@given(st.integers(2, 400), st.integers(1, 30), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_has_each_token_as_a_target_once(count, seq_len, seed, epoch):
    if count <= seq_len:
        return
    tokens = np.arange(count, dtype=np.uint16)
    rows = TokenRows(tokens, seq_len, seed)
    taken = rows.take(range(epoch * rows.rows, (epoch + 1) * rows.rows))
    assert taken.dtype == np.int32
    assert (np.diff(taken, axis=1) == 1).all()
    assert sorted(taken[:, 1:].ravel().tolist()) == list(range(1, rows.rows * seq_len + 1))
    assert count - 1 - rows.rows * seq_len < seq_len


@given(st.lists(st.integers(0, 500), max_size=12), st.randoms())
def test_a_row_depends_on_its_number_alone(indices, random):
    tokens = np.random.default_rng(0).integers(0, 60000, 1000).astype(np.uint16)
    rows = TokenRows(tokens, 7, seed=3)
    together = rows.take(indices)
    order = list(range(len(indices)))
    random.shuffle(order)
    for k in order:
        np.testing.assert_array_equal(rows.take([indices[k]])[0], together[k])


def test_epochs_and_seeds_are_shuffled_differently():
    tokens = np.arange(1001, dtype=np.uint16)
    rows = TokenRows(tokens, 10, seed=0)
    first, second = rows.shuffle(range(100)).tolist(), rows.shuffle(range(100, 200)).tolist()
    other = TokenRows(tokens, 10, seed=1).shuffle(range(100)).tolist()
    assert first != second != other != first
    assert first != sorted(first)


def test_fewer_tokens_than_a_row_is_an_error():
    with pytest.raises(ValueError, match=r"have 16 tokens, fewer than one row of seq_len \+ 1 = 17"):
        TokenRows(np.zeros(16, dtype=np.uint16), 16, 0)
    assert TokenRows(np.zeros(17, dtype=np.uint16), 16, 0).take([5]).shape == (1, 17)


def test_ids_above_65536_are_kept():
    tokens = np.array([70000, 151645, 3], dtype=np.uint32)
    assert TokenRows(tokens, 2, 0).take([0]).tolist() == [[70000, 151645, 3]]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 3), st.randoms())
def test_rows_across_parts_are_those_of_the_concatenation(sizes, seq_len, seed, random):
    ids = np.arange(sum(sizes), dtype=np.uint16)
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    if len(ids) <= seq_len:
        with pytest.raises(ValueError, match=f"have {len(ids)} tokens"):
            TokenRows(parts, seq_len, seed)
        return
    indices = [random.randrange(3 * len(ids) // seq_len) for _ in range(20)]
    rows = TokenRows(parts, seq_len, seed)
    taken = rows.take(indices)
    np.testing.assert_array_equal(taken, TokenRows(ids, seq_len, seed).take(indices))
    np.testing.assert_array_equal(taken[:, 0], rows.shuffle(indices) * seq_len)
    assert (np.diff(taken, axis=1) == 1).all()


@pytest.mark.parametrize("count", [3, BLOCK - 1, BLOCK, 5 * BLOCK // 2])
def test_each_epoch_is_a_permutation_of_its_own(count):
    rows = TokenRows(np.zeros(count + 1, dtype=np.uint16), 1, seed=0)
    epochs = [rows.shuffle(range(epoch * count, (epoch + 1) * count)).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    for k, epoch in enumerate(epochs):
        assert epoch == permute(np.arange(count), count, (0, k)).tolist()


def test_no_rows_are_no_error():
    assert TokenRows(np.zeros(17, dtype=np.uint16), 16, 0).take([]).shape == (0, 17)


KEYS = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 10**6))


@given(st.integers(1, 3000), KEYS)
def test_a_permutation_is_bijective(n, key):
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(st.integers(1, 2**61), KEYS, st.data())
def test_a_permutation_equals_a_reference_on_python_integers(n, key, data):
    index = data.draw(st.integers(0, n - 1))
    assert int(permute(index, n, key)) == reference(index, n, key)


@given(st.integers(2, 2**50), KEYS, st.data())
def test_an_index_is_sent_the_same_way_alone_and_among_others(n, key, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(np.array(indices), n, key)
    assert together.tolist() == [int(permute(i, n, key)) for i in indices]


def test_the_key_of_a_permutation_decides_and_places_are_even():
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
def test_smallest_permutations(n):
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
