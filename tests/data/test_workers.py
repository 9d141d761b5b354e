import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data import workers
from muown_train.data.loader import Loader
from muown_train.data.rows import TokenRows
from muown_train.data.text.tokenizer import HubTokenizer
from muown_train.data.workers import AHEAD, BLOCK, NOT_FOR_WORKERS, Workers, add_workers, iterate_blocks, make_sendable
from tests.helpers.runs import slow_but
from tests.helpers.sources import Logged, Odd, stream_rows
from tests.helpers.text_files import union, word_tokenizer_json

BATCH = 12  # rows; divides among 1, 2 and 3 ranks, and its cycles are none of the 5 streams'


def run(legs):
    """Rows and states of a run of legs (workers, ranks, batches), each going on where the one before stopped."""
    state, rows, states = None, [], []
    for count, size, steps in legs:
        loaders = [Loader(add_workers(stream_rows(), count), BATCH, rank, size, prefetch=0) for rank in range(size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            parts = [next(loader).tokens for loader in loaders]
            rows.append(torch.stack(parts, dim=1).flatten(0, 1))
            states.append([loader.state_dict() for loader in loaders])
            state = union(states[-1])
        for loader in loaders:
            loader.close()
    return torch.cat(rows), states


@pytest.mark.parametrize(("count", "size"), slow_but([(2, 1)], [(1, 1), (2, 1), (3, 1), (1, 3)], several=True))
def test_workers_change_neither_rows_nor_states(count, size):
    rows, states = run([(count, size, 12)])
    expected_rows, expected_states = run([(0, size, 12)])
    assert torch.equal(rows, expected_rows) and states == expected_states
    assert torch.equal(rows, run([(0, 1, 12)])[0])


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_workers_and_ranks():
    rows, states = run([(2, 1, 3), (0, 3, 2), (1, 2, 4), (3, 1, 3)])
    expected, alone = run([(0, 1, 12)])
    assert torch.equal(rows, expected)
    assert states[-1] == alone[-1]


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 200), st.integers(1, 8))
def test_workers_share_rows_by_streams(start, step, streams, count):
    cycle = streams // gcd(streams, step)
    count = min(count, cycle)
    indices = range(start, 1 << 62, step)
    shares = [iterate_blocks(indices, cycle, number, count) for number in range(count)]
    mine = [[next(blocks) for _ in range(8)] for blocks in shares]
    for blocks in mine:
        assert all(len({index % streams for index in block}) == len(block) <= BLOCK for block in blocks)
    rows = [list(itertools.chain(*blocks)) for blocks in mine]
    owned = [{index % streams for index in one} for one in rows]
    assert sum(map(len, owned)) == len(set().union(*owned))
    # row after row of the progression is the next of its worker
    for row in range(min(map(len, rows))):
        assert rows[row % cycle % count].pop(0) == start + row * step


def test_rows_in_any_order():
    rows, reference = Workers(stream_rows(), 1), stream_rows()
    for indices in ([4], [7], [10, 2], [9]):
        np.testing.assert_array_equal(rows.take(indices), reference.take(indices))
        assert rows.state_dict() == reference.state_dict()
    rows.close()


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ("raise", ConnectionError, "file 3 failed"),
        ("raise odd", ValueError, "404: file 3 is not there"),
        ("die", ChildProcessError, r"data worker 2 of 2, process \d+, was killed, as .* memory runs out: .*"),
        ("show", ValueError, r"\['numpy'\] 1 false"),  # libraries loaded, and threads
    ],
)
def test_what_ends_a_worker_is_raised(does, kind, message):
    rows = Workers(stream_rows(does), 2)
    for _ in range(2):
        with pytest.raises(kind) as caught:
            rows.take(range(100))
    assert type(caught.value) is kind and re.fullmatch(message, str(caught.value))
    assert not multiprocessing.active_children()


def test_a_worker_killed_from_outside_is_an_error_at_once():
    rows = Workers(stream_rows(), 1)
    before = rows.take(range(3))
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ChildProcessError, match="data worker 1 of 1"):
        for start in range(3, 100_000, 100):  # what was sent before is still there
            rows.take(range(start, start + 100))
    assert time.monotonic() - begin < 5
    rows.load_state_dict({})
    np.testing.assert_array_equal(rows.take(range(3)), before)
    rows.close()


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), KeyError("text"), Odd(404, "gone")])
def test_errors_keep_type_or_nearest_type_and_message(error):
    received = pickle.loads(pickle.dumps(make_sendable(error)))
    assert isinstance(error, type(received)) and isinstance(received, ValueError | KeyError)
    assert str(received) == str(error)


def test_closing_ends_the_processes():
    rows = Workers(stream_rows(), 2)
    first = rows.take(range(7))
    children = multiprocessing.active_children()
    assert len(children) == 2
    state = rows.state_dict()
    rows.close()
    rows.close()
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)  # there would be one if it were a zombie
    with pytest.raises(RuntimeError, match="the data were closed"):
        rows.take([7])
    assert rows.state_dict() == state
    rows.load_state_dict({})
    np.testing.assert_array_equal(rows.take(range(7)), first)
    del rows  # forgotten without close
    assert not multiprocessing.active_children()


def test_a_loader_that_waits_for_a_worker_can_be_closed():
    loader = Loader(Workers(stream_rows("wait"), 2), 1)
    next(loader)  # the second row is of the worker that waits
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 2
    assert not multiprocessing.active_children()
    assert loader.state_dict()["rows"] == 1


def test_a_wrong_state_is_found_when_it_is_loaded():
    cursor = {"position": 1, "epoch": 0, "window": 0, "unit": 0, "document": 0, "place": 0, "token": 0}
    with pytest.raises(ValueError, match="not the same data"):
        Workers(stream_rows(), 1).load_state_dict({"rows": 9, "streams": {"7": cursor}})


def test_what_is_read_ahead_is_bounded(tmp_path):
    log = tmp_path / "log"
    rows = Workers(Logged(stream_rows(seq_len=8192), log), 1)  # a block of 5 rows is more than a pipe holds
    rows.take([0])
    bound, deadline = 5 * (AHEAD + 3), time.monotonic() + 5  # received, being sent, waiting, computed
    while len(log.read_text().split()) < bound and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    assert len(log.read_text().split()) == bound
    rows.close()


SCRIPT = """
import multiprocessing, sys, threading, time
from muown_train.data.workers import Workers
from tests.helpers.sources import stream_rows

rows = Workers(stream_rows("wait"), 2)  # the second never has a row to send
try:
    if "early" in sys.argv:
        print("up", flush=True)
    rows.take([0])
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    for _ in range(600):  # a signal just before one long sleep would be noticed at its end
        time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def started(*arguments):
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_end(pids):
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "workers outlive the main process"
        time.sleep(0.02)


@pytest.mark.slow
def test_workers_end_with_the_main_process():
    main = started()
    pids = main.stdout.readline().split()
    assert len(pids) == 2
    main.kill()
    main.wait()
    wait_for_end(pids)
    main.communicate()


@pytest.mark.parametrize("arguments", [[], ["early"]])
def test_an_interrupt_is_for_the_main_process_alone(arguments):
    main = started(*arguments)
    pids = main.stdout.readline().split()
    time.sleep(0.15 if arguments else 0)  # early: the workers are importing
    os.killpg(main.pid, signal.SIGINT)
    out, errors = main.communicate(timeout=10)
    assert (out, errors, main.returncode) == ("interrupted\n", "", 0)
    wait_for_end(pid for pid in pids if pid != "up")


def test_a_job_told_to_save_and_stop_keeps_its_workers():
    rows, reference = Workers(stream_rows(), 1), stream_rows()
    rows.take(range(5))
    (worker,) = multiprocessing.active_children()
    for number in NOT_FOR_WORKERS:
        os.kill(worker.pid, number)
    np.testing.assert_array_equal(rows.take(range(5, 1500)), reference.take(range(1500))[5:])
    assert worker.is_alive()
    rows.close()


@pytest.mark.parametrize(("cores", "expected"), [(1, 0), (2, 1), (4, 3), (64, 4)])
def test_the_automatic_number_leaves_a_core_for_training(monkeypatch, cores, expected):
    monkeypatch.setattr(workers, "count_threads", lambda: cores)
    rows = add_workers(stream_rows(), None)
    assert (rows._count if isinstance(rows, Workers) else 0) == expected


def test_prepared_tokens_need_no_workers():
    rows = TokenRows(np.arange(100, dtype=np.uint16), 8, seed=0)
    assert add_workers(rows, None) is rows and add_workers(rows, 3) is rows


def test_a_tokenizer_is_the_same_in_a_worker():
    tokenizer = HubTokenizer("words", word_tokenizer_json().encode())
    copy, texts = pickle.loads(pickle.dumps(tokenizer)), ["a <|endoftext|> b"]
    np.testing.assert_array_equal(copy._encode_by_library(texts), tokenizer._encode_by_library(texts))
