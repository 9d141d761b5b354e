"""The ids of a shard, checked as they are read: blocks of bytes by their checksums, ids by the size of the vocabulary.

A disk or a copy that changes a byte of a shard without a word would otherwise be trained on. Beside `NAME.bin` lies
`NAME.checksums.npy`, the CRC-32 (uint32) of each 16 KiB of ids; the index has a hash of that file. A process checks
each block once, before it reads ids in it for the first time. A shard without checksums, as other tools write them and
earlier versions did, is read without this check.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from muown_train.data.rows import TokenRows
from muown_train.runtime.atomic_files import read_regular

BLOCK = 1 << 14  # bytes: little more is read from the disk than for a row, and the checksums are a 4096th of the ids
REMEDY = "copy it again, or prepare the shards again"


def get_checksums_path(shard: Path) -> Path:
    """Return the file of the checksums of a shard."""
    return shard.with_suffix(".checksums.npy")


def compute_checksums(tokens: np.ndarray) -> np.ndarray:
    """Return the checksum of each block of ids, 1-D uint32."""
    ids_of_a_block = BLOCK // tokens.itemsize
    starts = range(0, len(tokens), ids_of_a_block)
    return np.array([zlib.crc32(tokens[k : k + ids_of_a_block].tobytes()) for k in starts], dtype="<u4")


def hash_checksums(raw: bytes) -> str:
    """Return the hash of a file of checksums that the index keeps."""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


class Shard:
    """The ids of a shard.

    Args:
        path: the shard.
        tokens: its ids, a memory map, 1-D uint16 or uint32.
        vocabulary: the number that all ids are below.
        checksums: the hash of its file of checksums; None if it has none.
    """

    def __init__(self, path: Path, tokens: np.ndarray, vocabulary: int, checksums: str | None = None) -> None:
        self.path, self.tokens, self.checksums = path, tokens, checksums
        self._vocabulary = vocabulary
        self._ids_of_a_block = BLOCK // tokens.itemsize
        self._expected: np.ndarray | None = None  # read with the first block
        self._is_checked = np.zeros(-(-len(tokens) // self._ids_of_a_block), dtype=bool)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the ids from number `begin` up to `end`, or to the end of the shard, as a view.

        Raises:
            ValueError: they are not what was written, or not in the vocabulary; the message names the shard.
        """
        ids = self.tokens[begin:end]
        if self.checksums is not None and len(ids):
            size = self._ids_of_a_block
            for block in range(begin // size, (begin + len(ids) - 1) // size + 1):
                if not self._is_checked[block]:
                    self._check(block)
        largest = int(ids.max(initial=0))
        if largest >= self._vocabulary:
            place = begin + int(ids.argmax())
            raise ValueError(
                f"{self.path} holds id {largest} at place {place:,}, but the tokenizer has only {self._vocabulary} "
                "entries: it is damaged, or was made by another one"
            )
        return ids

    def _check(self, block: int) -> None:
        if self._expected is None:
            self._expected = self._read_checksums()
        first = block * self._ids_of_a_block
        ids = self.tokens[first : first + self._ids_of_a_block]
        if zlib.crc32(ids.tobytes()) != self._expected[block]:
            raise ValueError(
                f"{self.path} is damaged: ids {first:,} to {first + len(ids) - 1:,} are not those that were written "
                f"(their checksum differs): {REMEDY}"
            )
        self._is_checked[block] = True

    def _read_checksums(self) -> np.ndarray:
        path = get_checksums_path(self.path)
        try:
            raw = read_regular(path, follow_link=True)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from error
        if hash_checksums(raw) != self.checksums:
            raise ValueError(f"{path} is damaged: {REMEDY}")
        return np.frombuffer(raw, dtype="<u4", offset=len(raw) - 4 * len(self._is_checked))


class ShardRows(TokenRows):
    """The rows of the concatenation of shards, which are checked as they are read."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, seed: int) -> None:
        super().__init__([shard.tokens for shard in shards], seq_len, seed)
        self._shards = [shard for shard in shards if len(shard.tokens)]

    def read_part(self, part: int, begin: int, end: int) -> np.ndarray:
        return self._shards[part].read(begin, end)
