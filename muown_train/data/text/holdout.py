"""Which documents are held out of training: a property of the document alone, never of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice

PARTS = 20  # one part in so many is held out
FEW = 100  # with fewer documents the end of the text is held out instead


def held_out(key: bytes) -> bool:
    """Whether the document with this key (its text, or its name) is among the one in 20 held out."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % PARTS == 0


def label_by_content(documents: Callable[[], Iterator[str]]) -> Iterator[tuple[str, bool]]:
    """Pairs (text, held out) over `documents()`, which is read up to three times.

    A document is held out by the hash of its text, so a repeated document never lands on both sides. With
    fewer than 100 documents (a single book), or where the hash tells the first 100 apart badly, the last 5
    % of the characters are held out, cutting a document in two where need be.
    """
    flags = [held_out(document.encode()) for document in islice(documents(), FEW)]
    if len(flags) == FEW and any(flags) and not all(flags):
        for document in documents():
            yield document, held_out(document.encode())
        return
    total = sum(map(len, documents()))
    left = total - total // PARTS
    for document in documents():
        head, tail = document[: max(left, 0)], document[max(left, 0) :]
        left -= len(document)
        if head:
            yield head, False
        if tail:
            yield tail, True
