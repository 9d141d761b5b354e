"""Files that are whole or absent: what several parts of the program do to make them so."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: who reads meanwhile sees the old text or the new one."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    os.replace(beside, path)
