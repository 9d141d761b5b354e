"""data.bos: each document begins with the end-of-text token too, in every way that documents become tokens."""

import json

import numpy as np
import pytest

from muown_train.config.resume_check import check_same_data
from muown_train.data import sources
from muown_train.data.hub.streaming import Stream
from muown_train.data.shards.dataset import check_shards, shards
from muown_train.data.text.eval_texts import _decode_documents
from muown_train.data.text.tokenizer import HubTokenizer, begin_document, encode_documents
from muown_train.data.token_file import TokenWriter, read_tokens
from tests.helpers.prepared import END, run
from tests.helpers.text_files import ByteTokenizer, word_tokenizer_json

TEXTS = [f"text {k} " + "abc " * (k % 13) for k in range(120)]
BEGUN = {"bos": True}


@pytest.fixture
def settings(tmp_path):
    """Documents in a file and a tokenizer whose ids are bytes, as data=files takes them."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    return {"train": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "words.json")}


def make_run(tmp_path, vocab_size=4096):
    return sources.RunInfo(16, 0, 10**6, tmp_path / "cache", vocab_size, lambda line: None)


def begin_all(ids, end):
    """Put `end` before each document of ids in which it ends each document."""
    documents = np.split(ids, np.flatnonzero(ids == end) + 1)
    return np.concatenate([[end, *document] for document in documents if len(document)])


def test_ids_of_a_document():
    plain, begun = (HubTokenizer("t", word_tokenizer_json().encode(), bos=bos) for bos in (False, True))
    for ids, own in zip(encode_documents(TEXTS, plain), encode_documents(TEXTS, begun), strict=True):
        assert own.tolist() == [END, *ids.tolist()] and ids[-1] == END and own.dtype == ids.dtype
    assert plain.options == {} and begun.options == BEGUN and plain.fingerprint == begun.fingerprint
    # a document that is sampled begins after what lies before it in the middle of training data
    assert (begin_document(plain), begin_document(begun)) == ([END], [END, END])


@pytest.mark.parametrize("tokenizer", ["words.json", None], ids=["given", "trained"])
def test_files(settings, tmp_path, tokenizer):
    options = settings | {"tokenizer": tokenizer and settings["tokenizer"]}
    plain, begun = (sources.files(**options, **own, run=make_run(tmp_path, 300)) for own in ({}, BEGUN))
    end = plain.tokenizer.end_of_text
    np.testing.assert_array_equal(begun.train._tokens, begin_all(plain.train._tokens, end))
    np.testing.assert_array_equal(begun.valid, begin_all(plain.valid, end))
    assert begun.metadata["bos"] is True and "bos" not in plain.metadata
    assert begun.metadata["tokenizer_hash"] == plain.metadata["tokenizer_hash"]
    assert len(list((tmp_path / "cache").glob("files-*/index.json"))) == 2  # neither takes the other's tokens
    again = sources.files(**options, run=make_run(tmp_path, 300))
    np.testing.assert_array_equal(again.train._tokens, plain.train._tokens)
    with pytest.raises(ValueError, match=r"holds a run on other data \(bos was None, is True\)"):
        check_same_data(tmp_path, {"data": plain.metadata}, begun.metadata)
    read = [text for text in _decode_documents(begun.valid, begun.tokenizer) if text]
    assert read and read == [text for text in _decode_documents(plain.valid, plain.tokenizer) if text]


def test_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_find_library_files", lambda root: sorted(root.glob("[bc]*.py")))
    monkeypatch.setattr(sources, "is_held_out", lambda name: name.startswith(b"b"))
    plain, begun = (sources.stdlib(**own, run=make_run(tmp_path)) for own in ({}, BEGUN))
    np.testing.assert_array_equal(begun.train._tokens, begin_all(plain.train._tokens, 0))
    assert begun.metadata["bos"] is True and len(list((tmp_path / "cache").glob("stdlib-*/index.json"))) == 2


def test_streams_with_a_resume():
    class Begun(ByteTokenizer):
        options = BEGUN

    files = [["a", "bcd", ""], ["efghijklmnop"], ["q", "rs"]]

    def read(file, first):
        return iter(files[file][first:])

    epoch = [i for file in files for text in file if text for i in [0, *(byte + 1 for byte in text.encode()), 0]]
    stream, rows, cursors = Stream(read, range(3), Begun(), 4), [], []
    for _ in range(20):
        cursors.append(stream.cursor)
        rows.append(stream.next_row().tolist())
    assert rows == [(epoch * 5)[4 * k : 4 * k + 5] for k in range(20)]
    for cursor, row in zip(cursors, rows, strict=True):
        assert Stream(read, range(3), Begun(), 4, cursor).next_row().tolist() == row


def test_shards_say_how_they_were_made(settings, tmp_path):
    run(tmp_path / "plain", settings)
    run(tmp_path / "begun", settings | BEGUN)
    index = json.loads((tmp_path / "begun" / "index.json").read_text())
    assert index["tokenizer"]["options"] == BEGUN
    assert check_shards(tmp_path / "begun").endswith("are as they were written")
    ids = np.concatenate(
        [read_tokens(path) for path in [tmp_path / "begun" / shard["file"] for shard in index["shards"]]]
    )
    assert ids.tolist() == [i for text in TEXTS for i in [END, *_bytes_of(text), END]]
    starts = np.load(tmp_path / "begun" / "train_000001.documents.npy")
    assert (read_tokens(tmp_path / "begun" / "train_000001.bin")[starts.astype(int)] == END).all()
    info = sources.RunInfo(16, 0, 100, tmp_path / "cache", 4096)
    plain, begun = shards(str(tmp_path / "plain"), run=info), shards(str(tmp_path / "begun"), bos=True, run=info)
    assert begun.metadata["bos"] is True and begun.metadata["content"] != plain.metadata["content"]
    for name, made, asked in (("plain", "false", "true"), ("begun", "true", "false")):
        with pytest.raises(ValueError, match=rf"{name} were made with data.bos={made}, not {asked}: give the setting"):
            shards(str(tmp_path / name), bos=asked == "true", run=info)
    with pytest.raises(ValueError, match=r"begun was begun with data.bos=true, not with data.bos=false"):
        run(tmp_path / "begun", settings)


def _bytes_of(text):
    tokenizer = HubTokenizer("t", word_tokenizer_json().encode())
    return tokenizer.encode_batch([text])[0].tolist()


def test_shards_that_do_not_say_how_they_were_made(settings, tmp_path):
    for name in ("a_train_1.bin", "a_val_1.bin"):
        writer = TokenWriter(tmp_path / name, np.dtype("<u2"))
        writer.write(np.arange(200))
        writer.close()
    info = sources.RunInfo(16, 0, 100, tmp_path / "cache", 4096, lambda line: None)
    shards(str(tmp_path), settings["tokenizer"], run=info)
    with pytest.raises(ValueError, match=r"has no index.json, which says whether .* data.bos=true asks: give data.bos"):
        shards(str(tmp_path), settings["tokenizer"], bos=True, run=info)
