"""Parts of files on a hub that misbehaves."""

import json
import pickle
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muown_train.data.hub.files import HubFiles, Unit
from muown_train.data.hub.retry import Interrupted, Retry, describe_cause, is_transient
from tests.helpers.hub_server import Fault, Hub

REPO = "datasets/owner/name"
GROUP = 16
TEXTS = [f"Document {k}: {'words ' * (k % 9)}" for k in range(90)]
ODD = ["", "x" * 2_000_000, None, "\ud7ff\x00\x7f", "", "é" * 30]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    folder = root / REPO
    folder.mkdir(parents=True)
    other = [str(k) * 1000 for k in range(len(TEXTS))]
    pq.write_table(pa.table({"other": other, "text": TEXTS}), folder / "a.parquet", row_group_size=GROUP)
    pq.write_table(pa.table({"text": ODD}), folder / "odd.parquet", row_group_size=4)
    (folder / "broken.parquet").write_bytes(b"PAR1" + bytes(500))
    with Hub(root) as hub:
        yield hub


@pytest.fixture
def files(hub):
    """Said things are in `files.progress.__self__`."""
    hub.disturb = lambda path, number: None
    hub.requests.clear()
    hub.served.clear()
    names = ("a.parquet", "odd.parquet", "broken.parquet", "absent.parquet")
    urls = tuple(f"{hub.url}/{REPO}/resolve/{hub.commit}/{name}" for name in names)
    said = []
    return HubFiles("owner/name", hub.commit, names, "text", urls, None, Retry(4, 0.01, 0.02), said.append)


def said(files):
    return files.progress.__self__


def test_units_are_row_groups_of_a_file(files):
    assert list(files.read_documents(Unit(0), 0)) == TEXTS
    assert list(files.read_documents(Unit(0, 1, 3), 0)) == TEXTS[GROUP : 3 * GROUP]
    assert list(files.read_documents(Unit(0, 1, 3, skip=5), 20)) == TEXTS[GROUP + 25 : 3 * GROUP]
    assert list(files.read_documents(Unit(0, 5), 0)) == TEXTS[5 * GROUP :]
    for first in (0, 1, GROUP - 1, GROUP, GROUP + 1, 89, 90, 200):
        assert list(files.read_documents(Unit(0), first)) == TEXTS[first:]
    assert HubFiles("x", "", ("a",), "text", files.urls[:1]).read_row_group_sizes() == [[16, 16, 16, 16, 16, 10]]


def test_enormous_and_empty_documents(files):
    assert list(files.read_documents(Unit(1), 0)) == [text or "" for text in ODD]
    assert list(files.read_documents(Unit(1), 1)) == [text or "" for text in ODD][1:]


def test_only_what_is_needed_is_fetched(files, hub):
    chunks = [pq.ParquetFile(hub.root / REPO / "a.parquet").metadata.row_group(k).column(1) for k in range(6)]
    needed = [chunk.total_compressed_size for chunk in chunks]
    for unit, first, groups in ((Unit(0), 0, range(6)), (Unit(0, 2, 4), 0, (2, 3)), (Unit(0), 4 * GROUP + 1, (4, 5))):
        hub.served.clear()
        list(files.read_documents(unit, first))
        magic, _footer, *data = [size for _, size in hub.served]
        assert magic == 4 and data == [needed[k] for k in groups]


FAULTS = [
    Fault(status=503),
    Fault(status=500),
    Fault(status=429, headers={"Retry-After": "0"}),
    Fault(cut=0),
    Fault(cut=2),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_failures_that_pass_are_outlasted(files, hub, fault):
    hub.disturb = lambda path, number: fault if number % 4 == 0 else None
    assert list(files.read_documents(Unit(0), 3)) == TEXTS[3:]
    assert len(said(files)) == 1, said(files)
    assert said(files)[0].startswith("data set owner/name: reading a.parquet failed (") and "\n" not in said(files)[0]
    if fault.status:
        assert f"HTTP {fault.status}" in said(files)[0] and "trying again for 0 minutes" in said(files)[0]
    assert list(files.read_documents(Unit(0), 0)) == TEXTS
    assert len(said(files)) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_after_the_limit_there_is_one_sentence(files, hub, fault):
    hub.next_requests(10**9, fault)
    with pytest.raises(
        ConnectionError, match=r"^data set owner/name: reading a.parquet failed 5 times in a row \(.+\)$"
    ):
        next(files.read_documents(Unit(0), 0))
    assert len(hub.requests) == 5
    with pytest.raises(ConnectionError, match=r"reading a.parquet failed 5 times"):
        HubFiles("owner/name", "", ("a.parquet",), "text", files.urls[:1], retry=files.retry).read_row_group_sizes()


def test_one_footer_that_cannot_be_read_ends_the_reading_of_all(files, hub):
    patient = HubFiles("x", "", files.names, "text", files.urls, None, Retry(9, 60), files.progress)
    hub.disturb = lambda path, number: Fault(status=503 if "a.parquet" in path else 404)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="HTTP 404"):
        HubFiles.read_row_group_sizes(replace(patient, urls=files.urls[1:] + files.urls[:1]))
    assert time.monotonic() - start < 10


def test_failures_in_a_row_are_counted_from_the_last_document(files, hub):
    """Each of the six row groups fails as often as is allowed."""
    failed = {}

    def disturb(path, number):
        group = len(texts) // GROUP
        if len(hub.served) < 2 or hub.served[-1][1] == 4 or failed.get(group, 0) == 4:
            return None
        failed[group] = failed.get(group, 0) + 1
        return Fault(status=502)

    texts = []
    hub.disturb = disturb
    for text in files.read_documents(Unit(0), 0):
        texts.append(text)
    assert texts == TEXTS
    assert failed == dict.fromkeys(range(6), 4)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 416])
def test_other_answers_are_not_retried(files, hub, status):
    hub.next_requests(1, Fault(status=status))
    with pytest.raises(
        ConnectionError, match=rf"^data set owner/name: reading a.parquet failed \(HTTPError: HTTP {status}"
    ):
        next(files.read_documents(Unit(0), 0))
    assert len(hub.requests) == 1 and not said(files)


def test_broken_and_absent_files_are_not_retried(files):
    for file, message in (
        (2, r"reading broken.parquet failed \(ArrowInvalid"),
        (3, r"reading absent.parquet failed .*404"),
    ):
        with pytest.raises(ConnectionError, match=message):
            next(files.read_documents(Unit(file), 0))
    assert not said(files)


def test_a_server_that_does_not_answer(files, hub, monkeypatch):
    monkeypatch.setattr("muown_train.data.hub.parquet.TIMEOUT", 0.2)
    hub.next_requests(1, Fault(delay=0.5))
    assert list(files.read_documents(Unit(0), 0)) == TEXTS
    assert "Timeout" in said(files)[0] or "timed out" in said(files)[0]


def test_a_closed_port_is_retried(files):
    nowhere = HubFiles("owner/name", "", ("a",), "text", ("http://127.0.0.1:9/a",), None, files.retry, files.progress)
    with pytest.raises(ConnectionError, match=r"^data set owner/name: reading a failed 5 times in a row \(.*refused"):
        next(nowhere.read_documents(Unit(0), 0))


def test_retry_after_is_obeyed(files, hub):
    hub.next_requests(1, Fault(status=429, headers={"Retry-After": "1"}))
    start = time.monotonic()
    assert next(files.read_documents(Unit(0), 0)) == TEXTS[0]
    assert 1 <= time.monotonic() - start < 5


def test_other_formats_are_read_by_datasets_and_retried(tmp_path):
    from datasets import load_dataset

    for k in range(2):
        lines = [json.dumps({"n": n, "text": f"document {n} of {k}"}) for n in range(300)]
        (tmp_path / f"{k}.jsonl").write_text("\n".join(lines))
    dataset = load_dataset(
        "json", data_files=[str(tmp_path / f"{k}.jsonl") for k in range(2)], split="train", streaming=True
    )

    class Unreliable:
        """Breaks off in the second hundred every other time."""

        calls = 0

        def shard(self, **options):
            part = dataset.shard(**options)
            Unreliable.calls += 1
            return part if Unreliable.calls % 2 == 0 else part.map(self._break, batched=True, batch_size=100)

        def _break(self, batch):
            if batch["n"][0] >= 100:
                raise TimeoutError("no answer")
            return batch

    files = HubFiles("x", "", ("0", "1"), "text", (), Unreliable(), Retry(2, 0.01), (log := []).append)
    assert list(files.read_documents(Unit(1, skip=2), 3)) == [f"document {n} of 1" for n in range(5, 300)]
    assert Unreliable.calls == 2 and len(log) == 1 and "TimeoutError: no answer" in log[0]


def test_waits_grow_and_sum_to_ten_minutes(monkeypatch):
    policy = Retry()
    waits = []
    monkeypatch.setattr(policy._stop, "wait", lambda seconds: waits.append(seconds))
    for failures in range(1, policy.limit + 1):
        policy.wait(failures, TimeoutError())
    assert 9 < policy.minutes < 11 and 7 * 60 < sum(waits) < 13 * 60
    assert 0.75 <= waits[0] <= 1.25 and 45 <= waits[-1] <= 75
    assert len({round(wait, 3) for wait in waits[7:]}) > 1  # not all at once


def test_a_wait_can_be_interrupted():
    policy = Retry(shortest=60)
    threading.Timer(0.1, policy.interrupt).start()
    start = time.monotonic()
    session = policy.start_session()
    with pytest.raises(Interrupted):
        policy.wait(1, TimeoutError(), session)
    with pytest.raises(Interrupted):  # one that was about to wait when it was interrupted
        policy.wait(1, TimeoutError(), session)
    assert time.monotonic() - start < 5


def test_a_retry_and_its_files_can_be_sent_to_a_process(files):
    copy = pickle.loads(pickle.dumps(HubFiles("x", "", ("a.parquet",), "text", files.urls[:1], retry=Retry(7))))
    assert copy.retry.limit == 7 and list(copy.read_documents(Unit(0), 0)) == TEXTS


def test_which_errors_may_pass():
    class Answer(Exception):
        def __init__(self, status):
            self.response = type("Response", (), {"status_code": status, "headers": {}})()

    for status, expected in ((429, True), (500, True), (503, True), (404, False), (401, False)):
        assert is_transient(Answer(status)) is expected
        wrapped = OSError("x")
        wrapped.__cause__ = Answer(status)
        assert is_transient(wrapped) is expected
    assert is_transient(ConnectionResetError()) and is_transient(TimeoutError())
    assert not any(map(is_transient, [FileNotFoundError("x"), ValueError("x"), pa.ArrowInvalid("x")]))
    assert describe_cause(ValueError("a\n b")) == "ValueError: a b"


COLUMNS = {  # name of a file -> its table and, if it cannot be read, what is said of it
    "large.parquet": (pa.table({"text": pa.array(["a", None], pa.large_string())}), None),
    "view.parquet": (pa.table({"text": pa.array(["a", None], pa.string_view())}), None),
    "dictionary.parquet": (pa.table({"text": pa.array(["a", None]).dictionary_encode()}), None),
    "nulls.parquet": (pa.table({"text": pa.nulls(2)}), None),
    "list.parquet": (pa.table({"text": [["a"], ["b"]]}), "column 'text' holds list<.*>, not text"),
    "binary.parquet": (pa.table({"text": [b"a", b"b"]}), "column 'text' holds binary, not text"),
    "int.parquet": (pa.table({"text": [1, 2]}), "column 'text' holds int64, not text"),
    "absent.parquet": (pa.table({"body": ["a"]}), r"has no column 'text' \(data.text\); its columns: body"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_other_kinds(hub, files, name):
    table, message = COLUMNS[name]
    pq.write_table(table, hub.root / REPO / name)
    odd = replace(files, names=(name,), urls=(f"{hub.url}/{REPO}/resolve/{hub.commit}/{name}",))
    if message is None:
        expected = ["", ""] if name == "nulls.parquet" else ["a", ""]
        assert list(odd.read_documents(Unit(0), 0)) == expected
    else:
        with pytest.raises(ConnectionError, match=rf"reading {name} failed \(.*{name}:? {message}"):
            list(odd.read_documents(Unit(0), 0))
    assert not said(files)  # nothing is tried again
