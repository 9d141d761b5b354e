"""data=shards: prepared folders and those of modded-nanogpt, and what is said of damaged ones."""

import json
import math
import time
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra.utils import instantiate

from muown_train.config.compose import CONFIG_DIR
from muown_train.data.loader import Loader
from muown_train.data.shards import dataset
from muown_train.data.shards import prepare as preparation
from muown_train.data.shards.dataset import shards
from muown_train.data.sources import RunInfo
from muown_train.data.token_file import TokenWriter, read_tokens
from tests.helpers.text_files import word_tokenizer_json

RUN = RunInfo(seq_len=20, seed=0, valid_tokens=100, cache=Path("unused"), vocab_size=300)


@pytest.fixture(autouse=True)
def run_in_a_folder_of_its_own(tmp_path, monkeypatch):
    """The cache is used for shards without an index."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """Shards of 500 tokens."""
    texts = [f"text {k} " + "abc " * (k % 13) for k in range(120)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    settings = {"train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "tokenizer.json")}
    preparation.prepare_shards(tmp_path / "out", "files", settings, None, 300, 500)
    return tmp_path / "out"


def write(path, ids, dtype="<u2"):
    with closing(TokenWriter(path, np.dtype(dtype))) as writer:
        writer.write(np.asarray(ids))


@pytest.fixture
def nanogpt(tmp_path):
    """The layout of fineweb10B, with the byte tokenizer in place of GPT-2's."""
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    folder = tmp_path / "fineweb10B"
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, 257, 3000)
    write(folder / "fineweb_val_000000.bin", ids[:500])
    for number in (1, 2, 3):
        write(folder / f"fineweb_train_{number:06d}.bin", ids[500:][(number - 1) * 800 : number * 800])
    return folder, ids, str(tmp_path / "tokenizer.json")


def test_rows_are_those_of_the_concatenated_shards(folder):
    data = shards(str(folder), run=RUN)
    ids = np.concatenate([read_tokens(path) for path in sorted(folder.glob("train_*.bin"))])
    rows = (len(ids) - 1) // 20
    taken = {tuple(row) for row in data.train.take(range(rows)).tolist()}
    assert taken == {tuple(ids[k * 20 : k * 20 + 21].tolist()) for k in range(rows)}
    np.testing.assert_array_equal(data.valid, read_tokens(folder / "valid_000000.bin")[:101])
    assert data.metadata["tokens"] == len(ids) and data.metadata["held_out_tokens"] == 100
    assert data.tokenizer.decode(data.valid[:6].tolist()) == "text 0"
    p = (np.bincount(ids, minlength=257) + 1) / (len(ids) + 257)
    assert data.unigram_loss == pytest.approx(-np.mean([math.log(p[t]) for t in data.valid[1:]]))


def test_the_published_configuration(folder):
    settings = yaml.safe_load((CONFIG_DIR / "data" / "shards.yaml").read_text())
    data = instantiate(settings | {"path": str(folder)})(run=RUN)
    assert data.metadata["data"] == "shards"
    with pytest.raises(ValueError, match=r"data\.path is not set"):
        instantiate(settings)(run=RUN)


def test_a_resume_needs_no_state_and_ranks_do_not_matter(folder):
    def batches(legs):
        state, hashes = {"rows": 0}, []
        for size, steps in legs:
            loaders = [Loader(shards(str(folder), run=RUN).train, 12, rank, size, prefetch=0) for rank in range(size)]
            for loader in loaders:
                loader.load_state_dict(state)
            for _ in range(steps):
                hashes.append(sum(next(loader).hash for loader in loaders) % 2**64)
            state = json.loads(json.dumps(loaders[0].state_dict()))
            assert state == {"rows": 12 * len(hashes)}
        return hashes

    expected = batches([(1, 50)])
    assert len(set(expected)) == 50
    for legs in ([(2, 50)], [(3, 50)], [(4, 13), (2, 20), (1, 17)]):
        assert batches(legs) == expected


def test_other_data_have_other_content(folder, tmp_path):
    settings = {"train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "tokenizer.json")}
    preparation.prepare_shards(tmp_path / "same", "files", settings, None, 300, 200)
    preparation.prepare_shards(tmp_path / "less", "files", settings, 2001, 300, 500)
    preparation.prepare_shards(tmp_path / "lesser", "files", settings, 2000, 300, 500)
    content = {
        name: shards(str(tmp_path / name), run=RUN).metadata["content"] for name in ("out", "less", "lesser", "same")
    }
    assert len({content["out"], content["less"], content["lesser"]}) == 3
    assert shards(str(folder), run=replace(RUN, valid_tokens=50)).metadata["content"] == content["out"]


def test_modded_nanogpt_folders_are_read_as_they_are(nanogpt):
    folder, ids, tokenizer = nanogpt
    data = shards(str(folder), tokenizer, run=RUN)
    np.testing.assert_array_equal(data.valid, ids[:101])
    assert data.train.rows == (2400 - 1) // 20 and data.unigram_loss is None
    train = ids[500:2900]
    expected = sorted(train[k * 20 : k * 20 + 21].tolist() for k in range(data.train.rows))
    assert sorted(data.train.take(range(data.train.rows)).tolist()) == expected
    before = data.metadata["content"]
    write(folder / "fineweb_train_000003.bin", ids[:800])
    assert shards(str(folder), tokenizer, run=RUN).metadata["content"] != before


def test_modded_nanogpt_folders_name_no_tokenizer(nanogpt):
    folder, _, tokenizer = nanogpt
    with pytest.raises(ValueError, match=r"give data\.tokenizer, such as gpt2"):
        shards(str(folder), run=RUN)
    with pytest.raises(ValueError, match=r"257 entries but model\.vocab_size is 256"):
        shards(str(folder), tokenizer, run=replace(RUN, vocab_size=256))
    write(folder / "fineweb_train_000002.bin", [5, 50256, 7])
    with pytest.raises(ValueError, match=r"fineweb_train_000002\.bin holds id 50256, but .* only 257 entries"):
        shards(str(folder), tokenizer, run=RUN)
    write(folder / "fineweb_train_000002.bin", [5, 6, 7], "<u4")
    with pytest.raises(ValueError, match=r"fineweb_train_000002\.bin holds uint32, but .* takes uint16"):
        shards(str(folder), tokenizer, run=RUN)
    for path in folder.glob("*val*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"neither an index\.json nor files \*val\*\.bin"):
        shards(str(folder), tokenizer, run=RUN)


def test_few_held_out_tokens_are_said(nanogpt):
    folder, _, tokenizer = nanogpt
    said = []
    data = shards(str(folder), tokenizer, run=replace(RUN, valid_tokens=5000, progress=said.append))
    assert len(data.valid) == 500 and "499 tokens are held out, fewer than valid_tokens=5000" in said[0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def other_version(path):
    raw = bytearray(path.read_bytes())
    raw[4] = 9
    path.write_bytes(raw)


def change_index(path, **entries):
    """Replace entries of the index beside a shard."""
    file = path.with_name("index.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


AGAIN = ": copy it again, or prepare the shards again$"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"train_000002\.bin is truncated: it should hold 500 tokens but has 495" + AGAIN),
        (other_version, r"train_000002\.bin is a token file of version 9"),
        (lambda path: path.unlink(), r"train_000002\.bin does not exist, but index\.json lists it" + AGAIN),
        (lambda path: write(path, [1, 2, 3]), r"train_000002\.bin has 3 tokens, but index\.json says 500" + AGAIN),
        (lambda path: write(path, [1] * 500, "<u4"), r"train_000002\.bin holds uint32"),
        (
            lambda path: write(path.with_name("train_999999.bin"), [1]),
            r"train_999999\.bin is missing from ",
        ),
        (lambda path: path.with_name("index.json").write_text("{"), r"index\.json is damaged"),
        (lambda path: path.with_name("index.json").write_text('{"format": 1}'), r"index\.json is damaged"),
        (lambda path: path.with_name("index.json").write_text("[" * 100_000), r"index\.json is damaged"),
        (lambda path: change_index(path, shards=[5]), r"index\.json is damaged"),
        (lambda path: change_index(path, train={"text": "x", "tokens": "x"}), r"index\.json is damaged"),
        (lambda path: path.with_name("index.json").write_text('{"format": 2}'), r"is of format 2; format 1 is read"),
        (lambda path: path.with_name("train_counts.npy").write_bytes(b"x"), r"_counts\.npy cannot be read.*" + AGAIN),
        (lambda path: path.with_name("train_counts.npy").unlink(), r"cannot be read \(No such file.*\)" + AGAIN),
        (lambda path: path.with_name("index.json").unlink(), r"index\.json is missing.* with tokenizer\.json" + AGAIN),
        (
            lambda path: path.with_name("index.json").rename(path.with_name("progress.json")),
            r"is not finished: run the `muown-train prepare` command",
        ),
        (
            lambda path: path.with_name("tokenizer.json").write_text(word_tokenizer_json("</s>")),
            r"were made by tokenizer .* not by .*out/tokenizer\.json",
        ),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder / "train_000002.bin")
    with pytest.raises(ValueError, match=message):
        shards(str(folder), run=RUN)


def test_another_tokenizer_is_refused(folder, tmp_path):
    (tmp_path / "other.json").write_text(word_tokenizer_json("</s>"))
    with pytest.raises(ValueError, match=r"made by tokenizer .* not by data\.tokenizer=.*other\.json"):
        shards(str(folder), str(tmp_path / "other.json"), run=RUN)
    assert shards(str(folder), str(tmp_path / "tokenizer.json"), run=RUN).metadata["vocabulary"] == 257
    with pytest.raises(ValueError, match=r"data\.path=.*nowhere is not there: give the folder"):
        shards(str(tmp_path / "nowhere"), run=RUN)
    with pytest.raises(ValueError, match=r"data\.path=.*other\.json is a file: give the folder"):
        shards(str(tmp_path / "other.json"), run=RUN)


def test_100_gigabytes_open_and_sample_at_once(nanogpt, monkeypatch):
    folder, _, tokenizer = nanogpt
    count = 50_000_000_000
    header = np.zeros(256, dtype="<i4")
    header[:2] = [20240520, 1]
    header[2:4] = np.array([count], "<i8").view("<i4")
    with (folder / "fineweb_train_000002.bin").open("wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2 * count)
    monkeypatch.setattr(dataset, "_find_largest_ids", lambda paths: [0] * len(paths))  # the only thing that reads all
    shards(str(folder), tokenizer, run=RUN)  # what is imported on the way does not count
    tracemalloc.start()
    begin = time.perf_counter()
    data = shards(str(folder), tokenizer, run=replace(RUN, seq_len=1024))
    rows = data.train.take(range(10**7, 10**7 + 256))
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.train.rows == (count + 1600 - 1) // 1024 and rows.shape == (256, 1025)
    assert len(set(data.train.shuffle(range(10**7, 10**7 + 256)).tolist())) == 256
    assert seconds < 5 and peak < 20e6
