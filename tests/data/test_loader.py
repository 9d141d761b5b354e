import gc
import hashlib
import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.data.hub.streaming import StreamRows
from muown_train.data.loader import Loader
from muown_train.data.mixed_rows import MixedRows, Mixture
from muown_train.data.rows import TokenRows
from tests.helpers.text_files import ByteTokenizer, union

BATCH = 12  # rows; divides among 1, 2, 3 and 4 ranks


def token_rows():
    return TokenRows(np.random.default_rng(0).integers(0, 9000, 1500).astype(np.uint16), 8, seed=5)


def stream_rows():
    def documents(file, first):
        return (f"file {file}, document {k}: {'x' * (file * 7 + k)}" for k in range(first, 4 + file))

    return StreamRows(documents, [[0, 5], [1], [2, 4], [3], [6]], ByteTokenizer(), 8)


def mixed_rows():
    sources = {"tokens": token_rows(), "streams": stream_rows(), "rare": stream_rows()}
    return MixedRows(sources, Mixture({"tokens": 0.5, "streams": 0.37, "rare": 0.13}, seed=5))


SOURCES = pytest.mark.parametrize("source", [token_rows, stream_rows, mixed_rows])


def run(source, sizes, steps, batch=BATCH, prefetch=0):
    """Global batches over a run that is stopped and goes on with each number of ranks in turn."""
    state, batches = None, []
    for size, count in zip(sizes, steps, strict=True):
        loaders = [Loader(source(), batch, rank, size, prefetch=prefetch) for rank in range(size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(count):
            parts = [next(loader) for loader in loaders]
            tokens = torch.stack([part.tokens for part in parts], dim=1).flatten(0, 1)
            batches.append((wrapped(part.hash for part in parts), tokens))
        state = union(loader.state_dict() for loader in loaders)
        for loader in loaders:
            loader.close()
    return batches


def wrapped(hashes):
    total = torch.zeros((), dtype=torch.int64)
    for value in hashes:
        total += value  # int64 wraps as a sum over ranks does
    return int(total)


@SOURCES
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_do_not_change_the_order(source, size):
    alone, shared = run(source, [1], [50]), run(source, [size], [50])
    assert [h for h, _ in alone] == [h for h, _ in shared]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(alone, shared, strict=True))
    assert len({h for h, _ in alone}) == 50


@SOURCES
@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 9)), min_size=1, max_size=4))
def test_resuming_on_other_ranks_does_not_change_the_order(source, legs):
    sizes, steps = [size for size, _ in legs], [count for _, count in legs]
    assert [h for h, _ in run(source, sizes, steps)] == [h for h, _ in run(source, [1], [sum(steps)])]


@SOURCES
def test_a_resume_with_another_batch_size_goes_on_with_the_next_row(source):
    first = Loader(source(), BATCH, prefetch=0)
    next(first), next(first)
    second = Loader(source(), 5, prefetch=0)
    second.load_state_dict(first.state_dict())
    rows = source().take(range(2 * BATCH, 2 * BATCH + 5))
    np.testing.assert_array_equal(next(second).tokens.numpy(), rows)


@SOURCES
def test_rows_to_skip_are_never_handed_out_and_every_cursor_stays(source):
    """Also where a jump goes over more rows than there are streams."""
    whole = [h for h, _ in run(source, [1], [12])]
    loader = Loader(source(), BATCH)
    next(loader)
    loader.skip([(5 * BATCH, 6 * BATCH), (2 * BATCH, 5 * BATCH)])
    found = [next(loader).hash for _ in range(3)]
    plain = Loader(source(), BATCH)
    for _ in range(8):
        next(plain)
    assert loader.state_dict() == plain.state_dict() | {"skipped": [[5 * BATCH, 6 * BATCH], [2 * BATCH, 5 * BATCH]]}
    resumed = Loader(source(), BATCH)
    resumed.load_state_dict(loader.state_dict())
    found += [next(resumed).hash for _ in range(4)]
    loader.close(), plain.close(), resumed.close()
    assert found == whole[1:2] + whole[6:]


@SOURCES
def test_the_state_is_of_what_was_handed_out_not_of_what_was_read_ahead(source):
    ahead, inline = Loader(source(), BATCH, prefetch=4), Loader(source(), BATCH, prefetch=0)
    for _ in range(5):
        a, b = next(ahead), next(inline)
        assert torch.equal(a.tokens, b.tokens) and a.hash == b.hash
        time.sleep(0.01)
        assert ahead.state_dict() == inline.state_dict()
    assert ahead.state_dict()["rows"] == 5 * BATCH
    ahead.close()
    assert next(ahead).hash == next(inline).hash
    ahead.close()


def test_the_hash_is_the_sum_of_the_hashes_of_rows_and_places():
    batch = next(Loader(token_rows(), BATCH, prefetch=0))
    total = 0
    for place, row in enumerate(token_rows().take(range(BATCH))):
        raw = np.asarray(row, dtype="<i4").tobytes() + np.array([place], dtype="<i8").tobytes()
        total += int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
    assert batch.hash % 2**64 == total % 2**64
    assert -(2**63) <= batch.hash < 2**63
    assert batch.tokens.dtype == torch.int64 and batch.tokens.shape == (BATCH, 9)


def state_after(rows_by_rank, steps, state):
    """The union of the states of all ranks after that many further batches."""
    loaders = [Loader(rows, 10, rank, len(rows_by_rank), prefetch=0) for rank, rows in enumerate(rows_by_rank)]
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
        for _ in range(steps):
            next(loader)
    return union(loader.state_dict() for loader in loaders)


def test_no_rank_keeps_old_cursors_of_streams_that_another_reads():
    state = None
    for size, steps in [(1, 3), (5, 1), (1, 40), (5, 60)]:
        state = state_after([stream_rows() for _ in range(size)], steps, state)
        positions = [state["streams"][str(number)]["position"] for number in range(5)]
        assert positions == [state["rows"] // 5] * 5


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 0.7, "b": 0.3}], ids=str)
def test_no_rank_keeps_old_cursors_of_a_mix(weights):
    """Also where each of two ranks only ever gets rows of one source."""
    mixture, state = Mixture(weights, seed=0), None
    for size, steps in [(1, 3), (2, 40), (2, 40)]:
        sources = [{name: stream_rows() for name in weights} for _ in range(size)]
        state = state_after([MixedRows(own, mixture) for own in sources], steps, state)
        for name, rows in mixture.count(state["rows"]).items():
            streams = state["sources"][name]["streams"]
            for number in range(5):
                behind = (rows - number + 4) // 5 - streams[str(number)]["position"]
                assert 0 <= behind <= (0 if size == 1 or weights["a"] == 1 else 4), (name, number, behind)


def test_streams_that_no_rank_has_come_by_since_a_resume_keep_their_cursors():
    loader = Loader(stream_rows(), 10, prefetch=0)
    next(loader)
    loaders = [Loader(stream_rows(), 2, rank, 2, prefetch=0) for rank in range(2)]
    for other in loaders:
        other.load_state_dict(loader.state_dict())
        next(other)
    streams = union(other.state_dict() for other in loaders)["streams"]
    assert streams["0"]["position"] == 3
    assert all(streams[str(number)]["position"] >= 2 for number in range(5))


class Breaking:
    seq_len = 4

    def take(self, indices):
        if indices[0] >= 4:
            raise ConnectionError("the hub went away")
        return np.zeros((len(indices), 5), dtype=np.int32)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_what_reading_raises_next_raises_after_the_batches_before_it(prefetch):
    loader = Loader(Breaking(), 2, prefetch=prefetch)
    next(loader), next(loader)
    for _ in range(2 if prefetch else 1):
        with pytest.raises(ConnectionError, match="went away"):
            next(loader)
    assert loader.state_dict() == {"rows": 4}
    loader.close()


def test_threads_end():
    def ours():
        return [thread for thread in threading.enumerate() if thread.name == "loader"]

    loader = Loader(token_rows(), BATCH)
    next(loader)
    assert len(ours()) == 1
    loader.close()
    loader.close()
    assert not ours()

    loader = Loader(token_rows(), BATCH)
    next(loader)
    del loader  # forgotten without close
    gc.collect()
    deadline = time.monotonic() + 5
    while ours() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ours()


class Waiting(Breaking):
    """Waits for its second row until it is closed."""

    def __init__(self):
        self.closed = threading.Event()

    def take(self, indices):
        if indices[0] >= 1:
            assert self.closed.wait(60)
            raise RuntimeError("closed")
        return np.zeros((len(indices), 5), dtype=np.int32)

    def close(self):
        self.closed.set()

    def load_state_dict(self, state):
        self.closed.clear()


def test_closing_ends_the_waiting_for_rows():
    rows = Waiting()
    loader = Loader(rows, 1)
    next(loader)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 2
    assert not rows.closed.is_set()  # open again
    assert loader.state_dict() == {"rows": 1}


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (0, 1), (2, 4)])
def test_rows_that_do_not_divide_are_an_error(rows, size):
    with pytest.raises(ValueError, match=f"a batch of {rows} rows cannot be dealt out to {size} ranks|{rows} rows"):
        Loader(token_rows(), rows, 0, size)
