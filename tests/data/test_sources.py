import json
import subprocess
import sys

import numpy as np
import pytest

from muown_train.data import sources
from muown_train.data.corpus import compute_unigram_loss
from tests.helpers.paths import ROOT
from tests.helpers.text_files import word_tokenizer_json

RUN = {"seq_len": 16, "seed": 0, "valid_tokens": 500, "vocab_size": 4096}  # of a RunInfo, without its cache


@pytest.fixture
def texts(tmp_path):
    """300 documents in .jsonl, each with a number of its own."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for k in range(3):
        lines = [json.dumps({"text": f"document {n}, of words" * 3}) for n in range(100 * k, 100 * k + 100)]
        (folder / f"{k}.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    return folder


def load(texts, tmp_path, said=None, **options):
    options = {"tokenizer": str(tmp_path / "words.json"), "cache": tmp_path / "cache", **RUN, **options}
    say = (lambda message: None) if said is None else said.append
    run = sources.RunInfo(progress=say, **{key: options.pop(key) for key in [*RUN, "cache"]})
    return sources.files(options.pop("train", str(texts / "*.jsonl")), run=run, **options)


def documents_of(tokens, tokenizer):
    return tokenizer.decode(tokens).split("<|endoftext|>")[:-1]


def test_files_become_rows_and_held_out_tokens(texts, tmp_path):
    data = load(texts, tmp_path, valid_tokens=10**6)
    train = documents_of(data.train._tokens, data.tokenizer)
    valid = documents_of(data.valid, data.tokenizer)
    assert sorted(train + valid) == sorted(f"document {n}, of words" * 3 for n in range(300))
    assert not set(train) & set(valid) and len(valid) > 3
    assert json.loads(json.dumps(data.metadata)) == data.metadata
    assert data.metadata["documents"] == len(train) and data.metadata["held_out_documents"] == len(valid)
    assert data.metadata["tokens"] == sum(len(text) + 1 for text in train)
    assert data.metadata["held_out_tokens"] == len(data.valid) - 1
    assert len(load(texts, tmp_path).valid) == 501


def test_fewer_held_out_tokens_than_asked_for_are_said(texts, tmp_path):
    said = []
    left = len(load(texts, tmp_path, said, valid_tokens=10**6).valid) - 1
    assert said == [f"data=files: {left} tokens are held out, fewer than valid_tokens=1000000"]
    load(texts, tmp_path, said, valid_tokens=left)
    assert len(said) == 1


def test_unigram_loss(texts, tmp_path):
    data = load(texts, tmp_path)
    counts = [1.0] * 257
    for token in data.train._tokens.tolist():
        counts[token] += 1
    probabilities = [counts[token] / sum(counts) for token in data.valid.tolist()[1:]]
    assert data.unigram_loss == pytest.approx(-np.mean(np.log(probabilities)), abs=1e-12)
    assert compute_unigram_loss(np.zeros(8), np.array([3])) == pytest.approx(np.log(8))


def test_validation_files(texts, tmp_path):
    (tmp_path / "valid.txt").write_text("held out text that is its own file")
    data = load(texts, tmp_path, valid=str(tmp_path / "*.txt"))
    assert data.tokenizer.decode(data.valid) == "held out text that is its own file<|endoftext|>"
    assert data.metadata["documents"] == 300
    with pytest.raises(ValueError, match=r"1.jsonl is both in data.train and in data.valid"):
        load(texts, tmp_path, valid=[str(texts / "1.jsonl")])


def test_a_single_book_with_the_tokenizer_trained_on_it(texts, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Chapter {k}. It was a dark and stormy night, once more.\n" for k in range(900)))
    data = load(texts, tmp_path, train=str(book), tokenizer=None)
    read = data.tokenizer.decode(data.train._tokens) + data.tokenizer.decode(data.valid)
    assert data.tokenizer.name == "bpe-4096" and data.tokenizer.end_of_text == 0
    assert book.read_text().startswith(read[:1000]) and "Chapter 899" not in data.tokenizer.decode(data.train._tokens)
    again = load(texts, tmp_path, train=str(book), tokenizer=None)
    assert again.metadata == data.metadata


def test_the_second_time_reads_the_cache_and_notices_changes(texts, tmp_path):
    said, files = [], list(texts.iterdir())
    first = load(texts, tmp_path, tokenizer=None, said=said, valid_tokens=100)
    assert said == ["training a tokenizer of 4096 entries on the data"]
    stamp = cached(tmp_path, "train.bin").stat().st_mtime_ns
    second = load(texts, tmp_path, tokenizer=None, said=said, valid_tokens=100)
    assert len(said) == 1 and cached(tmp_path, "train.bin").stat().st_mtime_ns == stamp
    assert second.metadata == first.metadata

    files[0].write_text(files[0].read_text() + "\n" + json.dumps({"text": "one more"}))
    assert (
        load(texts, tmp_path, tokenizer=None, said=said, valid_tokens=100).metadata["content"]
        != first.metadata["content"]
    )
    assert len(said) == 2


@pytest.mark.parametrize("where", ["", "cache", "below/cache"])
def test_a_cache_among_the_texts_is_not_read_as_text(texts, tmp_path, where):
    """The second run finds index.json and tokenizer.json of the first below its own data.train."""
    options = {"train": str(texts), "tokenizer": None, "cache": texts / where}
    first = load(texts, tmp_path, **options)
    assert len([*texts.rglob("tokenizer.json")]) == 1
    assert load(texts, tmp_path, **options).metadata == first.metadata
    for pattern in ("**/*.json*", "**/*"):
        everything = load(texts, tmp_path, **options | {"train": f"{texts}/{pattern}"})
        assert everything.metadata["documents"] == first.metadata["documents"]


def test_a_run_among_the_texts_is_not_read_as_text(texts, tmp_path):
    before = load(texts, tmp_path, train=str(texts)).metadata
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "checkpoints/step-00000001/index.json"):
        path = texts / "runs" / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    assert load(texts, tmp_path, train=str(texts)).metadata == before
    (texts / "runs" / "manifest.json").write_text('{"text": "a file of that name alone marks no run"}')
    assert load(texts, tmp_path, train=str(texts)).metadata["documents"] != before["documents"]


def cached(tmp_path, name):
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2]),
        lambda folder: (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2] + b"zz"),
        lambda folder: (folder / "valid.bin").unlink(),
        lambda folder: (folder / "index.json").write_text("{"),
        lambda folder: (folder / "index.json").write_text("[]"),
    ],
)
def test_a_damaged_cache_is_made_again(texts, tmp_path, damage):
    before = load(texts, tmp_path)
    tokens = before.train._tokens.tolist()
    folder = cached(tmp_path, "train.bin").parent
    (folder.with_name(folder.name + ".partial")).mkdir()  # as a killed run leaves it
    damage(folder)
    after = load(texts, tmp_path)
    assert after.metadata == before.metadata and after.train._tokens.tolist() == tokens


def test_a_failure_leaves_nothing_half_made(texts, tmp_path):
    (texts / "3.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"3.jsonl line 1 is not JSON"):
        load(texts, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(texts, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the data cache .*file/.*cache="):
        load(texts, tmp_path, cache=tmp_path / "file")


def test_errors_come_before_the_data_are_read(texts, tmp_path):
    (texts / "0.jsonl").write_text("broken")
    with pytest.raises(ValueError, match=r"has 257 entries but model.vocab_size is 256: .* at least 257"):
        load(texts, tmp_path, vocab_size=256)
    with pytest.raises(ValueError, match=r"tokenizer bpe-256 has 257 entries but model.vocab_size is 256"):
        load(texts, tmp_path, tokenizer=None, vocab_size=256)
    with pytest.raises(ValueError, match=r"data.train is not set"):
        load(texts, tmp_path, train=None)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "data=files: there is no text to train on"),
        ("short", {}, "fewer than one row"),
        ("not so short as that", {"valid_tokens": 0}, "valid_tokens must be 1 or more, not 0"),
        ("too short to leave", {}, "the held-out part has 0 tokens, too few to evaluate"),
    ],
)
def test_too_few_tokens(texts, tmp_path, text, options, message):
    (tmp_path / "small.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(texts, tmp_path, train=str(tmp_path / "small.txt"), **options)


def test_no_documents(texts, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 200)
    (tmp_path / "zero.txt").touch()
    for tokenizer in (None, str(tmp_path / "words.json")):
        for name in ("none.jsonl", "empty.jsonl", "zero.txt"):
            with pytest.raises(ValueError, match="there is no text to train on"):
                load(texts, tmp_path, train=str(tmp_path / name), tokenizer=tokenizer)


def test_empty_texts_are_no_documents(texts, tmp_path):
    before = load(texts, tmp_path, valid_tokens=10**6)
    (texts / "1.txt").touch()
    with (texts / "1.jsonl").open("a") as file:
        file.write('\n{"text": ""}' * 200)
    after = load(texts, tmp_path, valid_tokens=10**6, train=str(texts / "*"))
    assert after.metadata == before.metadata
    np.testing.assert_array_equal(after.train._tokens, before.train._tokens)


SCRIPT = """
import sys
from pathlib import Path
from muown_train.data import cache, sources
cache.WAIT = 0.05
run = sources.RunInfo(seq_len=16, seed=0, valid_tokens=500, cache=Path(sys.argv[2]), vocab_size=4096)
data = sources.files(sys.argv[1], run=run)
print(data.metadata["content"], data.tokenizer.fingerprint, data.train.take(range(20)).sum())
"""


@pytest.mark.slow
def test_processes_that_start_at_once_prepare_once(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{k} words and {k * k} numbers; " for k in range(20_000)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    assert "".join(error for _, error in results).count("training a tokenizer") == 1
    assert any("waiting for another process" in error for _, error in results)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, for the real one takes seconds."""
    root = tmp_path / "lib"
    for k in range(60):
        path = root / ("json" if k % 2 else "") / f"module{k}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function{k}(argument):\n    return argument + {k}\n" * 5)
    for name in (
        "test/t.py",
        "x/tests/t.py",
        "site-packages/p.py",
        "config-3-linux/c.py",
        "_sysconfigdata_x.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("never_read = 1\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    return root


def test_stdlib(library, tmp_path):
    data = sources.stdlib(run=sources.RunInfo(cache=tmp_path / "cache", **(RUN | {"valid_tokens": 10**6})))
    text = data.tokenizer.decode(data.train._tokens) + data.tokenizer.decode(data.valid)
    assert "never_read" not in text and "# caf\ufffd" in text
    assert all(f"function{k}(" in text for k in range(60))
    assert data.metadata["data"] == "stdlib" and data.metadata["documents"] + data.metadata["held_out_documents"] == 61
    train, valid = data.tokenizer.decode(data.train._tokens), data.tokenizer.decode(data.valid)
    assert not [k for k in range(60) if f"function{k}(" in train and f"function{k}(" in valid]


def test_no_stdlib(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"no source files in .*python311.zip: use data=files"):
        sources.stdlib(run=sources.RunInfo(cache=tmp_path, **RUN))


def test_starting_up_loads_none_of_the_heavy_libraries():
    code = "import sys, muown_train.data.sources; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "'numpy'" in loaded
    for name in ("datasets", "pyarrow", "tokenizers", "huggingface_hub", "torch", "filelock"):
        assert f"'{name}'" not in loaded
