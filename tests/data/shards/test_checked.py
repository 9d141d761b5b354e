"""Shards that a disk has damaged: blocks are compared with their checksums when they are first read."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from muown_train.data.shards import checked, dataset, prepare
from muown_train.data.shards.checked import Shard, compute_checksums, get_checksums_path
from muown_train.data.shards.dataset import check_shards, shards
from muown_train.data.shards.prepare import prepare_shards
from muown_train.data.sources import RunInfo
from muown_train.data.token_file import HEADER_BYTES, TokenWriter, read_tokens
from tests.helpers.text_files import word_tokenizer_json

SHARDS = ["train_000001.bin", "train_000002.bin", "train_000003.bin", "valid_000000.bin"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Shards of 400 tokens, with checksums of 64 bytes."""
    monkeypatch.setattr(checked, "BLOCK", 64)
    lines = [json.dumps({"text": f"text {k} " + "abc " * (k % 13)}) for k in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    settings = {"train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "words.json")}
    prepare_shards(tmp_path / "out", "files", settings, 1200, 300, 400)
    return tmp_path / "out"


def open_shards(folder, said=None, **changes):
    run = {"seq_len": 20, "seed": 0, "valid_tokens": 300, "cache": folder.parent / "cache", "vocab_size": 300} | changes
    return shards(str(folder), run=RunInfo(progress=(said if said is not None else []).append, **run))


def read_all(folder):
    data = open_shards(folder)
    return data.train.take(range(data.train.rows))


def flip(path, place, bit):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1 << bit
    path.write_bytes(raw)


def test_whole_shards_are_read_and_checked(folder):
    assert len(read_all(folder)) == 59
    assert check_shards(folder) == f"{folder}: 4 shards with 1,509 tokens are as they were written"


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("place", [0, 1, 333, 755])
def test_a_flipped_bit_names_the_shard_wherever_it_is(folder, name, place):
    for bit in (0, 5):
        if name.startswith("valid"):
            place = min(place, 2 * 301)
        flip(folder / name, HEADER_BYTES + place, bit)
        first = place // 64 * 32
        with pytest.raises(ValueError, match=rf"{name} is damaged: ids {first} to \d+ are not those that were written"):
            read_all(folder)
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            check_shards(folder)
        flip(folder / name, HEADER_BYTES + place, bit)
    read_all(folder)


def test_the_check_lists_all_damaged_shards(folder):
    flip(folder / SHARDS[0], HEADER_BYTES + 50, 1)
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-2])
    flip(get_checksums_path(folder / SHARDS[2]), -1, 1)
    with pytest.raises(ValueError) as error:
        check_shards(folder)
    parts = str(error.value).split("; ")
    assert [part.split(" is ")[0].rpartition("/")[2] for part in parts] == [
        "train_000001.bin",
        "train_000002.bin",
        "train_000003.checksums.npy",
    ]
    get_checksums_path(folder / SHARDS[2]).unlink()
    with pytest.raises(ValueError, match=r"train_000003.checksums.npy cannot be read \(No such file or directory\)"):
        check_shards(folder)


def test_damaged_counts_are_noticed(folder):
    flip(folder / "train_counts.npy", -16, 3)
    with pytest.raises(ValueError, match=r"train_counts.npy is damaged, since it does not count 1,200 ids"):
        open_shards(folder)


def test_each_block_is_compared_once(folder, monkeypatch):
    data, calls = open_shards(folder), []
    monkeypatch.setattr(checked.zlib, "crc32", lambda raw, crc=zlib.crc32: calls.append(raw) or crc(raw))
    for _ in range(2):
        data.train.take(range(2 * data.train.rows))
    assert len(calls) == 3 * 13 - 1  # 400 ids in blocks of 32, and no row reaches the last one


def test_shards_without_checksums_are_read(folder):
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        del shard["checksums"]
        get_checksums_path(folder / shard["file"]).unlink()
    (folder / "index.json").write_text(json.dumps(index))
    assert len(read_all(folder)) == 59
    assert "4 of them have no checksums, so only their sizes and ids were checked" in check_shards(folder)
    flip(folder / SHARDS[1], HEADER_BYTES + 701, 0)  # an id of 256 or more
    with pytest.raises(ValueError, match=r"train_000002.bin holds id \d+ at place 350, but the tokenizer has only 257"):
        read_all(folder)
    with pytest.raises(ValueError, match=r"train_000002.bin holds id \d+ at place 350"):
        check_shards(folder)


def test_a_preparation_that_an_earlier_version_began_goes_on(folder, monkeypatch):
    settings = {"train": str(folder.parent / "a.jsonl"), "tokenizer": str(folder.parent / "words.json")}
    finish = prepare._Shard.finish

    def finish_as_before(shard):
        if "000002" in shard._path.name:
            raise KeyboardInterrupt
        entry = finish(shard)
        get_checksums_path(shard._path).unlink()
        del entry["checksums"]
        return entry

    out = folder.parent / "begun"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare._Shard, "finish", finish_as_before)
        prepare_shards(out, "files", settings, 1200, 300, 400)
    prepare_shards(out, "files", settings, 1200, 300, 400)
    assert "2 of them have no checksums" in check_shards(out)
    assert (read_all(out) == read_all(folder)).all()


def test_checksums_cover_all_ids_of_both_types(tmp_path):
    for dtype in ("<u2", "<u4"):
        ids = np.arange(3 * checked.BLOCK, dtype=dtype) % 999
        checksums = compute_checksums(ids)
        assert len(checksums) == 3 * ids.itemsize
        assert checksums[1] == zlib.crc32(ids.tobytes()[checked.BLOCK : 2 * checked.BLOCK])
    assert len(compute_checksums(ids[:1])) == 1 and len(compute_checksums(ids[:0])) == 0
    assert len(Shard(tmp_path / "x.bin", ids[:0], 999, "").read(0, 5)) == 0


def test_the_check_needs_a_prepared_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no index.json: give a folder that `muown-train prepare` wrote"):
        check_shards(tmp_path)


@pytest.fixture
def imported(tmp_path):
    """Two shards of another tool, with an id beyond the tokenizer far inside the second."""
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    folder = tmp_path / "imported"
    folder.mkdir()
    ids = np.arange(9000) % 257
    write(folder / "x_val_0.bin", ids[:500])
    write(folder / "x_train_0.bin", ids)
    return folder


def write(path: Path, ids: np.ndarray) -> None:
    writer = TokenWriter(path, np.dtype("<u2"))
    writer.write(ids)
    writer.close()


def open_imported(folder, **changes):
    run = RunInfo(20, 0, 100, folder.parent / "cache", 300, changes.pop("progress", lambda line: None))
    return shards(str(folder), str(folder.parent / "words.json"), run=run)


@pytest.mark.parametrize("place", [0, 5000, 8999])
def test_an_imported_id_beyond_the_tokenizer_is_found_anywhere(imported, place, monkeypatch):
    monkeypatch.setattr(dataset, "AT_ONCE", 1000)
    ids = np.arange(9000) % 257
    ids[place] = 257
    write(imported / "x_train_1.bin", ids)
    for _ in range(2):  # what was found is remembered
        with pytest.raises(ValueError, match=r"x_train_1.bin holds id 257, but tokenizer .* has only 257 entries"):
            open_imported(imported)


def test_imported_shards_are_read_through_once(imported, monkeypatch):
    read = []
    find = dataset._find_largest_ids
    monkeypatch.setattr(dataset, "_find_largest_ids", lambda paths: read.append(paths) or find(paths))
    assert open_imported(imported).metadata == open_imported(imported).metadata
    assert len(read) == 1
    write(imported / "x_train_0.bin", np.arange(9001) % 257)  # another size
    open_imported(imported)
    assert len(read) == 2


def test_a_cache_that_cannot_be_written_means_to_read_again(imported):
    (imported.parent / "cache").touch()
    said = []
    for count in (1, 2):
        open_imported(imported, progress=said.append)
        assert len(said) == count and "cannot write the data cache" in said[0] and "checked at each start" in said[0]
    assert len(read_tokens(imported / "x_train_0.bin")) == 9000


@pytest.mark.parametrize("name", [*SHARDS, "train_counts.npy", "tokenizer.json", "checksums"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(folder, name, kind):
    path = get_checksums_path(folder / SHARDS[0]) if name == "checksums" else folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{path.name} is a pipe or device, and must be a regular file"):
        read_all(folder)
