"""The choice of the documents held out of training, which depends on the documents alone, never on a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice

PARTS = 20  # one part in 20 is held out
FEW = 100  # documents; if there are fewer, the end of the text is held out instead


def is_held_out(key: bytes) -> bool:
    """Return whether the document with this key (its text or its name) is among the one in 20 held out."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % PARTS == 0


def split_by_content(documents: Callable[[], Iterator[str]]) -> Iterator[tuple[str, bool]]:
    """Yield pairs (text, is held out) for `documents()`, which is called up to three times.

    The hash of its text decides whether a document is held out, so a repeated document never lands on both sides. With
    fewer than 100 documents (a single book), or if the hash holds out all or none of the first 100, the last 5 % of
    the characters are held out instead, and a document is cut in two where that begins within it.
    """
    flags = [is_held_out(document.encode()) for document in islice(documents(), FEW)]
    if len(flags) == FEW and any(flags) and not all(flags):
        for document in documents():
            yield document, is_held_out(document.encode())
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
