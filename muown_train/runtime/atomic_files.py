"""Write files and folders so that they are complete or absent, whenever the process or the machine stops.

Files that others wrote are read here too: regular files alone, and JSON of a bounded size and depth.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # the ending of names of incomplete files
MAX_BYTES = 1 << 26  # bytes of a file of JSON or YAML
MAX_DEPTH = 50  # levels of nested lists and mappings
MAX_VALUES = 10_000_000  # values on one level, which YAML's aliases could repeat without end
MAX_DIGITS = 40  # digits of a whole number: any such number is a finite float


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_path(path: Path) -> Path:
    """Remove what stands at a path, and return the path, or a free one beside it if that cannot be removed.

    Network file systems keep files that are open elsewhere, and administrators make files immutable: what a process
    left behind must not stop the next one.
    """
    while True:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return path
        except OSError:
            path = path.with_name(f"{path.name}+")


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it and rename it.

    At any time the file is either as before or complete. On return it is on the disk.
    """
    partial = clear_path(path.with_name(path.name + PARTIAL))
    try:
        partial.write_bytes(content)
        sync_to_disk(partial)
        os.replace(partial, path)
        sync_to_disk(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk is met while writing, where no name is known
        raise


def open_regular(path: Path, follow_link: bool = False) -> BufferedReader:
    """Open a regular file for reading; see `check_regular`.

    Raises:
        ValueError: it is a link, a folder, a pipe or a device.
        OSError: it cannot be opened, or is missing.
    """
    check_regular(path, follow_link)
    return path.open("rb")


def check_regular(path: Path, follow_link: bool = False) -> None:
    """Refuse what is no regular file. Opening a pipe might wait for ever, and a device has no end.

    Args:
        follow_link: whether the file may be a symbolic link, as in the cache of the hub; in a run's folder a link
            might lead anywhere.

    Raises:
        ValueError: it is a link, a folder, a pipe or a device.
        OSError: it is missing.
    """
    mode = (os.stat if follow_link else os.lstat)(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise ValueError(f"{path} is {kind}, and must be a regular file")


def read_regular(path: Path, longest: int = MAX_BYTES, follow_link: bool = False) -> bytes:
    """Return the content of a regular file of a bounded size.

    Args:
        longest: the most bytes that the file may have.

    Raises:
        ValueError: it is no regular file (see `open_regular`), or has more bytes.
        OSError: it cannot be read.
    """
    with open_regular(path, follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        if size > longest:
            raise ValueError(f"{path} has {size:,} bytes, and may have {longest:,} at most")
        return file.read()


def check_depth(tree: Any) -> None:
    """Check that nested lists and mappings can be walked through, also where one of them contains itself.

    Raises:
        ValueError: they are nested too deeply, or hold too many values.
    """
    level = [tree]
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = list(islice(chain.from_iterable(inner), MAX_VALUES + 1))
        if len(level) > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a whole number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_int)


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text that may be damaged, or a stranger's.

    Raises:
        ValueError: it is no JSON in UTF-8, is nested too deeply, or holds a number of too many digits.
    """
    try:
        value = _DECODER.decode(content.decode())
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def read_json(path: Path, follow_link: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file holds something else, or see `read_regular` and `parse_json`; the message names it.
        OSError: it cannot be read.
    """
    content = read_regular(path, follow_link=follow_link)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value


def try_read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is none or it cannot be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


@contextmanager
def atomic_folder(folder: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder to write to, which replaces `folder` if the block ends without an error.

    Its files are on the disk then. Leftovers of a process that was killed are removed, except for the earlier content
    of `folder`, which is put back.

    Args:
        check: is called with `folder` and raises an error if it must not be replaced.

    Raises:
        ValueError: another process writes the folder.
        OSError: a file could not be written; the error names it by its place in `folder`.
    """
    from filelock import FileLock, Timeout  # imported here, since those who only read data do not need it

    place = Path(os.path.abspath(folder))  # makes `.` a path with a name
    place.parent.mkdir(parents=True, exist_ok=True)
    partial, before, lock = (place.with_name(f".{place.name}.{kind}") for kind in ("partial", "before", "lock"))
    try:
        with FileLock(lock, timeout=0):
            _restore(before, place)
            check(folder)
            before, partial = clear_path(before), clear_path(partial)
            partial.mkdir()
            try:
                yield partial
                for path in (*partial.rglob("*"), partial):
                    sync_to_disk(path)
                if place.exists():
                    place.rename(before)
                partial.rename(place)
                sync_to_disk(place.parent)
            except OSError as error:
                failed_path = Path(error.filename or partial)
                if error.errno is None or not failed_path.is_relative_to(partial):
                    raise
                final_path = folder / failed_path.relative_to(partial)
                raise OSError(error.errno, os.strerror(error.errno), str(final_path)) from error
            finally:
                _restore(before, place)
                shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(before, ignore_errors=True)
    except Timeout:
        raise ValueError(f"{folder} is being written by another process: wait for it, or give another --out") from None


def _restore(before: Path, place: Path) -> None:
    """Put the earlier folder back if nothing has taken its place."""
    if before.exists() and not place.exists():
        before.rename(place)
