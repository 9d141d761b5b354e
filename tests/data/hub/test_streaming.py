import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.data.hub import streaming
from muown_train.data.hub.retry import Retry
from muown_train.data.hub.streaming import Cursor, Shuffle, Stream, StreamRows, read_windows
from muown_train.data.loader import Loader
from tests.helpers.text_files import ByteTokenizer

FILES = [["a", "bcd", ""], ["efghijklmnop"], [], ["q", "rs"], ["tuv"]]
T = 4


def reader(files):
    return lambda file, first: iter(files[file][first:])


def reference(files, rows, seq_len=T):
    """Rows out of the whole token stream of some files, repeated as often as needed."""
    epoch = [token for file in files for text in file if text for token in [*text.encode(), -1]]
    epoch = [token + 1 for token in epoch]
    tokens = epoch * (rows * seq_len // len(epoch) + 2)
    return np.array([tokens[k * seq_len : k * seq_len + seq_len + 1] for k in range(rows)])


LISTS = st.lists(st.lists(st.text(max_size=12), max_size=4), min_size=1, max_size=4).filter(
    lambda files: any(map(any, files))
)


@given(LISTS, st.integers(1, 9), st.integers(1, 40))
def test_rows_are_cut_from_the_documents_end_to_end(files, seq_len, rows):
    stream = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len)
    taken = np.array([stream.next_row() for _ in range(rows)])
    np.testing.assert_array_equal(taken, reference(files, rows, seq_len))
    assert stream.cursor.position == rows


@given(LISTS, st.integers(1, 9), st.integers(0, 40), st.integers(1, 7), st.integers(0, 9))
def test_a_cursor_is_all_that_a_resume_needs(files, seq_len, rows, window, seed):
    shuffle = Shuffle(window, seed, 3)
    first = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len, None, shuffle)
    for _ in range(rows):
        first.next_row()
    second = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len, first.cursor, shuffle)
    for _ in range(5):
        np.testing.assert_array_equal(second.next_row(), first.next_row())
        assert second.cursor == first.cursor


def epochs_of(files, shuffle, count):
    """Texts of each of the first epochs, in order, read window by window."""
    result = [[] for _ in range(count)]
    for window in read_windows(reader(files), range(len(files)), shuffle, Cursor()):
        if window.start.epoch == count:
            return result
        result[window.start.epoch].append(window.texts)


@given(LISTS, st.integers(1, 7), st.integers(0, 99))
def test_every_document_once_an_epoch(files, window, seed):
    whole = Counter((file, number) for file, texts in enumerate(files) for number in range(len(texts)))
    named = [[f"{file}/{number}" for number in range(len(texts))] for file, texts in enumerate(files)]
    for windows in epochs_of(named, Shuffle(window, seed), 3):
        seen = Counter(tuple(map(int, text.split("/"))) for texts in windows for text in texts)
        assert seen == whole
        assert all(len(texts) == window for texts in windows[:-1])


def test_windows_shuffle_documents_and_epochs_differ():
    files = [[f"{file}/{number}" for number in range(100)] for file in range(5)]
    first, second = epochs_of(files, Shuffle(40, seed=7), 2)
    assert first != second and first == epochs_of(files, Shuffle(40, seed=7), 1)[0]
    assert first != epochs_of(files, Shuffle(40, seed=8), 1)[0]
    assert first != epochs_of(files, Shuffle(40, seed=7, stream=1), 1)[0]
    assert first[0] != sorted(first[0], key=lambda text: int(text.split("/")[1]))
    # a window holds 40 documents that follow each other, of the files in the order of the epoch
    order = [window[0].split("/")[0] for window in first]
    assert order != sorted(order)
    flat = [text for windows in first for text in windows]
    for number, texts in enumerate(first):
        assert {int(text.split("/")[1]) for text in texts} <= {k % 100 for k in range(40 * number, 40 * number + 40)}
    assert Counter(flat) == Counter(text for file in files for text in file)


def test_each_epoch_has_its_own_order_of_units_and_within_windows():
    (one, other) = epochs_of([[str(k) for k in range(100)]], Shuffle(40, seed=7), 2)
    assert [set(texts) for texts in one] == [set(texts) for texts in other]
    assert all(texts != again for texts, again in zip(one, other, strict=True))
    files = [[str(file)] * 40 for file in range(6)]
    orders = [[texts[0] for texts in windows] for windows in epochs_of(files, Shuffle(40, seed=7), 3)]
    assert len(set(map(tuple, orders))) == 3 and all(sorted(order) == list("012345") for order in orders)
    starts = []
    for window in read_windows(reader(files), range(6), Shuffle(40), Cursor()):
        starts.append((window.start.epoch, window.start.window, window.start.unit))
        if len(starts) == 12:
            break
    assert starts == [(epoch, k, k) for epoch in range(2) for k in range(6)]


def test_windows_end_early_for_enormous_documents(monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW_CHARACTERS", 100)
    files = [["x" * 30] * 10 + ["y" * 500, "z"]]
    (windows,) = epochs_of(files, Shuffle(8), 1)
    assert [sum(map(len, texts)) for texts in windows] == [120, 120, 560, 1]
    taken = StreamRows(reader(files), [[0]], ByteTokenizer(), T, shuffle=8)
    whole = taken.take(range(400))
    resumed = StreamRows(reader(files), [[0]], ByteTokenizer(), T, shuffle=8)
    halfway = StreamRows(reader(files), [[0]], ByteTokenizer(), T, shuffle=8)
    halfway.take(range(95))
    resumed.load_state_dict(json.loads(json.dumps(halfway.state_dict())))
    np.testing.assert_array_equal(resumed.take(range(95, 400)), whole[95:])


def make(read=None, **options):
    return StreamRows(read or reader(FILES), [[0, 4], [1], [2, 3]], ByteTokenizer(), T, **options)


def test_streams_are_dealt_out_in_turn():
    rows = make().take(range(30))
    for number, files in enumerate(([0, 4], [1], [2, 3])):
        np.testing.assert_array_equal(rows[number::3], reference([FILES[f] for f in files], 10))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), max_size=12))
def test_a_row_depends_on_its_number_alone(indices):
    whole, rows = make().take(range(61)), make()
    for index in indices:
        np.testing.assert_array_equal(rows.take([index])[0], whole[index])


def test_streams_are_opened_when_asked_for_and_resumed_where_they_were():
    opened = []

    def read(file, first):
        opened.append((file, first))
        return iter(FILES[file][first:])

    rows = make(read)
    rows.take([1, 4, 7])
    assert {file for file, _ in opened} == {1}
    state = json.loads(json.dumps(rows.state_dict()))
    assert list(state["streams"]) == ["1"] and state["streams"]["1"]["position"] == 3

    again = make(read)
    again.load_state_dict(state)
    assert again.state_dict() == state  # kept although nothing was opened
    np.testing.assert_array_equal(again.take([10]), make().take([10]))


def test_a_resume_does_not_read_what_was_before():
    files = [[f"document {k}" for k in range(1000)]]
    rows = StreamRows(reader(files), [[0]], ByteTokenizer(), T)
    rows.take(range(2000))
    read = []

    def later(file, first):
        read.append(first)
        return iter(files[file][first:])

    state = rows.state_dict()
    again = StreamRows(later, [[0]], ByteTokenizer(), T)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.take([2000]), rows.take([2000]))
    assert read[0] == state["streams"]["0"]["document"] and read[0] > 600


def test_a_resume_encodes_from_its_place_in_the_window_on():
    encoded = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):
            encoded.extend(texts)
            return super().encode_batch(texts)

    files = [[f"document {k:04}" for k in range(1000)]]
    rows = StreamRows(reader(files), [[0]], ByteTokenizer(), T, shuffle=100)
    rows.take(range(300))
    state = rows.state_dict()
    assert state["streams"]["0"]["place"] > 0 and state["streams"]["0"]["document"] == 0
    again = StreamRows(reader(files), [[0]], Counting(), T, shuffle=100)
    again.load_state_dict(state)
    again.take([300])
    assert len(encoded) == 100 - state["streams"]["0"]["place"]


def test_a_state_of_other_data_is_refused():
    for cursor in ({"3": {"position": 1}}, {"1": {"position": 1, "unit": 1}}):
        with pytest.raises(ValueError, match="not the same data"):
            make().load_state_dict({"streams": cursor})
    with pytest.raises(ValueError, match="the saved position of stream 1 has file, which this version does not know"):
        make().load_state_dict({"streams": {"1": {"position": 1, "file": 0}}})


def test_files_without_documents_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match=r"^0, 1 of the data, which make up a stream, hold no text"):
        Stream(reader([[], ["", ""]]), [0, 1], ByteTokenizer(), T).next_row()
    at_the_end = Cursor(epoch=3, unit=1, document=1)
    stream = Stream(reader([["abcd"], ["x"]]), [0, 1], ByteTokenizer(), T, at_the_end)
    assert stream.next_row().tolist() == [98, 99, 100, 101, 0]


def test_one_that_waits_does_not_keep_others_from_reading():
    answers, read = threading.Event(), []

    def documents(file, first):
        if file == 0:
            answers.wait(60)
        for number in range(first, 1000):
            read.append(file)
            yield f"document {number} of {file}"

    rows = StreamRows(documents, [[0], [1], [2]], ByteTokenizer(), T, shuffle=50)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(rows.take(range(9))))
    thread.start()
    deadline = time.monotonic() + 20
    while not (read.count(1) >= 100 and read.count(2) >= 100) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    counts = Counter(read)
    assert not taken and counts[0] == 0
    assert 100 <= counts[1] <= 200 and 100 <= counts[2] <= 200  # bounded: it is not read to the end
    answers.set()
    thread.join(20)
    assert taken[0].shape == (9, T + 1)
    rows.load_state_dict({})


def test_closing_ends_what_waits():
    retry = Retry(shortest=60)

    def documents(file, first):
        yield "one document"
        retry.wait(1, TimeoutError())

    rows = StreamRows(documents, [[0]], ByteTokenizer(), T, interrupt=retry.interrupt)
    raised = []

    def read():
        try:
            rows.take(range(50))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    rows.close()
    thread.join(20)
    assert raised == ["the data were closed while they were read"] and time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="the data were closed"):
        rows.take([0])
    rows.load_state_dict({})
    assert rows.take([0])[0].tolist() == [b + 1 for b in b"one d"]
    rows.close()
    thread = rows._streams[0].prefetcher._thread
    thread.join(5)
    assert not thread.is_alive()


def test_an_error_is_raised_each_time_and_after_the_rows_before_it():
    def documents(file, first):
        yield from ["abcd", "efgh"]
        raise ConnectionError("gone")

    rows = StreamRows(documents, [[0]], ByteTokenizer(), T)
    assert rows.take([0]).shape == (1, T + 1)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"^gone$"):
            rows.take(range(1, 9))


def test_threads_end_with_the_rows():
    before = threading.active_count()
    rows = make(shuffle=2)
    rows.take(range(9))
    assert threading.active_count() > before
    del rows
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_through_the_loader_however_it_is_interrupted():
    files = [[f"document {k} of {file}" for k in range(7 + file)] for file in range(5)]

    def rows():
        return StreamRows(reader(files), [[0, 3], [1, 4], [2]], ByteTokenizer(), T, shuffle=3, seed=5)

    whole = rows().take(range(600))
    taken, state = [], None
    for batches in (1, 7, 3, 20, 19):
        loader = Loader(rows(), 12)
        if state:
            loader.load_state_dict(state)
        taken += [next(loader).tokens.numpy() for _ in range(batches)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    np.testing.assert_array_equal(np.concatenate(taken), whole)
    assert all(cursor["epoch"] > 1 for cursor in state["streams"].values())
