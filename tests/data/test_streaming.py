import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.data.streaming import Cursor, Stream, StreamRows
from tests.data.helpers import ByteTokenizer

FILES = [["a", "bcd", ""], ["efghijklmnop"], [], ["q", "rs"], ["tuv"]]
T = 4


def reader(files):
    return lambda file, first: iter(files[file][first:])


def reference(files, rows, seq_len=T):
    """Rows out of the whole token stream of some files, repeated as often as needed."""
    epoch = [token for file in files for text in file for token in [b + 1 for b in text.encode()] + [0]]
    tokens = epoch * (rows * seq_len // len(epoch) + 2)
    return np.array([tokens[k * seq_len : k * seq_len + seq_len + 1] for k in range(rows)])


LISTS = st.lists(st.lists(st.text(max_size=12), max_size=4), min_size=1, max_size=4).filter(any)


@given(LISTS, st.integers(1, 9), st.integers(1, 40))
def test_rows_are_cut_from_the_documents_end_to_end(files, seq_len, rows):
    stream = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len)
    taken = np.array([stream.next_row() for _ in range(rows)])
    np.testing.assert_array_equal(taken, reference(files, rows, seq_len))
    assert stream.cursor.position == rows


@given(LISTS, st.integers(1, 9), st.integers(0, 40))
def test_a_cursor_is_all_that_a_resume_needs(files, seq_len, rows):
    first = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len)
    for _ in range(rows):
        first.next_row()
    second = Stream(reader(files), range(len(files)), ByteTokenizer(), seq_len, first.cursor)
    for _ in range(5):
        np.testing.assert_array_equal(second.next_row(), first.next_row())
        assert second.cursor == first.cursor


def make(read=None):
    return StreamRows(read or reader(FILES), [[0, 4], [1], [2, 3]], ByteTokenizer(), T)


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
    assert read == [state["streams"]["0"]["document"]] and read[0] > 600


def test_a_state_of_other_data_is_refused():
    for cursor in ({"3": {"position": 1}}, {"1": {"position": 1, "file": 1}}):
        with pytest.raises(ValueError, match="not the same data"):
            make().load_state_dict({"streams": cursor})


def test_files_without_documents_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match=r"the data files \[0, 1\] of a stream hold no document"):
        Stream(reader([[], []]), [0, 1], ByteTokenizer(), T).next_row()
    at_the_end = Cursor(epoch=3, file=1, document=1)
    stream = Stream(reader([["abcd"], ["x"]]), [0, 1], ByteTokenizer(), T, at_the_end)
    assert stream.next_row().tolist() == [98, 99, 100, 101, 0]
