"""Files that are whole or absent: what several parts of the program do to make them so."""

import os
from pathlib import Path

PARTIAL = ".partial"  # ends the names of files that are not complete


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync and rename it: it is as before or whole, and on the disk on return."""
    beside = path.with_name(path.name + PARTIAL)
    beside.write_bytes(content)
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)
