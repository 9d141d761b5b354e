import gzip
import json
import lzma
import os
from pathlib import Path

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
        ("a.jsonl", b'\n{"text": "\xff"}\n', "is not UTF-8 text: invalid start byte at byte 10 of line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "id": ' + b"1" * 5000 + b"}\n", "line 2 is not JSON: .*4300"),
        ("a.jsonl.gz", b"not gzip", "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", b"", "cannot read .*a.jsonl.gz: it is empty, where a .gz file has"),
        ("a.txt.xz", b"", "cannot read .*a.txt.xz: it is empty, where a .xz file has"),
        ("a.json.zst", b"", "cannot read .*a.json.zst: it is empty, where a .zst file has"),
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
    with pytest.raises(ValueError, match=r"notes.pdf is of an unknown kind; .*\.txt, .*\.parquet, also with"):
        expand_globs(str(tmp_path / "*"))
    with pytest.raises(ValueError, match=r"the folder '.*empty' has no file of a known kind: .txt, .md"):
        (tmp_path / "empty").mkdir()
        expand_globs(str(tmp_path / "empty"))
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


def write_lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def link_to_own_folder(root):
    (root / "a" / "again").symlink_to(root / "a")
    return f"{root}/**/*.jsonl"


def link_beside(root):
    (root / "latest").symlink_to(root / "a")
    return f"{root}/*/*.jsonl"


def link_of_a_file(root):
    (root / "a" / "copy.jsonl").symlink_to(root / "a" / "1.jsonl")
    return f"{root}/a/*.jsonl"


def chain_of_links(root):
    (root / "one").symlink_to(root / "two")
    (root / "two").symlink_to(root / "a")
    return [f"{root}/one/*.jsonl", f"{root}/two/*.jsonl"]


def hard_link(root):
    (root / "a" / "copy.jsonl").hardlink_to(root / "a" / "1.jsonl")
    return f"{root}/a/*.jsonl"


def dots(root):
    return [f"{root}/a/*.jsonl", f"{root}/a/../a/*.jsonl", f"{root}/./a/1.jsonl"]


def relative_and_absolute(root):
    return [f"{root}/a/*.jsonl", f"{os.path.relpath(root)}/a/*.jsonl"]


def twice(root):
    return [f"{root}/a/*.jsonl", f"{root}/a/*.jsonl"]


def link_upwards(root):
    (root / "a" / "up").symlink_to(root)
    return f"{root}/**/*.jsonl"


def link_of_another_name(root):
    (root / "b").mkdir()
    (root / "b" / "x.jsonl").symlink_to("../a/1.jsonl")
    return [f"{root}/a/*.jsonl", f"{root}/b/*.jsonl"]


WAYS = [
    *(link_to_own_folder, link_beside, link_of_a_file, chain_of_links, hard_link, dots),
    *(relative_and_absolute, twice, link_upwards, link_of_another_name),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_several_paths_counts_once(tmp_path, way):
    write_lines(tmp_path / "a" / "1.jsonl", "first", "second"), write_lines(tmp_path / "a" / "2.jsonl", "third")
    said: list[str] = []
    paths = expand_globs(way(tmp_path), notify=said.append)
    assert sorted(read_documents(paths)) == ["first", "second", "third"]
    if way in (link_of_a_file, hard_link, link_beside, link_to_own_folder, link_upwards):
        assert len(said) == 1 and "are left out" in said[0]
    elif way is twice:
        assert not said


def test_the_path_without_a_link_is_kept(tmp_path):
    write_lines(tmp_path / "z" / "1.jsonl", "text")
    (tmp_path / "a").symlink_to(tmp_path / "z")
    assert expand_globs(f"{tmp_path}/*/*.jsonl", notify=lambda said: None) == [tmp_path / "z" / "1.jsonl"]


KINDS = {
    "string": (pa.string(), True),
    "large_string": (pa.large_string(), True),
    "string_view": (pa.string_view(), True),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), True),
    "nulls": (pa.null(), True),
    "list": (pa.list_(pa.string()), False),
    "binary": (pa.binary(), False),
    "int": (pa.int64(), False),
    "struct": (pa.struct([("a", pa.string())]), False),
    "dictionary of ints": (pa.dictionary(pa.int32(), pa.int64()), False),
}


def make_column(kind: str) -> pa.Table:
    """Return a table of two texts and a null in a column of this kind; of nulls, or of what else the kind holds."""
    arrow, _ = KINDS[kind]
    values = {"list": [["a"]], "binary": [b"a"], "int": [1], "struct": [{"a": "b"}], "dictionary of ints": [1]}
    given = values.get(kind, [None] if kind == "nulls" else ["eins", None, "zwei"])
    plain = pa.array(given, arrow.value_type if pa.types.is_dictionary(arrow) else arrow)
    return pa.table({"text": plain.dictionary_encode() if pa.types.is_dictionary(arrow) else plain})


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_columns(tmp_path, kind):
    pq.write_table(make_column(kind), tmp_path / "a.parquet")
    if KINDS[kind][1]:
        assert list(read_documents([tmp_path / "a.parquet"])) == ([] if kind == "nulls" else ["eins", "zwei"])
    else:
        with pytest.raises(ValueError, match=r"a.parquet: column 'text' holds .*, not text"):
            list(read_documents([tmp_path / "a.parquet"]))


def test_endings(tmp_path):
    """A folder is read with all below it, whatever its files are compressed with and however they are spelt."""
    deep = tmp_path / "texts" / "deep"
    deep.mkdir(parents=True)
    (deep / "a.MD").write_text("a")
    (deep / "b.txt.gz").write_bytes(gzip.compress(b"b"))
    (deep / "c.JSONL").write_bytes(lines(["c"]))
    (deep / "d.json.xz").write_bytes(lzma.compress(lines(["d"])))
    (deep / "e.json").write_bytes(lines(["e"]))
    (deep / "f.2024.md.zst").write_bytes(zstandard.compress(b"f"))
    (deep / "picture.png").touch(), (deep / "README").touch()
    for glob in (str(tmp_path / "texts"), [str(deep / f"{letter}*.*") for letter in "abcdef"]):
        assert list(read_documents(expand_globs(glob))) == list("abcdef")


def test_a_window_that_is_too_long_for_memory(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    path = tmp_path / "a.jsonl.zst"
    # the size is not known in advance, so the frame names the window
    with path.open("wb") as file, zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file) as stream:
        stream.write(lines(["a"]))
    with pytest.raises(ValueError, match=rf"unpack it first: zstd -d --long=31 {path}"):
        list(read_documents([path]))


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**", "**/**/*.txt", "*", "in*/**/*.txt"])
def test_links_to_folders_are_followed_once_and_end(tmp_path, monkeypatch, pattern):
    """Two links to a folder above them would have no end; a link to a folder elsewhere is followed."""
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "inner" / "deep", other):
        folder.mkdir(parents=True)
    for path in (root / "a.txt", root / "inner" / "b.txt", root / "inner" / "deep" / "c.txt", other / "d.txt"):
        path.write_text(path.name)
    for name, goal in (("self", "."), ("me", "."), ("inner/up", ".."), ("inner/out", other), ("inner/dead.txt", "no")):
        (root / name).symlink_to(goal)
    said: list[str] = []
    monkeypatch.chdir(root)
    found = {
        where: [path.name for path in expand_globs(os.path.join(where, pattern) or ".", notify=said.append)]
        for where in (str(root), "")
    }
    names = {"*": ["a.txt"]}.get(pattern, ["a.txt", "b.txt", "c.txt", "d.txt"])
    assert [sorted(each) for each in found.values()] == [names, names]
    assert any("links that lead to nothing or" in line for line in said) == (pattern != "*")
