"""Write files and folders so that they are complete or absent, whenever the process or the machine stops."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # the ending of names of incomplete files


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
    partial.write_bytes(content)
    sync_to_disk(partial)
    os.replace(partial, path)
    sync_to_disk(path.parent)


def try_read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is none or it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
