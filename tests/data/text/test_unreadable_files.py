"""Files that cannot be read among many: they are listed at once or left out. Small files may unpack to large ones."""

import errno
import gzip
import json

import numpy as np
import pytest

from muown_train.data import sources
from muown_train.data.shards import prepare as preparation
from muown_train.data.shards import reader
from muown_train.data.shards.dataset import shards
from muown_train.data.shards.prepare import prepare_shards
from muown_train.data.text import documents
from muown_train.data.text.documents import UnreadableFile, expand_globs, find_unreadable, read_documents
from muown_train.data.text.eval_texts import read_eval_text
from tests.helpers.text_files import word_tokenizer_json

BAD = {  # name -> content, what is said of it
    "b_latin.txt": (b"one\ntwo caf\xe9\n", "is not UTF-8 text: invalid continuation byte at byte 11, in line 2"),
    "c_utf16.txt": ("text".encode("utf-16"), "is not UTF-8 text: invalid start byte at byte 0, in line 1"),
    "d_broken.jsonl": (b'{"text": "fine"}\n{"text": ', "line 2 is not JSON"),
    "e_other.jsonl": (b'{"body": "x"}\n', "line 1 has no key 'text'"),
    "f_cut.jsonl.gz": (
        gzip.compress(b'{"text": "x"}' * 999)[:-9],
        "cannot read .*f_cut.jsonl.gz: Compressed file ended",
    ),
    "g_table.parquet": (b"PAR1 no more", "cannot read .*g_table.parquet"),
    "h_notes.pdf": (b"%PDF", "h_notes.pdf is of an unknown kind"),
    "i_number.json": (b'{"text": 5}', "line 1: 'text' is a int, not text"),
}


@pytest.fixture
def folder(tmp_path):
    """Two good files around the bad ones, and a tokenizer beside."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("a.jsonl", "z.jsonl"):
        (mixed / name).write_text("".join(json.dumps({"text": f"{name} text {k} of it"}) + "\n" for k in range(60)))
    for name, (raw, _) in BAD.items():
        (mixed / name).write_bytes(raw)
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    return mixed


def load(folder, pattern="*", said=None, **options):
    run = sources.RunInfo(16, 0, 20, folder.parent / "cache", 4096, (said if said is not None else []).append)
    return sources.files(str(folder / pattern), tokenizer=str(folder.parent / "words.json"), run=run, **options)


def prepare(folder, out, **options):
    settings = {"train": str(folder / "*"), "tokenizer": str(folder.parent / "words.json"), **options}
    prepare_shards(out, "files", settings, None, 100, 500)


def test_all_are_listed_at_once(folder, tmp_path):
    (folder / "h_notes.pdf").unlink()
    paths = expand_globs(str(folder / "*"))
    for read in (lambda: list(read_documents(paths)), lambda: load(folder), lambda: prepare(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"7 files cannot be read \(data.on_bad_file=skip leaves") as error:
            read()
        assert all(name in str(error.value) for name in BAD if name != "h_notes.pdf")
    for name, (_, reason) in BAD.items():
        if name != "h_notes.pdf":
            with pytest.raises(UnreadableFile, match=f"{name}.*{reason}" if "cannot" not in reason else reason):
                list(read_documents([folder / name]))


def test_all_of_unknown_kinds_are_listed_at_once(folder):
    (folder / "y.docx").touch()
    with pytest.raises(ValueError, match=r"h_notes.pdf, .*y.docx are of an unknown kind; .*=skip leaves such"):
        expand_globs(str(folder / "*"))


def test_bad_files_to_train_on_and_held_out_are_listed_together(folder):
    (folder / "w").mkdir()
    (folder / "w" / "held.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"2 files cannot be read .*d_broken.jsonl line 2 .*held.jsonl line 1"):
        load(folder, "[ad]*.jsonl", valid=str(folder / "w" / "*"))


def test_skipping_gives_the_data_of_the_files_that_are_left(folder):
    good = load(folder, "[az].jsonl")
    said = []
    data = load(folder, said=said, on_bad_file="skip")
    np.testing.assert_array_equal(data.train._tokens, good.train._tokens)
    assert data.metadata.pop("skipped_files").keys() == {str(folder / name) for name in BAD}
    assert data.metadata == good.metadata
    assert any(line.startswith("8 of 10 files cannot be read and are skipped") for line in said)
    again = []
    assert len(load(folder, said=again, on_bad_file="skip").metadata["skipped_files"]) == 8 and again == said

    (folder / "b_latin.txt").write_text("one\ntwo café\n")  # mended, so other data
    mended = load(folder, on_bad_file="skip").metadata
    assert len(mended["skipped_files"]) == 7 and mended["content"] != good.metadata["content"]


def test_the_files_are_searched_once_and_then_the_cache_knows(folder, monkeypatch):
    load(folder, on_bad_file="skip")
    monkeypatch.setattr(sources, "find_unreadable", None)
    assert len(load(folder, on_bad_file="skip").metadata["skipped_files"]) == 8


def test_without_bad_files_skipping_changes_nothing(folder):
    assert load(folder, "[az].jsonl", on_bad_file="skip").metadata == load(folder, "[az].jsonl").metadata


def test_nothing_left_and_other_words(folder):
    with pytest.raises(ValueError, match=r"all 7 files cannot be read, such as: .*b_latin.txt is not UTF-8"):
        load(folder, "[b-h]*", on_bad_file="skip")
    with pytest.raises(ValueError, match=r"data.on_bad_file='ignore' must be error or skip"):
        load(folder, on_bad_file="ignore")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_what_the_system_cannot_read_is_not_skipped(folder, monkeypatch, number):
    def fail(path):
        raise OSError(number, "the disk says no", str(path))

    monkeypatch.setattr(documents, "_open", fail)
    with pytest.raises(ValueError, match=r"cannot read .*a.jsonl: the disk says no") as error:
        find_unreadable([folder / "a.jsonl"])
    assert not isinstance(error.value, UnreadableFile)


def test_prepared_shards_of_the_files_that_are_left(folder, tmp_path, capsys):
    prepare(folder, tmp_path / "out", on_bad_file="skip")
    assert "8 of 10 files cannot be read and are skipped" in capsys.readouterr().err
    data = shards(str(tmp_path / "out"), run=sources.RunInfo(16, 0, 20, tmp_path / "cache", 4096))
    assert len(data.metadata["source"]["skipped"]) == 8 and data.metadata["documents"] > 100
    for path in folder.iterdir():
        if path.name in BAD:
            path.unlink()
    prepare(folder, tmp_path / "good")
    for name in ("train_000001.bin", "valid_000000.bin", "train_000002.bin"):
        assert (tmp_path / "good" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_an_interrupted_preparation_goes_on_without_those_that_it_has_skipped(folder, tmp_path, monkeypatch):
    prepare(folder, tmp_path / "whole", on_bad_file="skip")
    finish = preparation._Shard.finish

    def fail_at_the_third(shard):
        if "000002" in shard._path.name:
            raise KeyboardInterrupt
        return finish(shard)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparation._Shard, "finish", fail_at_the_third)
        prepare(folder, tmp_path / "out", on_bad_file="skip")
    monkeypatch.setattr(reader, "find_unreadable", None)  # is not asked again
    prepare(folder, tmp_path / "out", on_bad_file="skip")
    for path in (tmp_path / "whole").glob("*.*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_evaluation_of_the_files_that_are_left(folder, tmp_path):
    data = {"_target_": "muown_train.data.sources.files", "valid": str(folder / "*"), "on_bad_file": "skip"}
    text = read_eval_text(data, None, 20, tmp_path / "cache")
    assert len(list(text.documents())) == 120
    with pytest.raises(ValueError, match=r"data.end_of_text=<eos>: each run reads the text by its own tokenizer"):
        read_eval_text(data | {"end_of_text": "<eos>"}, None, 20, tmp_path / "cache")


def test_a_small_file_that_unpacks_to_a_large_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 1000)
    line = json.dumps({"text": "x" * 2000})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(f'{{"text": "fine"}}\n{line}\n'.encode()))
    (tmp_path / "b.jsonl").write_text(line)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"0" * 2000))
    (tmp_path / "d.txt").write_bytes(b"0" * 2000)  # nothing is hidden in it
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": "x" * 980}))
    faults = find_unreadable(sorted(tmp_path.iterdir()))
    assert {path.name: fault.split(path.name)[1] for path, fault in faults.items()} == {
        "a.jsonl.gz": " line 2 has more than 1,000 bytes: divide it into documents",
        "b.jsonl": " line 1 has more than 1,000 bytes: divide it into documents",
        "c.txt.gz": " unpacks to one document of more than 1,000 bytes: unpack it first",
    }
