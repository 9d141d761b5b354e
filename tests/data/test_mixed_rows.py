"""Which source a row of a mix is of: exact shares, at every row, by the number of the row alone."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.hub.streaming import StreamRows
from muown_train.data.loader import Loader
from muown_train.data.mixed_rows import MixedRows, Mixture, describe_draws
from muown_train.data.rows import TokenRows
from muown_train.data.workers import add_workers, clone_rows
from tests.helpers.sources import stream_rows

WEIGHTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.one_of(st.integers(1, 50), st.decimals("0.001", "9", places=3).map(float)),
    min_size=2,
    max_size=9,
)


def token_rows(first=0, count=300):
    return TokenRows(np.arange(first, first + count, dtype=np.uint16), 8, seed=5)


@given(WEIGHTS, st.integers(0, 2**40))
def test_every_prefix_has_its_shares(weights, seed):
    mixture = Mixture(weights, seed)
    parts = {name: int(1000 * Fraction(str(weight))) for name, weight in weights.items()}  # thousandths are whole
    counts, total = dict.fromkeys(weights, 0), sum(parts.values())
    bound = 1 if len(weights) == 2 else 4
    for row in range(300):
        name, number = mixture.locate(row)
        assert number == counts[name]  # the rows of a source come in their order, none twice and none left out
        counts[name] += 1
        assert all(abs(counts[each] * total - (row + 1) * part) < bound * total for each, part in parts.items())
    assert mixture.count(300) == counts


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(0, 9), st.integers(0, 10**9))
def test_whole_periods_have_the_exact_shares(weights, seed, periods):
    named = {f"source{k}": weight for k, weight in enumerate(weights)}
    counts = Mixture(named, seed).count(periods * sum(weights))
    assert counts == {name: periods * weight for name, weight in named.items()}


@given(WEIGHTS, st.integers(0, 9), st.integers(0, 10**15))
def test_a_row_far_on_is_found_at_once(weights, seed, row):
    mixture = Mixture(weights, seed)
    name, number = mixture.locate(row)
    before, after = mixture.count(row), mixture.count(row + 1)
    assert before[name] == number and after == before | {name: number + 1} and sum(before.values()) == row


def draw(weights, seed=0, rows=200):
    mixture = Mixture(weights, seed)
    return [mixture.locate(row)[0] for row in range(rows)]


def test_the_order_is_of_the_seed_and_the_ratios_of_the_weights():
    weights = {"web": 0.7, "code": 0.2, "prose": 0.1}
    assert draw(weights) == draw({"prose": 1, "code": 2, "web": 7})
    assert len({tuple(draw(weights, seed)) for seed in range(20)}) > 5
    assert draw({"a": 1, "b": 1}, rows=4) in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_a_seed_gives_the_same_order_for_ever():
    assert "".join(draw({"a": 0.6, "b": 0.3, "c": 0.1}, seed=1, rows=30)) == ORDER


ORDER = "abaabacaababaabacaababaabacaab"


@given(st.integers(0, 9), st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_rows_are_those_that_each_source_has_by_itself(seed, indices):
    mixture = Mixture({"small": 3, "large": 7}, seed)
    rows = MixedRows({"small": token_rows(0, 50), "large": token_rows(1000)}, mixture)
    alone = {"small": token_rows(0, 50), "large": token_rows(1000)}
    for index, row in zip(indices, rows.take(indices), strict=True):
        name, number = mixture.locate(index)
        np.testing.assert_array_equal(row, alone[name].take([number])[0])
    assert rows.state_dict() == {}


def test_each_source_goes_on_to_its_own_next_epoch():
    rows = MixedRows({"small": token_rows(0, 50), "large": token_rows(1000)}, Mixture({"small": 1, "large": 1}, 0))
    first = rows.take(range(12 * 2 * 6))[:, 0]  # rows of the small source begin at a multiple of 8 below 50
    small = first[first < 1000].reshape(-1, 6)
    assert all(sorted(epoch) == list(range(0, 48, 8)) for epoch in small.tolist())
    assert len({tuple(epoch) for epoch in small.tolist()}) > 1  # shuffled anew


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_neither_ranks_nor_batches_change_a_row(size, batches):
    def make():
        return MixedRows(
            {"tokens": token_rows(), "streams": stream_rows()}, Mixture({"tokens": 0.7, "streams": 0.3}, 3)
        )

    expected = make().take(range(36)).tolist()
    loaders = [Loader(make(), 12 * batches, rank, size, prefetch=0) for rank in range(size)]
    found = {}
    for step in range(3 // batches):
        for rank, loader in enumerate(loaders):
            for k, row in enumerate(next(loader).tokens.tolist()):
                found[12 * batches * step + rank + k * size] = row
    assert [found[index] for index in sorted(found)] == expected[: len(found)]


def test_the_state_has_the_cursors_of_each_streamed_source():
    rows = MixedRows({"tokens": token_rows(), "streams": stream_rows()}, Mixture({"tokens": 1, "streams": 1}, 0))
    rows.take(range(20))
    (name,) = rows.state_dict()["sources"]
    assert name == "streams"
    alone = stream_rows()
    alone.take(range(10))
    assert rows.state_dict()["sources"][name] == alone.state_dict()
    again = MixedRows({"tokens": token_rows(), "streams": stream_rows()}, Mixture({"tokens": 1, "streams": 1}, 0))
    again.load_state_dict(json.loads(json.dumps({"rows": 20, **rows.state_dict()})))
    assert again.state_dict() == rows.state_dict()
    np.testing.assert_array_equal(again.take(range(20, 40)), rows.take(range(20, 40)))


def test_a_state_of_other_streams_is_refused():
    cursor = {"position": 1, "epoch": 0, "window": 0, "unit": 0, "document": 0, "place": 0, "token": 0}
    rows = MixedRows({"a": stream_rows(), "b": token_rows()}, Mixture({"a": 1, "b": 1}, 0))
    with pytest.raises(ValueError, match="not the same data"):
        rows.load_state_dict({"rows": 9, "sources": {"a": {"streams": {"7": cursor}}}})


def test_a_clone_has_cursors_of_its_own_and_shares_the_tokens():
    tokens = token_rows()
    rows = MixedRows({"tokens": tokens, "streams": stream_rows()}, Mixture({"tokens": 1, "streams": 1}, 0))
    clone = clone_rows(rows)
    expected = clone.take(range(30))
    assert rows.state_dict()["sources"]["streams"] == {"streams": {}}
    np.testing.assert_array_equal(rows.take(range(30)), expected)
    assert np.shares_memory(clone._sources["tokens"]._parts[0], tokens._parts[0])


def test_closing_closes_every_source():
    rows = MixedRows({"a": stream_rows(), "b": stream_rows()}, Mixture({"a": 1, "b": 1}, 0))
    before = rows.take(range(4))
    rows.close()
    with pytest.raises(RuntimeError, match="closed"):
        rows.take([4])
    rows.load_state_dict({"rows": 0})
    np.testing.assert_array_equal(rows.take(range(4)), before)
    assert all(isinstance(source, StreamRows) for source in rows._sources.values())


def test_workers_are_not_for_mixed_rows():
    rows = MixedRows({"a": stream_rows(), "b": stream_rows()}, Mixture({"a": 1, "b": 1}, 0))
    assert add_workers(rows, 3) is rows


def test_what_a_run_draws():
    rows = MixedRows({"a": token_rows(), "b": token_rows()}, Mixture({"a": 3, "b": 1}, 0))
    assert describe_draws(rows, 400) == {"drawn_tokens": {"a": 300 * 8, "b": 100 * 8}}
    assert describe_draws(token_rows(), 400) == {}
