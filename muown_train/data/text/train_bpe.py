"""The tokenizer trained on the data themselves: a byte-level BPE, without any download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from muown_train.data.text.tokenizer import END_OF_TEXT, HubTokenizer, select_options

SIZE = 4096
LEAST, MOST = 257, 1 << 20  # entries: the bytes and end-of-text; and what memory allows
SAMPLE = 30_000_000  # characters that it is trained on, spread evenly over the text
BLOCK = 1 << 16  # characters that are taken or left together


@dataclass(frozen=True)
class BpeRecipe:
    """A tokenizer that is to be trained on the data, which may turn out smaller than `size` entries."""

    size: int = SIZE
    end_of_text: str | None = None  # by default <|endoftext|>
    special_tokens: bool = False  # see HubTokenizer
    bos: bool = False  # see HubTokenizer

    @property
    def name(self) -> str:
        return f"bpe-{self.size}"

    @property
    def options(self) -> dict[str, Any]:
        return select_options(vars(self))

    def train(self, documents: Callable[[], Iterator[str]]) -> bytes:
        """Return the tokenizer.json; see `train_bpe`."""
        return train_bpe(documents, self.size, self.end_of_text or END_OF_TEXT[0])

    def load(self, raw: bytes) -> HubTokenizer:
        """Return the tokenizer whose tokenizer.json `train` has returned."""
        return HubTokenizer(self.name, raw, self.end_of_text, self.special_tokens, self.bos)


def train_bpe(documents: Callable[[], Iterator[str]], size: int = SIZE, end_of_text: str = END_OF_TEXT[0]) -> bytes:
    """Return the tokenizer.json of a byte-level BPE trained on `documents()`, which is called twice.

    It encodes any text without loss; `end_of_text`, id 0, is the only special token. Equal text gives equal bytes.

    Args:
        size: the entries that it has, or fewer if the text has too few different words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_evenly(documents, SAMPLE), trainer)
    return tokenizer.to_str().encode()


def sample_evenly(documents: Callable[[], Iterator[str]], limit: int) -> Iterator[str]:
    """Yield about `limit` characters of the text, or all if it has no more, in blocks spread evenly over it."""
    share = limit / max(limit, sum(map(len, documents())))
    seen = taken = 0
    for document in documents():
        for start in range(0, len(document), BLOCK):
            block = document[start : start + BLOCK]
            seen += len(block)
            if taken < share * seen:
                taken += len(block)
                yield block
