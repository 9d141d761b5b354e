"""Find tokenizers whose rules make text grow without bound: the library would end the process for lack of memory."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

PARTS = ("normalizer", "pre_tokenizer", "decoder")  # the parts that change text
MOST = 100  # times as long as before; published tokenizers stay below 10


def find_growing_part(config: Mapping[str, Any]) -> str | None:
    """Return the part of a tokenizer.json that may make text more than MOST times as long; None if there is none."""
    return next((part for part in PARTS if bound_growth(config.get(part)) > MOST), None)


def bound_growth(rule: Any) -> int:
    """Return how many times as many characters one of the parts may return as it is given, at most.

    The normal forms of Unicode count as 1, since they change no text twice.
    """
    match rule:
        case {"type": "Sequence"}:
            rules = rule.get("normalizers") or rule.get("pretokenizers") or rule.get("decoders") or ()
            return math.prod(map(bound_growth, rules))
        case {"type": "Replace", "pattern": {"String": str(given)}, "content": str(put)} if given:
            return max(1, -(-len(put) // len(given)))
        case {"type": "Replace", "content": str(put)}:  # a regular expression may match between any two characters
            return 1 + len(put)
        case {"type": "Prepend", "prepend": str(put)}:
            return 1 + len(put)
        case {"type": "ByteLevel"}:  # a letter for each byte, and such a letter has one or two bytes
            return 2
        case {"type": "BPEDecoder" | "CTC"}:  # a space in place of a text that may be empty
            return 2
        case {"type": "BertNormalizer"}:  # spaces around a Chinese character
            return 3
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return _find_longest_replacement(charsmap)
    return 1


def _find_longest_replacement(charsmap: str) -> int:
    """Return the bytes of the longest text in a table of sentencepiece: the size of a trie, the trie, and the texts."""
    raw = base64.b64decode(charsmap)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(1, *map(len, texts))
