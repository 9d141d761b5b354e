"""The tokenizer trained on the data themselves: a byte-level BPE of 4096 entries, without any download."""

from __future__ import annotations

from collections.abc import Callable, Iterator

SIZE = 4096
NAME = f"bpe-{SIZE}"
SAMPLE = 30_000_000  # characters that it is trained on, spread evenly over the text
BLOCK = 1 << 16  # characters that are taken or left together


def train_bpe(documents: Callable[[], Iterator[str]]) -> bytes:
    """Return the tokenizer.json of a byte-level BPE trained on `documents()`, which is called twice.

    It encodes any text without loss; <|endoftext|>, id 0, is the only control token. Equal text gives equal bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<|endoftext|>"],
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
