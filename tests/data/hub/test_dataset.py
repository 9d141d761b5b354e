"""Which parts of a data set are held out and which stream reads what; its rows through the loader, whatever fails."""

import json
import pickle
import random
import threading
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.hub import dataset as hub_source
from muown_train.data.hub import streaming
from muown_train.data.hub.dataset import PIECES, _split_row_groups, _write_held_out
from muown_train.data.hub.files import HubFiles, Unit
from muown_train.data.hub.retry import Retry
from muown_train.data.hub.streaming import Cursor, Shuffle, read_windows
from muown_train.data.loader import Loader
from muown_train.data.sources import RunInfo
from muown_train.data.token_file import read_tokens
from tests.helpers.hub_server import Fault, Hub
from tests.helpers.text_files import ByteTokenizer, chat_tokenizer, union, word_tokenizer_json

REPO = "datasets/owner/name"
RUN = {"seq_len": 32, "seed": 3, "valid_tokens": 300, "vocab_size": 50280}
FEW, MANY = 3, 9  # files


def texts_of(file):
    return [f"Document {k} of file {file}: {'words ' * (k % 9)}." for k in range(70 + 5 * file)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    (root / REPO).mkdir(parents=True)
    for file in range(MANY):
        pq.write_table(pa.table({"text": texts_of(file)}), root / REPO / f"{file}.parquet", row_group_size=16)
    (root / "tokenizer.json").write_text(word_tokenizer_json())
    with Hub(root) as hub:
        yield hub


@pytest.fixture
def load(hub, tmp_path, monkeypatch):
    """hub_stream but for the looking up of the data set, which needs a process of its own (test_hub.py)."""
    hub.disturb = lambda path, number: None

    def open_files(path, name, split, text, revision, retry, progress):
        names = tuple(f"{file}.parquet" for file in range(int(path)))
        urls = tuple(f"{hub.url}/{REPO}/resolve/{hub.commit}/{name}" for name in names)
        return HubFiles(path, hub.commit, names, text, urls, None, Retry(retry.limit, 0.01, 0.02), progress)

    monkeypatch.setattr(hub_source, "open_hub", open_files)
    monkeypatch.setattr(streaming, "AHEAD", 7)  # or whole epochs of these little data are read ahead

    def load(files, **options):
        options = {"streams": 5, "shuffle": 7, "cache": tmp_path / "cache", "progress": lambda line: None} | options
        options = RUN | options
        run = RunInfo(**{key: options.pop(key) for key in [*RUN, "cache", "progress"]})
        return hub_source.hub_stream(str(files), str(hub.root / "tokenizer.json"), run=run, **options)

    return load


def test_another_end_of_text_token_makes_other_data(load, hub, tmp_path):
    (hub.root / "tokenizer.json").write_bytes(chat_tokenizer())
    try:
        plain, ended = load(FEW), load(FEW, end_of_text="<|im_end|>", special_tokens=True)
    finally:
        (hub.root / "tokenizer.json").write_text(word_tokenizer_json())
    assert (plain.valid == 256).sum() == (ended.valid == 258).sum() > 5 and not (ended.valid == 256).any()
    rows = ended.train.take(range(20))
    assert (rows == 258).any() and not (rows == 256).any()
    assert {"end_of_text": "<|im_end|>", "special_tokens": True}.items() <= ended.metadata.items()
    assert plain.metadata["tokenizer_hash"] == ended.metadata["tokenizer_hash"]
    assert len(list((tmp_path / "cache").glob("hub-*/index.json"))) == 2


def batches(load, files, legs, batch_rows=12, **options):
    """Rows and hashes of global batches of a run that goes on for (ranks, steps) after (ranks, steps)."""
    state, rows, hashes = None, [], []
    for size, steps in legs:
        loaders = [Loader(load(files, **options).train, batch_rows, rank, size) for rank in range(size)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        for _ in range(steps):
            parts = [next(loader) for loader in loaders]
            rows += [parts[k % size].tokens[k // size].tolist() for k in range(batch_rows)]
            hashes.append(sum(part.hash for part in parts) % 2**64)
        state = json.loads(json.dumps(union(loader.state_dict() for loader in loaders)))
        for loader in loaders:
            loader.close()
    return rows, hashes


@pytest.mark.slow
@pytest.mark.parametrize("files", [FEW, MANY])
def test_the_first_50_batches_whatever_the_ranks_batches_and_interruptions(load, files):
    rows, hashes = batches(load, files, [(1, 50)])
    assert len(set(hashes)) == 50
    for size in (2, 3, 4):
        assert batches(load, files, [(size, 50)])[1] == hashes
    chance = random.Random(files)
    for _ in range(2):
        cuts = sorted(chance.sample(range(1, 50), 3))
        legs = [(chance.choice([1, 2, 3, 4]), b - a) for a, b in zip([0, *cuts], [*cuts, 50], strict=True)]
        assert batches(load, files, legs)[1] == hashes, legs
    for batch_rows in (4, 20):
        assert batches(load, files, [(2, 120 // batch_rows)], batch_rows)[0] == rows[:120]


def epochs_of(rows, count):
    """Counter of the documents of all streams in each of the first epochs."""
    result = [Counter() for _ in range(count)]
    for number, units in enumerate(rows._units):
        for window in read_windows(rows._documents, units, Shuffle(*rows._shuffle, number), Cursor()):
            if window.start.epoch == count:
                break
            result[window.start.epoch].update(window.texts)
    return result


@pytest.mark.parametrize("files", [1, 2, FEW, MANY])
def test_every_document_once_an_epoch_and_none_that_is_held_out(load, files):
    data = load(files, valid_tokens=10**6)
    held = data.tokenizer.decode(data.valid.tolist()).split("<|endoftext|>")[:-1]
    assert 16 >= len(held) > 0 if files < MANY else held == texts_of(files - 1)
    documents = Counter(text for file in range(files) for text in texts_of(file))
    assert epochs_of(data.train, 2) == [documents - Counter(held)] * 2
    assert data.metadata["streams"] == (4 if files == 1 else 5)
    assert data.metadata["files"] == files and data.metadata["shuffle"] == 7


def test_streams_of_row_groups_read_their_own_alone(load, hub):
    train = load(FEW).train
    hub.served.clear()
    train.take([2])
    train.load_state_dict({})
    assert {path.rpartition("/")[2] for path, _ in hub.served} == {f"{unit.file}.parquet" for unit in train._units[2]}
    every = [unit for units in train._units for unit in units]
    assert all(unit.end is not None and unit.end - unit.begin == 1 for unit in every)
    stretches = sorted([(unit.file, unit.begin) for unit in units] for units in train._units)
    assert [unit for units in stretches for unit in units] == sorted((unit.file, unit.begin) for unit in every)


def test_sizes_of_row_groups_are_kept(load, hub):
    first = load(FEW)
    hub.served.clear()
    again = load(FEW)
    assert not hub.served and again.metadata == first.metadata and again.train._units == first.train._units


def test_what_the_order_depends_on(load):
    rows = load(FEW).train.take(range(100)).tolist()
    assert load(FEW, valid_tokens=17).train.take(range(100)).tolist() == rows
    assert load(FEW, valid_tokens=10**6).train.take(range(100)).tolist() == rows
    assert load(MANY, valid_tokens=17).train.take(range(100)).tolist() == load(MANY).train.take(range(100)).tolist()
    for other in ({"seed": 4}, {"shuffle": 8}, {"streams": 6}):
        assert load(FEW, **other).train.take(range(100)).tolist() != rows
    assert load(FEW, retries=0).train.take(range(100)).tolist() == rows


def test_workers_get_a_copy_that_gives_the_same_rows(load):
    train = load(FEW, progress=print).train
    copy = pickle.loads(pickle.dumps(train))
    assert copy.take(range(50)).tolist() == train.take(range(50)).tolist()
    copy.close()
    with pytest.raises(RuntimeError, match="closed"):
        copy.take([0])
    assert train.take([50]).shape == (1, 33)


def test_what_is_held_out_goes_with_how_files_are_split(load):
    """In the same cache: with two streams the last file is held out, with five the last row group."""
    for streams in (2, 5):
        data = load(FEW, streams=streams, valid_tokens=200)
        held = data.tokenizer.decode(data.valid.tolist()).split("<|endoftext|>")[:-1]
        assert held and not [text for text in held if epochs_of(data.train, 1)[0][text]]


def test_too_few_held_out_tokens_are_said(load):
    said = []
    data = load(FEW, valid_tokens=10**6, progress=said.append)
    assert said == [f"data set 3: {len(data.valid) - 1} tokens are held out, fewer than valid_tokens=1000000"]


FAULTS = [
    lambda number: Fault(status=503) if number % 6 == 0 else None,
    lambda number: Fault(status=429, headers={"Retry-After": "0"}) if number % 7 == 0 else None,
    lambda number: Fault(cut=3) if number % 8 == 0 else None,
    lambda number: Fault(delay=0.02, status=500 if number % 9 == 0 else None),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_hub_that_fails_changes_no_row(load, hub, number):
    rows, hashes = batches(load, FEW, [(1, 20)])
    before = len(hub.requests)
    said = []
    hub.disturb = lambda path, count: FAULTS[number](count)
    disturbed = batches(load, FEW, [(2, 7), (1, 13)], progress=said.append)
    assert disturbed == (rows, hashes) and len(hub.requests) > before and said


def test_after_the_limit_the_loader_raises_one_sentence(load, hub):
    loader = Loader(load(FEW, retries=3).train, 12)
    next(loader)
    hub.disturb = lambda path, number: Fault(status=503)
    message = r"^data set 3: reading \d.parquet failed 4 times in a row \(HTTPError: HTTP 503 Service Unavailable\)$"
    with pytest.raises(ConnectionError, match=message):
        for _ in range(200):
            next(loader)
    state = loader.state_dict()
    loader.close()
    hub.disturb = lambda path, number: None
    again = Loader(load(FEW).train, 12)
    again.load_state_dict(state)
    assert next(again).tokens.shape == (12, 33)
    again.close()


def test_closing_the_loader_while_the_hub_is_waited_for(load, hub, monkeypatch):
    monkeypatch.setattr(Retry, "_compute_pause", lambda self, failures: 60.0)
    train = load(FEW).train
    hub.disturb = lambda path, number: Fault(status=503)
    loader = Loader(train, 12)
    raised = []
    thread = threading.Thread(target=lambda: raised.append(_error(lambda: next(loader))), daemon=True)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    train.close()
    thread.join(20)
    assert isinstance(raised[0], RuntimeError) and "closed" in str(raised[0])
    loader.close()
    assert time.monotonic() - start < 8


class Texts:
    """Stands for the files of a hub."""

    def __init__(self, texts):
        self.texts = texts

    def read_documents(self, unit, first):
        return iter(self.texts[first:])


def test_rows_without_text_count_where_training_goes_on_after_those_held_out(tmp_path):
    texts = Texts(["", "ab", "", "cd", "", "ef"])
    index = _write_held_out(tmp_path, texts, [Unit(0)], ByteTokenizer(), 5)
    assert index["read"] == 4 and index["valid"]["documents"] == 2
    assert read_tokens(tmp_path / "valid.bin").tolist() == [98, 99, 0, 100, 101, 0]


def _error(call):
    try:
        call()
    except Exception as error:
        return error


@given(st.lists(st.lists(st.integers(1, 40_000), max_size=60), min_size=1, max_size=5), st.integers(1, 70))
def test_a_split_covers_each_row_group_once(files, streams):
    groups = [(file, k, size) for file, sizes in enumerate(files) for k, size in enumerate(sizes)]
    if len(groups) < 2:
        return
    stretches, held = _split_row_groups(groups, streams)
    assert len(stretches) == min(streams, sum(len(sizes) for sizes in files) - sum(u.end - u.begin for u in held))

    def flat(units):
        return [(unit.file, k) for unit in units for k in range(unit.begin, unit.end)]

    lengths = [len(flat(units)) for units in stretches]
    assert max(lengths) - min(lengths) <= 1
    assert flat([unit for units in [*stretches, held] for unit in units]) == [group[:2] for group in groups]
    assert all(len(units) <= PIECES + len(files) for units in stretches)
    assert 1 <= len(flat(held)) <= max(1, len(groups) // 20)


def test_what_is_held_out_of_a_large_data_set():
    _, held = _split_row_groups([(file, k, 1000) for file in range(14) for k in range(726)], 64)
    assert held == [Unit(13, 706, 726)]
