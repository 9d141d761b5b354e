"""Documents -> two token files, to train on and held out, cached with their tokenizer and an index."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from muown_train.data.cache import build_once
from muown_train.data.text.tokenizer import TOKENIZER, Tokenizer, choose_dtype, encode_documents
from muown_train.data.text.train_bpe import BpeRecipe
from muown_train.data.token_file import TokenWriter, read_tokens
from muown_train.runtime.progress import Progress, StatusLine

T = TypeVar("T")
SplitDocuments = Callable[[], Iterator[tuple[str, bool]]]  # pairs (text, is held out), the same at every call


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents, in memory maps."""

    train: np.ndarray  # 1-D ids, uint16 or uint32; each document ends with end-of-text
    valid: np.ndarray
    tokenizer: Tokenizer
    index: dict[str, Any]  # "train", "valid": see SplitWriter.close; "train_counts" of each id


def tokenize_corpus(
    folder: Path, documents: SplitDocuments, tokenizer: Tokenizer | BpeRecipe, progress: Callable[[str], None]
) -> Corpus:
    """Return the corpus cached in `folder`, which is written first if it is absent or damaged.

    Args:
        tokenizer: one that exists, or what to train on the documents that are not held out.
    """

    def build(partial: Path) -> dict[str, Any]:
        if not isinstance(tokenizer, BpeRecipe):
            return _write_splits(partial, documents(), tokenizer)
        progress(f"training a tokenizer of {tokenizer.size} entries on the data")
        raw = tokenizer.train(lambda: (text for text, held in documents() if not held))
        (partial / TOKENIZER).write_bytes(raw)
        return _write_splits(partial, documents(), tokenizer.load(raw))

    index = build_once(folder, build, progress)
    if isinstance(tokenizer, BpeRecipe):
        tokenizer = tokenizer.load((folder / TOKENIZER).read_bytes())
    return Corpus(read_tokens(folder / "train.bin"), read_tokens(folder / "valid.bin"), tokenizer, index)


def compute_unigram_loss(counts: np.ndarray, targets: np.ndarray) -> float:
    """Return the loss of a model that knows only how often each token occurs, which any training must beat.

    It is the mean of -log p over `targets` (1-D ids), in nats per token, with
    p(id) = (counts[id] + 1) / sum(counts + 1).
    """
    smoothed = np.asarray(counts, dtype=np.float64) + 1
    log_p = np.log(smoothed) - np.log(smoothed.sum())
    return float(-log_p[np.asarray(targets, dtype=np.int64)].mean())


class SplitWriter:
    """Writes the documents of one split or shard to a token file, with a hash of the text and the count of each id."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.counts = np.zeros(tokenizer.size, dtype=np.int64)
        self.documents = 0
        self._tokenizer = tokenizer
        self._spelt: Counter[str] = Counter()  # special token -> documents that spell it
        self._hash = hashlib.blake2b(digest_size=16)
        self._writer = TokenWriter(path, choose_dtype(tokenizer.size))

    @property
    def tokens(self) -> int:
        """The number of ids written so far."""
        return self._writer.count

    def write(self, text: str | None, ids: np.ndarray) -> None:
        """Write the ids of a document, or those of its continuation, which has no text."""
        if text is not None:
            raw = text.encode()
            self._hash.update(len(raw).to_bytes(8, "little") + raw)
            self.documents += 1
            self._spelt.update(self._tokenizer.find_spelt_tokens(text))
        self._writer.write(ids)
        np.add.at(self.counts, ids, 1)

    def close(self) -> dict[str, Any]:
        """Complete the file and return its entry in the index.

        The entry has the number of `tokens` and `documents`, a hash of the `text`, and where documents spell special
        tokens that are encoded as text, `spelt`: the number of such documents for each of the tokens.
        """
        self._writer.close()
        entry = {"tokens": self.tokens, "documents": self.documents, "text": self._hash.hexdigest()}
        return entry | ({"spelt": dict(sorted(self._spelt.items()))} if self._spelt else {})


def report_spelt_tokens(
    entries: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, progress: Callable[[str], None]
) -> None:
    """Say which special tokens the documents of some entries of an index spell, if any do."""
    spelt: Counter[str] = Counter()
    for entry in entries:
        spelt.update(entry.get("spelt", {}))
    if spelt:
        shown = ", ".join(f"{token} in {count:,} documents" for token, count in spelt.most_common(5))
        more = f" and {len(spelt) - 5} more" if len(spelt) > 5 else ""
        progress(
            f"the text spells special tokens of tokenizer {tokenizer.name}: {shown}{more}; they are encoded as the "
            "letters that they are, and data.special_tokens=true takes them as tokens"
        )


def encode_labelled(documents: Iterable[tuple[str, T]], tokenizer: Tokenizer) -> Generator[tuple[str, T, np.ndarray]]:
    """Yield (text, label, ids with end-of-text) for pairs (text, label), encoded in batches.

    An empty text is not a document and is left out.
    """
    waiting: deque[tuple[str, T]] = deque()

    def yield_texts() -> Iterator[str]:
        for text, label in documents:
            if text:
                waiting.append((text, label))
                yield text

    for ids in encode_documents(yield_texts(), tokenizer):
        yield *waiting.popleft(), ids


def _write_splits(folder: Path, documents: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> dict[str, Any]:
    train, valid = SplitWriter(folder / "train.bin", tokenizer), SplitWriter(folder / "valid.bin", tokenizer)
    tokens = 0
    with StatusLine(every=5.0, first=2.0) as line:
        progress = Progress(line, label="tokenizing")
        for text, is_held_out, ids in encode_labelled(documents, tokenizer):
            (valid if is_held_out else train).write(text, ids)
            tokens += len(ids)
            progress.update(tokens)
    return {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "size": tokenizer.size},
        "train_counts": train.counts.tolist(),
        "train": train.close(),
        "valid": valid.close(),
    }
