"""Token ids on disk, in the `.bin` layout of llm.c and modded-nanogpt.

A file begins with 256 int32 of header (magic, version, number of tokens, zeros). The ids follow, little-endian: uint16
under [20240520, 1], uint32 under [20240801, 7] for vocabularies above 65536. Here the number of tokens takes two words
(int64), which differs from llm.c only in files of more than 2^31 - 1 tokens.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from muown_train.runtime.atomic_files import open_regular

HEADER_BYTES = 256 * 4
KINDS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes of an id -> magic, version


class TokenWriter:
    """Writes ids of `dtype` (uint16 or uint32) to `path`; `close` completes the header."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.count = 0
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def write(self, ids: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        self.count += len(ids)

    def close(self) -> None:
        header = np.zeros(256, dtype="<i4")
        header[:2] = KINDS[self.dtype.itemsize]
        header[2:4] = np.array([self.count], dtype="<i8").view("<i4")
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.close()


def read_tokens(path: Path, random_access: bool = False) -> np.ndarray:
    """Return the ids as a read-only array over a memory map, 1-D uint16 or uint32.

    Args:
        random_access: tell the system not to read ahead on the disk, since shuffled rows would not use the megabytes
            that it reads around each of them.

    Raises:
        ValueError: the file is not a token file, is of another version, or is not complete; the message names it.
    """
    with open_regular(path, follow_link=True) as file:
        raw = file.read(HEADER_BYTES)
        size = file.seek(0, 2)
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path} is truncated: {len(raw)} bytes are less than the header of a token file")
    header = np.frombuffer(raw, dtype="<i4")
    magic, version = int(header[0]), int(header[1])
    width = next((width for width, kind in KINDS.items() if kind[0] == magic), None)
    if width is None:
        raise ValueError(f"{path} is not a token file: it begins with {magic}, not with 20240520 or 20240801")
    if version != KINDS[width][1]:
        raise ValueError(f"{path} is a token file of version {version}; version {KINDS[width][1]} is read")
    count = int(header[2:4].view("<i8")[0])
    if size != HEADER_BYTES + count * width:
        state = "is truncated: it" if size < HEADER_BYTES + count * width else "is damaged: it"
        raise ValueError(f"{path} {state} should hold {count} tokens but has {(size - HEADER_BYTES) / width:g}")
    if count == 0:
        return np.empty(0, dtype=f"<u{width}")
    with open_regular(path, follow_link=True) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if random_access and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype=f"<u{width}", count=count, offset=HEADER_BYTES)
