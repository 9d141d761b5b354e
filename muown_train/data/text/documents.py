"""Text files -> documents (str), one after the other, in bounded memory.

A .txt file is one document; a .jsonl file (plain, .gz, .xz or .zst) has one JSON object per line and a
.parquet file one row per document, with the text under a key or column. Where that text is null there is no
document. An empty text is given as one; those who encode documents leave it out.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
Labelled = tuple[str, str | None]  # a document and its label, if there is one
Reader = Callable[[Path, str, str | None], Iterator[Labelled]]

PARQUET_BATCH = 256  # documents read at once


def expand(patterns: str | Sequence[str], key: str = "data.train") -> list[Path]:
    """Files that a glob or a list of globs names, sorted, each once. `~` and a recursive `**` are understood.

    Raises ValueError naming `key` and the glob that matches no file or the file of an unknown kind.
    """
    paths: set[Path] = set()
    for pattern in patterns if isinstance(patterns, list | tuple) else [patterns]:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{key} must be a glob or a list of globs, but holds {pattern!r}")
        full = str(Path(pattern).expanduser())
        found = [full] if Path(full).is_file() else glob.glob(full, recursive=True)
        files = [path for path in map(Path, found) if path.is_file()]
        if not files:
            folder = " (a folder: name the files in it, such as *.parquet)" if Path(full).is_dir() else ""
            raise ValueError(f"{key}: no file matches {pattern!r}{folder}")
        paths.update(files)
    for path in sorted(paths):
        _reader(path)
    return sorted(paths)


def read_documents(paths: Sequence[Path], text: str = "text") -> Iterator[str]:
    """Documents of the files in the order given; `text` is the key or column that holds them.

    Raises ValueError naming the file (in .jsonl the line too) and why it cannot be read.
    """
    return (document for document, _ in read_labelled(paths, text))


def read_labelled(paths: Sequence[Path], text: str = "text", label: str | None = None) -> Iterator[tuple[str, str]]:
    """Documents as of `read_documents`, each with what its key or column `label` holds.

    Without `label`, and in .txt files, that is the file's path.
    """
    for path in paths:
        try:
            for document, value in _reader(path)(path, text, label):
                yield well_formed(document), str(path) if value is None else value
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def grouped(items: Iterable[T], most: int, characters: int, length: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in lists of at most `most`, which end with the item that brings `length` together to `characters`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += length(item)
        if len(group) == most or total >= characters:
            yield group
            group, total = [], 0
    if group:
        yield group


def well_formed(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot express, as U+FFFD; JSON may carry them."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _read_txt(path: Path, text: str, label: str | None) -> Iterator[Labelled]:
    yield path.read_bytes().decode("utf-8-sig"), None


def _read_jsonl(path: Path, text: str, label: str | None) -> Iterator[Labelled]:
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path} line {number} is a {type(record).__name__}, not a JSON object")
            if text not in record:
                keys = ", ".join(record) or "none at all"
                raise ValueError(f"{path} line {number} has no key {text!r} (data.text), only {keys}")
            value = record[text]
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{path} line {number}: {text!r} is a {type(value).__name__}, not text")
            if label is not None and label not in record:
                raise ValueError(f"{path} line {number} has no key {label!r}, only {', '.join(record)}")
            if value is not None:
                yield value, None if label is None else str(record[label])


def _read_parquet(path: Path, text: str, label: str | None) -> Iterator[Labelled]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text not in names:
                raise ValueError(f"{path} has no column {text!r} (data.text); its columns: {', '.join(names)}")
            kind = file.schema_arrow.field(text).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {text!r} holds {kind}, not text")
            if label is not None and label not in names:
                raise ValueError(f"{path} has no column {label!r}; its columns: {', '.join(names)}")
            for batch in file.iter_batches(
                batch_size=PARQUET_BATCH, columns=[text] if label is None else [text, label]
            ):
                values = batch.column(text).to_pylist()
                labels = [None] * len(values) if label is None else map(str, batch.column(label).to_pylist())
                yield from ((value, of) for value, of in zip(values, labels, strict=True) if value is not None)
    except pa.ArrowException as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.name.endswith(".xz"):
        return lzma.open(path, "rb")  # type: ignore[return-value]
    if path.name.endswith(".zst"):
        import pyarrow as pa

        # Of the usual readers of zstandard this one alone tells a truncated file from a complete one.
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


_READERS: dict[str, Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.xz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Reader:
    for ending, reader in _READERS.items():
        if path.name.endswith(ending):
            return reader
    raise ValueError(f"{path} is of an unknown kind; the endings understood are {', '.join(_READERS)}")
