"""Texts and tokenizers that tests share."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.helpers.paths import FIXTURES, SHARED

CHAT = "<|im_start|>user\nwhat is <|im_end|><|endoftext|>"  # spells the special tokens of `chat_tokenizer`
SAMPLE = FIXTURES / "corpus" / "sample.parquet"  # 137 documents of real prose


class ByteTokenizer:
    """The id of a byte is the byte + 1; 0 ends a text. It is simple enough to check by hand."""

    name = "bytes"
    size = 257
    end_of_text = 0
    fingerprint = "bytes"
    options: ClassVar[dict[str, Any]] = {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[byte + 1 for byte in text.encode()] for text in texts]

    def find_spelt_tokens(self, text: str) -> set[str]:
        return set()

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 1 for i in ids if i).decode()


def union(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of all ranks in one, as a checkpoint joins them: the first rank that knows a value wins."""
    from muown_train.runs.state import flatten, unflatten  # imports torch, which workers must not

    merged: dict[str, Any] = {}
    for state in map(flatten, states):
        assert merged.get("rows", state["rows"]) == state["rows"]
        merged = state | merged
    return unflatten(merged)


def word_tokenizer_json(end_of_text: str = "<|endoftext|>", special: bool = True) -> str:
    """Return the tokenizer.json of a byte-level BPE without merges: 256 bytes and an end-of-text token, id 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end_of_text:
        tokenizer.add_tokens([AddedToken(end_of_text, special=special, normalized=False)])
    return tokenizer.to_str()


def chat_tokenizer(**changes) -> bytes:
    """Return a byte-level tokenizer with three special tokens: ids 256, 257 and 258."""
    config = json.loads(word_tokenizer_json())
    (end,) = config["added_tokens"]
    for k, content in enumerate(["<|im_start|>", "<|im_end|>"], 257):
        config["added_tokens"].append(end | {"id": k, "content": content})
    return json.dumps(config | changes).encode()


def unpack_tokenizer(name: str, folder: Path) -> Path:
    """Write a published tokenizer, gpt2.tiktoken or gpt_neox_20b_tokenizer.json, to `folder` and return its path."""
    path = folder / name
    path.write_bytes(lzma.decompress((FIXTURES / "tokenizers" / f"{name}.xz").read_bytes()))
    return path


def find_tokenizer(name: str, folder: Path) -> Path:
    """Return the path of a published tokenizer, unpacked to `folder` if needed. Qwen2's is too large for a fixture."""
    if "qwen2" not in name:
        return unpack_tokenizer(name, folder)
    if not (SHARED / "tokenizers" / name).is_file():
        pytest.skip(f"needs {name}")
    return SHARED / "tokenizers" / name
