"""Documents -> token files to train on and held out, cached with their tokenizer and an index."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from muown_train.data.cache import prepared
from muown_train.data.text import train_bpe as bpe
from muown_train.data.text.tokenizer import HubTokenizer, Tokenizer, encode_documents, token_dtype
from muown_train.data.token_file import TokenWriter, read_tokens

T = TypeVar("T")
Labelled = Callable[[], Iterator[tuple[str, bool]]]  # pairs (text, held out), the same at every call


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray  # 1-D ids, uint16 or uint32; each document ends with end-of-text
    valid: np.ndarray
    tokenizer: Tokenizer
    index: dict[str, Any]  # "train", "valid": documents, tokens, text (hash); "train_counts" of each id


def tokenised(
    folder: Path, documents: Labelled, tokenizer: Tokenizer | None, progress: Callable[[str], None]
) -> Corpus:
    """The corpus cached in `folder`, tokenised there first where it is absent or damaged.

    Without a tokenizer the 4096-entry BPE is trained on the documents that are not held out.
    """

    def build(partial: Path) -> dict[str, Any]:
        used = tokenizer
        if used is None:
            progress(f"training a tokenizer of {bpe.SIZE} entries on the data")
            raw = bpe.train_bpe(lambda: (text for text, held in documents() if not held))
            (partial / "tokenizer.json").write_bytes(raw)
            used = HubTokenizer(bpe.NAME, raw)
        return _write(partial, documents(), used, progress)

    index = prepared(folder, build, progress)
    if tokenizer is None:
        tokenizer = HubTokenizer(bpe.NAME, (folder / "tokenizer.json").read_bytes())
    return Corpus(read_tokens(folder / "train.bin"), read_tokens(folder / "valid.bin"), tokenizer, index)


def print_line(message: str) -> None:
    """The default `progress`: one line on standard error."""
    print(message, file=sys.stderr, flush=True)


class Part:
    """One token file being written: counts, a hash of the text and, if asked, how often each id occurs."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.counts = np.zeros(tokenizer.size, dtype=np.int64)
        self.documents = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._writer = TokenWriter(path, token_dtype(tokenizer.size))

    def write(self, text: str, ids: np.ndarray) -> None:
        raw = text.encode()
        self._hash.update(len(raw).to_bytes(8, "little") + raw)
        self._writer.write(ids)
        np.add.at(self.counts, ids, 1)
        self.documents += 1

    def close(self) -> dict[str, Any]:
        self._writer.close()
        return {
            "documents": self.documents,
            "tokens": self._writer.count,
            "text": self._hash.hexdigest(),
        }


def with_ids(documents: Iterable[tuple[str, T]], tokenizer: Tokenizer) -> Generator[tuple[str, T, np.ndarray]]:
    """Triples (text, what goes with it, ids with end-of-text), encoded in batches; no text is no document."""
    waiting: deque[tuple[str, T]] = deque()

    def texts() -> Iterator[str]:
        for text, label in documents:
            if text:
                waiting.append((text, label))
                yield text

    for ids in encode_documents(texts(), tokenizer):
        yield *waiting.popleft(), ids


def _write(
    folder: Path,
    documents: Iterable[tuple[str, bool]],
    tokenizer: Tokenizer,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    parts = {False: Part(folder / "train.bin", tokenizer), True: Part(folder / "valid.bin", tokenizer)}
    report = _Pace(progress)
    for text, held, ids in with_ids(documents, tokenizer):
        parts[held].write(text, ids)
        report.add(len(ids))
    return {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "size": tokenizer.size},
        "train_counts": parts[False].counts.tolist(),
        "train": parts[False].close(),
        "valid": parts[True].close(),
    }


class _Pace:
    """Says how far tokenising is, first after two seconds and then every five."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._start = time.monotonic()
        self._next = self._start + 2
        self._documents = self._tokens = 0

    def add(self, tokens: int) -> None:
        self._documents += 1
        self._tokens += tokens
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 5
            speed = self._tokens / (now - self._start)
            self._progress(f"tokenising: {self._documents:,} documents, {self._tokens:,} tokens, {speed:,.0f} tokens/s")
