import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from muown_train.data.text.documents import expand_globs, read_documents, read_with_labels, replace_surrogates

TEXTS = ["one", "", "drei\r\nvier ü \U0001f600", "nul \x00 and bell \x07", "x" * 100_000]


def lines(texts, key="text"):
    return "".join(json.dumps({key: text, "id": k}) + "\n" for k, text in enumerate(texts)).encode()


WRITERS = {
    "a.jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    "b.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(lines(texts))),
    "c.jsonl.xz": lambda path, texts: path.write_bytes(lzma.compress(lines(texts))),
    "d.jsonl.zst": lambda path, texts: path.write_bytes(zstandard.compress(lines(texts))),
    "e.parquet": lambda path, texts: pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_formats(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    assert list(read_documents([tmp_path / name])) == TEXTS


def test_a_mix_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for k, (name, write) in enumerate(WRITERS.items()):
        write(tmp_path / "deep" / "er" / name, [f"{k}a", f"{k}b"])
    (tmp_path / "deep" / "0.txt").write_bytes(b"\xef\xbb\xbfwith\r\nmark")
    paths = expand_globs([str(tmp_path / "**" / "*.*"), str(tmp_path / "deep" / "*.txt")])
    assert list(read_documents(paths)) == ["with\r\nmark"] + [f"{k}{c}" for k in range(5) for c in "ab"]


def test_home_and_literal_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "odd[1].txt").write_text("odd")
    assert expand_globs("~/odd[1].txt") == [tmp_path / "odd[1].txt"]
    assert expand_globs("~/*.txt") == [tmp_path / "odd[1].txt"]


def test_other_column_and_null(tmp_path):
    pq.write_table(pa.table({"body": ["a", None, "b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"body": "c"}\n\n{"body": null}\n{"body": "d"}')
    assert list(read_documents(expand_globs(str(tmp_path / "*")), "body")) == list("abcd")


def test_several_frames_of_zstandard(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines(["a"])) + zstandard.compress(lines(["b"])))
    assert list(read_documents([tmp_path / "a.jsonl.zst"])) == ["a", "b"]


def test_lone_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert list(read_documents([tmp_path / "a.jsonl"])) == ["a\ufffdb \U0001f600"]
    assert replace_surrogates("\udc00ok") == "\ufffdok"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', "line 2 is a list, not a JSON object"),
        (
            "a.jsonl",
            b'{"body": "a", "url": "b"}\n',
            r"line 1 has no key 'text' \(data.text\), only body, url",
        ),
        ("a.jsonl", b'{"text": 5}\n', "line 1: 'text' is a int, not text"),
        ("a.jsonl", b'\n{"text": "\xff"}\n', "line 2 is not JSON"),
        ("a.jsonl.gz", b"not gzip", "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS))[:-20], "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS))[:40] + b"\xff" * 40, "cannot read .*a.jsonl.gz"),
        ("a.jsonl.xz", b"not xz", "cannot read .*a.jsonl.xz"),
        ("a.jsonl.xz", lzma.compress(lines(TEXTS))[:-20], "cannot read .*a.jsonl.xz"),
        ("a.jsonl.zst", b"not zst", "cannot read .*a.jsonl.zst"),
        ("a.jsonl.zst", zstandard.compress(lines(TEXTS))[:-9], "cannot read .*a.jsonl.zst"),
        ("a.parquet", b"PAR1 not parquet", "cannot read .*a.parquet"),
        ("a.txt", b"latin \xe9t\xe9", "a.txt is not UTF-8 text: .* at byte 6"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents([tmp_path / name]))


def test_missing_or_wrong_columns(tmp_path):
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'text' \(data.text\).* content, n"):
        list(read_documents([tmp_path / "a.parquet"]))
    with pytest.raises(ValueError, match="column 'n' holds int64, not text"):
        list(read_documents([tmp_path / "a.parquet"], "n"))


def test_a_file_that_vanished_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*gone.txt: No such file"):
        list(read_documents([tmp_path / "gone.txt"]))


def test_globs_that_cannot_be_meant(tmp_path):
    (tmp_path / "notes.pdf").touch()
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"data.valid: no file matches .*\*.csv"):
        expand_globs([str(tmp_path / "*.txt"), str(tmp_path / "*.csv")], "data.valid")
    with pytest.raises(ValueError, match=r"notes.pdf is of an unknown kind; .*\.txt, \.jsonl.*\.parquet"):
        expand_globs(str(tmp_path / "*"))
    with pytest.raises(ValueError, match="a folder: name the files in it"):
        expand_globs(str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.train must be a glob or a list of globs, but holds 5"):
        expand_globs([5])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_labels(tmp_path, name):
    path = tmp_path / name
    records = [{"text": "a", "dump": "x"}, {"text": None, "dump": "y"}, {"text": "c", "dump": 7}]
    if name.endswith("jsonl"):
        path.write_text("\n".join(map(json.dumps, records)))
        expected = [("a", "x"), ("c", "7")]
    else:
        pq.write_table(pa.table({"dump": ["x", "y", "z"], "text": ["a", None, "c"]}), path)
        expected = [("a", "x"), ("c", "z")]
    (tmp_path / "b.txt").write_text("d")
    assert list(read_with_labels([path, tmp_path / "b.txt"], "text", "dump")) == [
        *expected,
        ("d", str(tmp_path / "b.txt")),
    ]
    assert list(read_with_labels([path]))[1] == ("c", str(path))
    with pytest.raises(ValueError, match=r"has no (key|column) 'source'"):
        list(read_with_labels([path], "text", "source"))
