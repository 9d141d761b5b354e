"""Preparation of shards: what it writes, and that whatever interrupts it changes nothing of that."""

import errno
import io
import json
import os

import numpy as np
import pytest
from filelock import FileLock

from muown_train.data.shards import prepare
from muown_train.data.shards import reader as reader
from muown_train.data.token_file import TokenWriter
from muown_train.runtime.progress import StatusLine
from tests.helpers.prepared import END, LIMITS, contents, documents_in, run, tokens_of
from tests.helpers.text_files import word_tokenizer_json


class Killed(BaseException):
    pass


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
    real = reader.read_documents
    for stop in (3, 17, 31) if limits else (0, 17, 56, 89):

        def failing(paths, text, stop=stop, **options):
            for number, document in enumerate(real(paths, text, **options), 30 * int(paths[0].stem)):
                if number == stop:
                    raise Killed
                yield document

        folder = tmp_path / f"cut{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(reader, "read_documents", failing)
            patch.setattr(reader, "DOCUMENTS_AT_ONCE", 1)
            patch.setattr("muown_train.data.text.tokenizer.BATCH_DOCUMENTS", 1)
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
    real = TokenWriter.write

    def write(self, ids):
        if "000003" in self._file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "write", write)
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
        prepare.prepare_shards(tmp_path / "out", "stdlib", {})


def test_files_that_are_read_tell_the_time_left_if_the_total_is_not_known(monkeypatch):
    clock = 100.0
    monkeypatch.setattr("muown_train.runtime.progress.time.monotonic", lambda: clock)
    log = io.StringIO()
    tally = prepare._Tally(StatusLine(log, every=5.0, first=2.0), 1000, None)
    for fraction_read in [0.0] * 9 + [0.125] * 8:  # nine seconds for an eighth of the files
        clock += 1
        for _ in range(100):
            tally.add(10, fraction_read)
    lines = log.getvalue().splitlines()
    assert lines[:2] == ["going on after 1,000 tokens", "5,010 tokens, 802 tokens/s"]
    assert lines[2] == "10,010 tokens, 901 tokens/s, 1m18s left"  # of 10,000 / 0.125
    assert lines[3] == "15,010 tokens, 934 tokens/s, 1m10s left"
