"""Folders of prepared files: each is built once, whole or absent, however many processes ask for it at once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from muown_train.runtime.atomic_files import clear_path, parse_json, sync_to_disk

CHECKED = 1 << 27  # bytes up to which a file is read and hashed at each start; of a larger one only the size is checked
WAIT = 3.0  # seconds before a process says that it waits for another
CACHE_TAG = "CACHEDIR.TAG"  # marks a folder of prepared files, as on https://bford.info/cachedir
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n"


def locate_cache(configured: str | None) -> Path:
    """Return the folder of prepared data: `configured`, or else muown_train in the user's cache folder."""
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "muown_train"


def build_once(
    folder: Path, build: Callable[[Path], dict[str, Any]], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return the index of `folder`, whose files are written first if they are absent or damaged.

    One process builds under a lock while the others wait. The files are written into a folder beside it, which is
    renamed when it is complete.

    Args:
        build: writes the files into the folder it is given and returns the index (JSON).

    Raises:
        OSError: the folder cannot be written; the message names it.
    """
    index = _read_if_complete(folder)
    if index is not None:
        return index
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))  # hidden from globs of texts
        try:
            lock.acquire(timeout=WAIT)
        except Timeout:
            progress(f"waiting for another process that prepares {folder}")
            lock.acquire()
        try:
            return _read_if_complete(folder) or _build(folder, build)
        finally:
            lock.release()
    except ConnectionError:  # is an OSError too, but comes from reading the source
        raise
    except OSError as error:
        reason = error.strerror or error
        raised = OSError(f"cannot write the data cache {folder} ({reason}); choose another with cache=")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full disk is no wrong setting
            raised.errno = error.errno
        raise raised from error


def fingerprint(*parts: Any) -> str:
    """Return 16 hexadecimal digits of a hash over the JSON of the parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Return a fingerprint of names, sizes and modification times; the files are not read."""
    stats = [(str(path.absolute()), path.stat()) for path in paths]
    return fingerprint([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> Any:
    partial = clear_path(folder.with_name(folder.name + ".partial"))
    partial.mkdir()
    try:
        (partial / CACHE_TAG).write_text(SIGNATURE)
        index = build(partial)
        index["files"] = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        text = json.dumps(index)
        (partial / "index.json").write_text(text)
        for path in partial.iterdir():
            sync_to_disk(path)
        free = clear_path(folder)
        if free != folder:  # what cannot be removed can be moved out of the way
            folder.rename(free)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return json.loads(text)


def _read_if_complete(folder: Path) -> dict[str, Any] | None:
    """Return the index of `folder`, or None if a file is absent or differs from what the index says."""
    try:
        index = parse_json((folder / "index.json").read_bytes())
        unchanged = all(_describe(folder / name) == recorded for name, recorded in index["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return index if unchanged else None


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > CHECKED:
        return {"bytes": size}
    return {"bytes": size, "blake2b": hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}
