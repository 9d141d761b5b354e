"""Rows of random ids, to measure the speed and memory of training without any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muown_train.data.rows import RowSource
from muown_train.data.sources import RunInfo, TrainingData, describe_tokenizer, take_held_out_ids
from muown_train.data.text.tokenizer import choose_dtype


class RandomRows(RowSource):
    """Rows of random ids; each has a generator of its own, so row i depends on (vocab_size, seq_len, seed, i) alone."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.seq_len, self._vocab_size, self._seed = seq_len, vocab_size, seed

    def take(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack([self._draw_row(i) for i in indices])

    def _draw_row(self, i: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, 0, 0, i]))
        return generator.integers(self._vocab_size, size=self.seq_len + 1, dtype=np.int32)


class NumberTokenizer:
    """A tokenizer whose text is the ids themselves."""

    name, fingerprint, end_of_text, raw = "random", "random", 0, None

    def __init__(self, size: int) -> None:
        self.size = size
        self.options: dict[str, Any] = {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def find_spelt_tokens(self, text: str) -> set[str]:
        return set()


def random_tokens(bos: bool = False, *, run: RunInfo) -> TrainingData:
    """Return ids that are uniform in the model's vocabulary: nothing can be learnt, the loss stays at ln(vocab_size).

    `bos`, which experiments set for every kind of data, changes nothing: random ids are no documents.

    Raises:
        ValueError: valid_tokens is below 1.
    """
    tokenizer = NumberTokenizer(run.vocab_size)
    dtype = choose_dtype(run.vocab_size)
    ids = np.random.default_rng(run.seed).integers(run.vocab_size, size=run.valid_tokens + 1, dtype=dtype)
    metadata = {"data": "random", "content": "random", **describe_tokenizer(tokenizer)}
    return TrainingData(
        RandomRows(run.vocab_size, run.seq_len, run.seed),
        take_held_out_ids(ids, "data=random", run),
        tokenizer,
        metadata,
        float(np.log(run.vocab_size)),
    )
