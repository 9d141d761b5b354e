"""scripts/prepare_data.py: what it writes, and that whatever interrupts it changes nothing of that."""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from rich.console import Console

from muown_train.data import document_source, prepare
from muown_train.data.prepare_report import Report
from muown_train.data.token_file import read_tokens
from tests.data.helpers import word_tokenizer_json
from tests.data.hub_server import Fault, Hub
from tests.data.test_hub import build

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
END = 256  # end of text of the byte tokenizer
LIMITS = {"valid_tokens": 200, "shard_tokens": 333}


INTERRUPTED = "interrupted; the same command goes on after the last complete shard"


class Killed(BaseException):
    pass


@pytest.fixture
def source(tmp_path):
    """Three files of texts of all lengths, one longer than two shards, and an empty one, which is no document."""
    words = random.Random(0)
    texts = [f"{k} " + "word " * words.randint(0, 12) for k in range(90)]
    texts[40], texts[55], texts[89] = "", "long " * 180, "é漢\x00end"
    for number, begin in enumerate(range(0, 90, 30)):
        lines = [json.dumps({"text": text}) for text in texts[begin : begin + 30]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    return list(filter(None, texts)), {
        "train": str(tmp_path / "*.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }


def run(folder, settings, **limits):
    prepare.prepare(folder, "files", settings, **{**LIMITS, **limits})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def tokens_of(folder, split):
    return [read_tokens(path) for path in sorted(folder.glob(f"{split}_*.bin"))]


def decode(ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(word_tokenizer_json()).decode(ids, skip_special_tokens=False)


def documents_in(parts):
    ids = np.concatenate(parts)
    assert ids[-1] == END
    return [decode(part[part != END].tolist()) for part in np.split(ids, np.flatnonzero(ids == END) + 1)[:-1]]


def test_each_document_is_once_in_training_or_held_out(source, tmp_path):
    texts, settings = source
    run(tmp_path / "out", settings)
    valid, train = (documents_in(tokens_of(tmp_path / "out", split)) for split in ("valid", "train"))
    assert valid + train == texts
    held = sum(len(text.encode()) + 1 for text in valid)
    assert held >= LIMITS["valid_tokens"] + 1 > held - len(valid[-1].encode()) - 1
    sizes = [len(part) for part in tokens_of(tmp_path / "out", "train")]
    assert len(sizes) > 3 and set(sizes[:-1]) == {333} and 0 < sizes[-1] <= 333


def test_boundaries_and_counts(source, tmp_path):
    texts, settings = source
    run(tmp_path / "out", settings)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    train = np.concatenate(tokens_of(tmp_path / "out", "train"))
    starts, before = [], 0
    for shard in index["shards"]:
        own = np.load(tmp_path / "out" / shard["file"].replace(".bin", ".documents.npy"))
        assert own.dtype == np.uint64 and len(own) == shard["documents"]
        if shard["split"] == "train":
            starts += (own + np.uint64(before)).tolist()
            before += shard["tokens"]
    assert starts == [0, *(np.flatnonzero(train == END) + 1)[:-1].tolist()]
    counts = np.load(tmp_path / "out" / "train_counts.npy")
    np.testing.assert_array_equal(counts, np.bincount(train, minlength=257))
    assert index["train"]["tokens"] == len(train)
    assert index["train"]["documents"] + index["valid"]["documents"] == len(texts)
    assert index["tokenizer"]["size"] == 257 and index["tokenizer"]["end_of_text"] == END
    assert (tmp_path / "out" / "tokenizer.json").read_text() == word_tokenizer_json()


def test_as_many_tokens_as_asked_for(source, tmp_path):
    _, settings = source
    run(tmp_path / "all", settings)
    run(tmp_path / "some", settings, tokens=1000)
    some, everything = (np.concatenate(tokens_of(tmp_path / name, "train")) for name in ("some", "all"))
    np.testing.assert_array_equal(some, everything[:1000])
    assert [len(part) for part in tokens_of(tmp_path / "some", "train")] == [333, 333, 333, 1]


@pytest.mark.parametrize("limits", [{}, {"tokens": 999}])
def test_killed_while_reading(source, tmp_path, monkeypatch, limits):
    _, settings = source
    run(tmp_path / "whole", settings, **limits)
    real = document_source.read_documents
    for stop in (3, 17, 31) if limits else (0, 17, 56, 89):

        def failing(paths, text, stop=stop):
            for number, document in enumerate(real(paths, text), 30 * int(paths[0].stem)):
                if number == stop:
                    raise Killed
                yield document

        folder = tmp_path / f"cut{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(document_source, "read_documents", failing)
            patch.setattr(document_source, "DOCUMENTS_AT_ONCE", 1)
            patch.setattr("muown_train.data.tokenizer.BATCH_DOCUMENTS", 1)
            with pytest.raises(Killed):
                run(folder, settings, **limits)
            assert not (folder / "index.json").exists()
        run(folder, settings, **limits)
        assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("late", [False, True])
def test_killed_around_each_rename(source, tmp_path, monkeypatch, late):
    _, settings = source
    run(tmp_path / "whole", settings, tokens=600)
    real = os.replace
    kills = 0
    while True:
        left = iter([True] * kills)  # so many renames pass

        def replace(*names, left=left):
            passes = next(left, False)
            if passes or late:
                real(*names)
            if not passes:
                raise Killed

        folder = tmp_path / f"cut{kills}"
        monkeypatch.setattr(os, "replace", replace)
        try:
            run(folder, settings, tokens=600)
            break
        except Killed:
            kills += 1
        monkeypatch.setattr(os, "replace", real)
        run(folder, settings, tokens=600)
        assert contents(folder) == contents(tmp_path / "whole"), kills
    assert kills > 12


def test_a_finished_folder_says_so_and_refuses_other_arguments(source, tmp_path, capsys):
    _, settings = source
    run(tmp_path / "out", settings)
    before = contents(tmp_path / "out")
    capsys.readouterr()
    run(tmp_path / "out", settings)
    assert "is finished" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"was begun with tokens=null, not with tokens=5000"):
        run(tmp_path / "out", settings, tokens=5000)
    with pytest.raises(ValueError, match=r"shard_tokens=333, not with shard_tokens=100"):
        run(tmp_path / "out", settings, shard_tokens=100)
    with pytest.raises(ValueError, match=r"not with data\.tokenizer=gpt2"):
        run(tmp_path / "out", settings | {"tokenizer": "gpt2"})
    assert contents(tmp_path / "out") == before


def interrupt(folder, settings, monkeypatch):
    with monkeypatch.context() as patch:
        shard = prepare._Shard.finish
        patch.setattr(prepare._Shard, "finish", lambda self: shard(self) if "4" not in self._path.name else killed())
        with pytest.raises(Killed):
            run(folder, settings)


def killed():
    raise Killed


def test_changed_data_are_refused(source, tmp_path, monkeypatch):
    _, settings = source
    interrupt(tmp_path / "out", settings, monkeypatch)
    (tmp_path / "0.jsonl").write_text('{"text": "other"}')
    with pytest.raises(ValueError, match="the data are not what they were"):
        run(tmp_path / "out", settings)


def test_changed_tokenizer_is_refused(source, tmp_path, monkeypatch):
    _, settings = source
    interrupt(tmp_path / "out", settings, monkeypatch)
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json("</s>"))
    with pytest.raises(ValueError, match="is not what it was"):
        run(tmp_path / "out", settings)


def test_two_processes_and_other_shards(source, tmp_path):
    _, settings = source
    folder = tmp_path / "out"
    folder.mkdir()
    with FileLock(folder / ".lock"), pytest.raises(ValueError, match="another process is preparing"):
        run(folder, settings)
    (folder / "mine.bin").write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"holds mine\.bin of other data"):
        run(folder, settings)
    assert (folder / "mine.bin").read_bytes() == b"precious"


def test_a_full_disk_is_one_sentence_and_goes_on(source, tmp_path, monkeypatch):
    _, settings = source
    run(tmp_path / "whole", settings)
    real = prepare.TokenWriter.write

    def write(self, ids):
        if "000003" in self._file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.TokenWriter, "write", write)
        with pytest.raises(OSError, match=r"disk of .*out is full: make room, and the same command goes on"):
            run(tmp_path / "out", settings)
    run(tmp_path / "out", settings)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid_tokens": 10**6}, "only 3929 tokens, and all are held out: lower valid_tokens=1000000"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be a whole number of at least 1"),
    ],
)
def test_impossible_limits(source, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", source[1], **change)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the data hold no text: at least two documents are needed"),
        (["", ""], "the data hold no text: at least two documents are needed"),
        (["one " * 90, ""], "the data are one document: at least two are needed, for whole documents are held out"),
    ],
)
def test_without_two_documents_that_is_said_and_the_folder_takes_others(source, tmp_path, texts, message):
    few = tmp_path / "few"
    few.mkdir()
    (few / "0.txt").touch()
    (few / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", source[1] | {"train": str(few / "*")})
    run(tmp_path / "out", source[1])
    run(tmp_path / "whole", source[1])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_before_a_shard_to_train_on_other_settings_are_accepted(source, tmp_path):
    _, settings = source
    with pytest.raises(ValueError, match="all are held out"):
        run(tmp_path / "out", settings, valid_tokens=10**6)
    run(tmp_path / "out", settings)
    run(tmp_path / "whole", settings)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_fewer_tokens_than_asked_for_is_said(source, tmp_path, capsys):
    run(tmp_path / "out", source[1], tokens=10**9)
    said = "is finished: 3,693 tokens to train on (all there are, fewer than the 1,000,000,000 asked for)"
    assert said in capsys.readouterr().err
    run(tmp_path / "some", source[1], tokens=1000)
    assert "1,000 tokens to train on and 236 held out" in capsys.readouterr().err


def test_out_must_be_a_folder(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out=.*file is a file: give a folder"):
        run(tmp_path / "file", source[1])


def test_a_tokenizer_must_be_given(source, tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer is not set"):
        run(tmp_path / "out", source[1] | {"tokenizer": None})
    with pytest.raises(ValueError, match=r"target stdlib cannot be prepared; files, hub_stream can"):
        prepare.prepare(tmp_path / "out", "stdlib", {})


def command(*words, **environment):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kill", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_killed_for_real(tmp_path, kill):
    words = random.Random(1)
    texts = ("".join(words.choices("abcdefgh \n", k=words.randint(1, 9000))) for _ in range(1000))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    settings = {"train": str(tmp_path / "a.jsonl"), "valid": None, "tokenizer": str(tmp_path / "tokenizer.json")}
    arguments = [f"data.{key}={value}" for key, value in settings.items() if value]
    arguments += ["data=files", f"out={tmp_path / 'out'}", "valid_tokens=1e5", "shard_tokens=1e5", "tokens=4e6"]

    process = command(*arguments)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "out" / "train_000003.bin").exists():
        time.sleep(0.01)
    process.send_signal(kill)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == (-9 if kill == signal.SIGKILL else 130), error
    if kill == signal.SIGINT:
        assert error.splitlines()[-1] == INTERRUPTED
    state = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert 2 < len(state["shards"]) < 41

    process = command(*arguments)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert "going on after" in error and "is finished: 4,000,000 tokens" in error
    settings["text"] = "text"
    prepare.prepare(tmp_path / "whole", "files", settings, 4_000_000, 100_000, 100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("seconds", [0.2, *(pytest.param(k / 10, marks=pytest.mark.slow) for k in range(3, 16))])
def test_interrupted_at_any_moment(source, tmp_path, seconds):
    """While libraries are imported, for the most part."""
    (tmp_path / "a.txt").write_text("many words " * 3_000_000)
    words = [f"data.tokenizer={source[1]['tokenizer']}", f"data.train={tmp_path}/*.*t*", f"out={tmp_path / 'out'}"]
    process = command("data=files", *words)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and error.splitlines() == [INTERRUPTED]


@pytest.mark.slow
def test_the_production_configuration_from_a_hub_that_fails(tmp_path):
    words = ["data=fineweb_edu", f"out={tmp_path / 'out'}", "valid_tokens=1000", "shard_tokens=5e5"]
    root = build(tmp_path / "hub", range(3))
    # each longer than what is encoded together, or the failure would come before anything is written
    texts = [[f"Document {k} of file {file}: " + "words " * 1400 for k in range(300)] for file in range(3)]
    for path, own in zip(sorted(root.glob("datasets/HuggingFaceFW/**/*.parquet")), texts, strict=True):
        pq.write_table(pa.table({"text": own}), path, row_group_size=64)
    with Hub(root) as hub:
        hub.next_requests(10**6, Fault(status=503), below="002.parquet")
        process = command(*words, "data.retries=0", **hub.environment(tmp_path / "home"))
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert "002.parquet failed 1 times in a row" in error.splitlines()[-1]
        assert len(json.loads((tmp_path / "out" / "progress.json").read_text())["shards"]) > 1
        hub.next_requests(1, Fault(status=503), below="002.parquet")
        process = command(*words, **hub.environment(tmp_path / "home"))
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert "going on after" in error and "trying again" in error
    found = documents_in(tokens_of(tmp_path / "out", "valid")) + documents_in(tokens_of(tmp_path / "out", "train"))
    assert found == [text for own in texts for text in own]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["source"]["revision"] == hub.commit and index["source"]["data"] == "HuggingFaceFW/fineweb-edu"
    assert index["tokenizer"]["name"] == "EleutherAI/gpt-neox-20b"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == word_tokenizer_json()


def lines_of_a_report(monkeypatch, total, bursts, seconds=1.0):
    """What is printed while so many documents come at once each second, those of a file after those of another."""
    clock = 100.0
    monkeypatch.setattr("muown_train.data.prepare_report.time.monotonic", lambda: clock)
    written = io.StringIO()
    report = Report(Console(file=written, width=200))
    report.start(1000, total)
    for done, documents in bursts:
        clock += seconds
        for _ in range(documents):
            report.add(10, done)
    return written.getvalue().splitlines()


def test_no_rate_before_there_is_one_and_then_that_of_the_last_seconds(monkeypatch):
    bursts = [(0.0, 500)] * 10 + [(0.0, 50)] * 40  # 5,000 tokens a second, then 500
    lines = lines_of_a_report(monkeypatch, 100_000, bursts)
    assert lines[:2] == ["going on after 1,000 tokens", "6,010 tokens of 100,000"]
    assert lines[2] == "31,010 tokens of 100,000, 5,000 tokens/s, 14 s left"
    assert lines[-1] == "69,010 tokens of 100,000, 500 tokens/s, 1 min 02 s left"
    rates = [int(line.split(", ")[1].split()[0].replace(",", "")) for line in lines[2:]]
    assert rates == sorted(rates, reverse=True) and set(rates[-4:]) == {500}


def test_files_that_are_done_tell_the_time_left_where_the_total_is_not_known(monkeypatch):
    bursts = [(0.0, 100)] * 9 + [(0.125, 100)] * 8  # nine seconds for an eighth of the files
    lines = lines_of_a_report(monkeypatch, None, bursts)
    assert lines[1:3] == ["2,010 tokens", "7,010 tokens, 1,000 tokens/s"]
    assert lines[3] == "12,010 tokens, 1,000 tokens/s, 1 min 08 s left"  # of 10,000 / 0.125
    assert lines[4] == "17,010 tokens, 1,000 tokens/s, 1 min 03 s left"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=files", "out=x", "token=5"], "there is no key token (did you mean tokens?); see --help"),
        (["data=files", "out=x", "tokens=-5"], "tokens=-5 must be a whole number of at least 1"),
        (
            ["data=files", "out=x", "tokens=1e30"],
            "tokens=1e+30 must be a whole number of at least 1 and less than 2^63",
        ),
        (["data=files", "out=x", "tokens=inf"], "tokens=inf must be a whole number"),
        (["data=fineweb_edu", "out=x", "data.streams=1.5"], "data.streams=1.5 must be a whole number of at least 1"),
        (["data=fineweb_edu", "out=x", "data.shuffle=0"], "data.shuffle=0 must be a whole number of at least 1"),
        (["data=fineweb_edu", "out=x", "data.retries=-1"], "data.retries=-1 must be a whole number of at least 0"),
        (["data=fineweb_edu", "out=x", "data.retries=true"], "data.retries=True must be a number"),
        (["data=files"], "out is not set"),
        (["out=x"], "data is not set"),
        (["data=fles", "out=x"], "there is no data=fles (did you mean files?)"),
        (["data=files", "out=x", "data.trian=x"], "there is no key data.trian (did you mean data.train?)"),
    ],
)
def test_bad_words_are_one_sentence(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import prepare_data

    with pytest.raises(SystemExit) as stopped:
        prepare_data.main()
    assert message in str(stopped.value) and "\n" not in str(stopped.value)
    assert list(tmp_path.iterdir()) == []
