"""Text files -> documents (str), one after the other, in bounded memory.

A .txt or .md file is one document. A .jsonl or .json file has one JSON object per line and a .parquet file one row per
document, with the text under a key or column. All but .parquet may be compressed (.gz, .xz, .zst). A null text is not a
document. An empty text is passed on as a document, which encoding leaves out. A file whose content is at fault raises
UnreadableFile, which names all further files with faults too.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from muown_train.data.cache import CACHE_TAG
from muown_train.runtime.atomic_files import check_regular
from muown_train.runtime.progress import print_line

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
LabelledDocument = tuple[str, str | None]  # a document and its label, if it has one
FileReader = Callable[[Path, str, str | None], Iterator[LabelledDocument]]  # (file, key of the text, key of the label)

PARQUET_BATCH = 256  # documents that are read together
LARGEST = 1 << 30  # bytes of a line, or of a compressed file that is one document: a small file may unpack to any size


class UnreadableFile(ValueError):
    """The content of a file is at fault: every later try to read it ends in the same way."""


def expand_globs(
    patterns: str | Sequence[str] | None,
    key: str = "data.train",
    notify: Callable[[str], None] = print_line,
    any_kind: bool = False,
) -> list[Path]:
    """Return the files that a glob or a list of globs matches, sorted; `~` and a recursive `**` work.

    A folder stands for all files in it and below that can be read. What `_is_to_be_entered` refuses is left out. A file
    that has several paths, through links, counts once.

    Args:
        key: the setting that holds the globs, for messages.
        notify: is called with a sentence if paths were left out.
        any_kind: whether a glob may match files of unknown kinds.

    Raises:
        ValueError: there is no glob, or one matches no file, or files are of unknown kinds; the message names them.
    """
    if not patterns:
        raise ValueError(f"{key} is not set: give the files as a glob, such as {key}='texts/**/*.txt'")
    paths: set[Path] = set()
    links: list[str] = []  # those that lead to nothing, or to a folder that is read already
    for pattern in patterns if isinstance(patterns, list | tuple) else [patterns]:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{key} must be a glob or a list of globs, but holds {pattern!r}")
        full = str(Path(pattern).expanduser())
        if Path(full).is_dir():
            matches = [path for path in _expand(f"{glob.escape(full)}/**/*", links) if _find_kind(Path(path))]
            files = [path for path in map(Path, matches) if path.is_file()]
            if not files:
                raise ValueError(f"{key}: the folder {pattern!r} has no file of a known kind: {', '.join(KINDS)}")
        else:
            matches = [full] if Path(full).is_file() else [*_expand(full, links)]
            files = [path for path in map(Path, matches) if path.is_file()]
            if not files:
                raise ValueError(f"{key}: no file matches {pattern!r}")
        paths.update(files)
        links += [path for path in matches if not os.path.exists(path)]
    unknown = [path for path in sorted(paths) if not _find_kind(path)]
    if unknown and not any_kind:
        raise UnreadableFile(f"{_describe_unknown_kind(unknown)}; data.on_bad_file=skip leaves such files out")
    files_by_identity: dict[object, list[Path]] = {}
    for path in paths:
        files_by_identity.setdefault(identify_file(path), []).append(path)
    chosen = sorted(min(same, key=_rank_path) for same in files_by_identity.values())
    if left_out := len(paths) - len(chosen):
        notify(f"{key}: {left_out} paths are left out, since they lead to files that other paths lead to already")
    if links:
        names = ", ".join(links[:3]) + f" and {len(links) - 3} more" * (len(links) > 3)
        notify(f"{key}: links that lead to nothing or to a folder read already are left out: {names}")
    return chosen


def _expand(pattern: str, links: list[str]) -> Iterator[str]:
    """Yield the paths that a glob matches, as glob.glob does, but enter each folder once, whatever leads to it.

    Links are followed after everything else. Two links to a folder above them would have no end.

    Args:
        links: takes the links that are not followed, since the folder that they lead to has been entered before.
    """
    if pattern == "**" or pattern.endswith("/**"):
        pattern += "/*"
    above, recursive, below = pattern.partition("**/")
    if not recursive or above[-1:] not in ("", "/"):
        yield from glob.glob(pattern)
        return
    folders = [folder for folder in glob.glob(above) if os.path.isdir(folder)] if above else [""]
    entered: set[object] = set()
    while folders:
        folder = folders.pop(0)
        if (identity := identify_file(Path(folder))) in entered:
            links.append(folder)
            continue
        entered.add(identity)
        yield from _expand(os.path.join(glob.escape(folder), below), links)
        with suppress(OSError):  # glob leaves out what it cannot read
            inner = [entry for entry in os.scandir(folder or ".") if entry.is_dir() and _is_to_be_entered(entry)]
            plain = sorted(os.path.join(folder, entry.name) for entry in inner if not entry.is_symlink())
            linked = sorted(os.path.join(folder, entry.name) for entry in inner if entry.is_symlink())
            folders = [*plain, *folders, *linked]


def _is_to_be_entered(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder is not hidden, holds no CACHEDIR.TAG, as prepared data do, and is not that of a run.

    `cache` and `out` may lie among the texts.
    """

    def has(name: str) -> bool:
        return os.path.exists(os.path.join(entry.path, name))

    return not (entry.name.startswith(".") or has(CACHE_TAG) or (has("config.yaml") and has("manifest.json")))


def identify_file(path: Path) -> tuple[int, int] | str:
    """Return what all paths of a file have in common: its device and inode, or its resolved path without these."""
    stat = path.stat()
    return (stat.st_dev, stat.st_ino) if stat.st_ino else str(path.resolve())


def _rank_path(path: Path) -> tuple[bool, int, str]:
    """Return a key by which a path without links comes first, then the shortest."""
    return path.absolute() != path.resolve(), len(path.parts), str(path)


def read_documents(paths: Sequence[Path], text: str = "text", further: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the documents of the files in the order given.

    Args:
        text: the key or column that holds the documents.
        further: files that will be read later. If a file is at fault these are searched for faults too.

    Raises:
        UnreadableFile: the content of files is at fault; the message names all of them, in a .jsonl file the line too,
            and the reasons.
        ValueError: the system cannot read a file.
    """
    return (document for document, _ in read_with_labels(paths, text, further=further))


def read_with_labels(
    paths: Sequence[Path], text: str = "text", label: str | None = None, further: Sequence[Path] = ()
) -> Iterator[tuple[str, str]]:
    """Yield documents as `read_documents` does, each with the value of its key or column `label`.

    Without `label`, and in .txt files, the label is the path of the file.
    """
    for number, path in enumerate(paths, 1):
        try:
            yield from _read_file(path, text, label)
        except UnreadableFile as error:
            following = [*paths[number:], *further]
            if following:
                print_line(f"{error}; looking for others among the {len(following):,} files that follow")
            others = find_unreadable(following, text, label)
            raise UnreadableFile(_join_faults([str(error), *others.values()])) from error


def find_unreadable(
    paths: Sequence[Path], text: str = "text", label: str | None = None, watch: Callable[[int], None] | None = None
) -> dict[Path, str]:
    """Read the files through and return path -> what is at fault, for those whose content is.

    Args:
        watch: is called with the number of files that are read.

    Raises:
        ValueError: the system cannot read a file. This may pass, so it says nothing about the file.
    """
    faults = {}
    for number, path in enumerate(paths):
        if watch:
            watch(number)
        try:
            for _ in _read_file(path, text, label):
                pass
        except UnreadableFile as error:
            faults[path] = str(error)
    return faults


def _read_file(path: Path, text: str, label: str | None) -> Iterator[tuple[str, str]]:
    reader = _find_kind(path)
    if reader is None:
        raise UnreadableFile(_describe_unknown_kind([path]))
    try:
        for document, value in reader(path, text, label):
            yield replace_surrogates(document), str(path) if value is None else value
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}, in line {line}"
        ) from error
    except ValueError as error:
        raise UnreadableFile(str(error)) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if "too much memory" in reason:  # the window of zstd --long
            reason += f"; unpack it first: zstd -d --long=31 {path}"
        # what a format's library finds has no number of the system
        kind = ValueError if getattr(error, "errno", None) else UnreadableFile
        raise kind(f"cannot read {path}: {reason}") from error


def _join_faults(faults: Sequence[str]) -> str:
    """Return one sentence with all that is at fault."""
    if len(faults) == 1:
        return faults[0]
    return f"{len(faults)} files cannot be read (data.on_bad_file=skip leaves them out): {'; '.join(faults)}"


def group_documents(items: Iterable[T], most: int, characters: int, length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists that end with item number `most` or once their lengths add up to `characters`."""
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


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD in place of lone surrogates, which JSON may carry but UTF-8 cannot express."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _read_txt(path: Path, text: str, label: str | None) -> Iterator[LabelledDocument]:
    with _open(path) as file:
        if path.suffix.lower() in COMPRESSIONS:
            raw = file.read(LARGEST + 1)
            if len(raw) > LARGEST:
                raise ValueError(f"{path} unpacks to one document of more than {LARGEST:,} bytes: unpack it first")
        else:
            raw = file.read()
        yield raw.decode("utf-8-sig"), None


def _read_jsonl(path: Path, text: str, label: str | None) -> Iterator[LabelledDocument]:
    with _open(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LARGEST + 1), b""), 1):
            if len(line) > LARGEST:
                raise ValueError(f"{path} line {number} has more than {LARGEST:,} bytes: divide it into documents")
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text: {error.reason} at byte {error.start} of line {number}"
                ) from error
            except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
                hint = ": the file must have an object in each line, not one array" if line.lstrip()[:1] == b"[" else ""
                where = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else error
                raise ValueError(f"{path} line {number} is not JSON{hint}: {where}") from error
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise ValueError(f"{path} line {number} is a {kind}, not a JSON object: each line must be one")
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


def _read_parquet(path: Path, text: str, label: str | None) -> Iterator[LabelledDocument]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            check_text_column(str(path), file.schema_arrow, text)
            names = file.schema_arrow.names
            if label is not None and label not in names:
                raise ValueError(f"{path} has no column {label!r}; its columns: {', '.join(names)}")
            for batch in file.iter_batches(
                batch_size=PARQUET_BATCH, columns=[text] if label is None else [text, label]
            ):
                values = batch.column(text).to_pylist()
                labels = [None] * len(values) if label is None else map(str, batch.column(label).to_pylist())
                yield from (pair for pair in zip(values, labels, strict=True) if pair[0] is not None)
    except pa.ArrowException as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def check_text_column(source: str, schema: pa.Schema, column: str) -> None:
    """Raise ValueError unless the column of an Arrow schema holds text, as strings of any kind or as nulls alone.

    Args:
        source: the file or data set, for messages.
    """
    import pyarrow as pa

    if column not in schema.names:
        raise ValueError(f"{source} has no column {column!r} (data.text); its columns: {', '.join(schema.names)}")
    kind = schema.field(column).type
    stored = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_kind(stored) for is_kind in kinds):
        raise ValueError(f"{source}: column {column!r} holds {kind}, not text")


def _open(path: Path) -> BinaryIO:
    check_regular(path, follow_link=True)
    ending = path.suffix.lower()
    if ending in COMPRESSIONS and path.stat().st_size == 0:
        raise EOFError(f"it is empty, where a {ending} file has at least a header")
    if ending == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if ending == ".xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    if ending == ".zst":
        import pyarrow as pa

        # Among the usual readers of zstandard only this one notices a truncated file.
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


KINDS: dict[str, FileReader] = {
    ".txt": _read_txt,
    ".md": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".parquet": _read_parquet,
}
COMPRESSIONS = (".gz", ".xz", ".zst")


def _find_kind(path: Path) -> FileReader | None:
    """Return the reader of a file, by the endings of its name, in capitals or not; None if there is none."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSIONS and endings[-2:-1] != [".parquet"]:
        endings.pop()
    return KINDS.get(endings[-1]) if endings else None


def _describe_unknown_kind(paths: Sequence[Path]) -> str:
    names, verb = ", ".join(map(str, paths)), "is" if len(paths) == 1 else "are"
    endings = f"{', '.join(KINDS)}, also with {', '.join(COMPRESSIONS)}"
    return f"{names} {verb} of an unknown kind; the known endings are {endings}"
