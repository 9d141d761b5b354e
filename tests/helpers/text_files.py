"""Small stand-ins that the data tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class ByteTokenizer:
    """id = byte + 1; 0 ends a text. Simple enough to check by hand."""

    name = "bytes"
    size = 257
    end_of_text = 0
    fingerprint = "bytes"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[byte + 1 for byte in text.encode()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 1 for i in ids if i).decode()


def union(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks in one, as a checkpoint joins them: the first rank that knows a stream is believed."""
    merged: dict[str, Any] = {}
    for state in states:
        assert merged.get("rows", state["rows"]) == state["rows"]
        streams = state.get("streams", {}) | merged.get("streams", {})
        merged = state | {"streams": streams} if "streams" in state else state
    return merged


def word_tokenizer_json(end_of_text: str = "<|endoftext|>", special: bool = True) -> str:
    """tokenizer.json of a byte-level BPE without merges: 256 bytes and an end-of-text token, id 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end_of_text:
        tokenizer.add_tokens([AddedToken(end_of_text, special=special, normalized=False)])
    return tokenizer.to_str()
