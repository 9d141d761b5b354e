"""Files that are whole or absent: what several parts of the program do to make them so."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # ends the names of files that are not complete


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync and rename it: it is as before or whole, and on the disk on return."""
    beside = path.with_name(path.name + PARTIAL)
    beside.write_bytes(content)
    sync_to_disk(beside)
    os.replace(beside, path)
    sync_to_disk(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def atomic_folder(folder: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """A folder to write to, beside its place, that takes it when the block ends well; its files are on the disk then.

    What a process that was killed left is removed, or put back if it is what was there before.

    Args:
        check: called with `folder`, raises where it must not be replaced.

    Raises:
        ValueError: another process writes it.
        OSError: naming `folder`, or the file in it, that could not be written.
    """
    from filelock import FileLock, Timeout  # not where data are read alone

    place = Path(os.path.abspath(folder))  # `.` has a name too
    place.parent.mkdir(parents=True, exist_ok=True)
    partial, before, lock = (place.with_name(f".{place.name}.{kind}") for kind in ("partial", "before", "lock"))
    try:
        with FileLock(lock, timeout=0):
            _put_back(before, place)
            check(folder)
            shutil.rmtree(before, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
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
                within = Path(error.filename or partial)
                if error.errno is None or not within.is_relative_to(partial):
                    raise
                place_of_it = folder / within.relative_to(partial)  # as it would have been called
                raise OSError(error.errno, os.strerror(error.errno), str(place_of_it)) from error
            finally:
                _put_back(before, place)
                shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(before, ignore_errors=True)
    except Timeout:
        raise ValueError(f"{folder} is being written by another process: wait for it, or give another --out") from None


def _put_back(before: Path, place: Path) -> None:
    if before.exists() and not place.exists():
        before.rename(place)
