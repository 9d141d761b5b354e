"""Folders of prepared files: built once, whole or absent, whoever and however many ask for them at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from muown_train.runtime.atomic_files import sync_to_disk

CHECKED = 1 << 27  # files up to so many bytes are read through at each start; of larger ones only the size
WAIT = 3.0  # seconds before saying that one waits


def cache_folder(configured: str | None) -> Path:
    """Return the folder of prepared data: `configured`, or else muown_train in the user's cache folder."""
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "muown_train"


def prepared(folder: Path, build: Callable[[Path], dict[str, Any]], progress: Callable[[str], None]) -> dict[str, Any]:
    """Index of `folder`; where that is absent or damaged, `build(partial folder)` writes its files first.

    `build` returns the index (JSON). One process builds under a lock while the others wait. The files are
    written beside and the folder is renamed when complete. Raises OSError naming the folder where it cannot
    be written.
    """
    index = _complete(folder)
    if index is not None:
        return index
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=WAIT)
        except Timeout:
            progress(f"waiting for another process that prepares {folder}")
            lock.acquire()
        try:
            return _complete(folder) or _build(folder, build)
        finally:
            lock.release()
    except ConnectionError:
        raise  # from reading what is to be prepared
    except OSError as error:
        raise OSError(
            f"cannot write the data cache {folder} ({error.strerror or error}); choose another with cache="
        ) from error


def fingerprint(*parts: Any) -> str:
    """16 hexadecimal digits of a hash over the JSON of the parts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Of names, sizes and times of change, without reading the files."""
    stats = [(str(path.absolute()), path.stat()) for path in paths]
    return fingerprint([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> Any:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        index = build(partial)
        index["files"] = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        text = json.dumps(index)
        (partial / "index.json").write_text(text)
        for path in partial.iterdir():
            sync_to_disk(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return json.loads(text)


def _complete(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / "index.json").read_text())
        same = all(_describe(folder / name) == facts for name, facts in index["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return index if same else None


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > CHECKED:
        return {"bytes": size}
    return {"bytes": size, "blake2b": hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}
