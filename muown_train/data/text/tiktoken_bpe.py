"""Byte-level BPE by tiktoken, for those tokenizer.json files whose ids it gives exactly.

The `tokenizers` library applies the merges of the file, the earliest first. tiktoken joins any two neighbours whose
bytes are a token, the lowest id first, and takes a piece of text that is a token as it is. Both give the same ids if
(1) ids grow along the list of merges, the parts of a merge being older than their token, and (2) the bytes of each
token, taken alone, merge to that token. Proof: let neighbours u, v spell the token w. No merge ever crossed the border
between them, so the bytes of w alone reach the state u, v at that point as well; by (2) their next merge is then that
of w, so that u, v is the merge in the file and no other.
This module checks both conditions. The rest of the file (normalizer, pattern, added tokens) must be one of a few known
cases; the `tokenizers` library encodes everything else.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any
from unicodedata import is_normalized

import numpy as np

# The alternatives of the pattern before the last two, which look ahead. The regular expressions of tiktoken compile a
# group of its own to an automaton, which makes the whole pattern 1.4 times faster than a flat one.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
LAST = r"\s+(?!\S)|\s+"
# If runs of spaces are tokens of their own, no other piece of text may begin or go on inside such a run.
LAST_OUTSIDE_RUNS = r"(?:[^\S ]| (?! ))+(?!\S)|\s"

GPT2_RANKS = 50256
AT_ONCE = 10_000  # tokens that are encoded together to check condition (2)
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


# Texts that both libraries encode when a tokenizer is made, to compare the ids. They are a second net under the
# conditions above, and the only one for what lies outside the file, such as the Unicode version of each library.
CHECK_TEXTS = (
    "".join(f"{'x' * (k % 3)}{' ' * k}{'y1'[k % 2]}{chr(10) * (k % 4)}" for k in range(60)),
    "".join(
        a + b + a + c for a in [" ", "  ", "\t", "\n", "\r\n", "\xa0", "\u3000"] for b in "a.1\n \t" for c in " \nb!9"
    ),
    "I'm you're he's we'll I'd they've don't 'S 'LL 'Re ''s '\u017f \u2019s can't've '\n's  't 'tis rock'n'roll",
    "1 12 123 1234 12345.678 1,234,567 0x1F 3² ½ ⅷ ٣٤ १२ 六 x1y2 -1e-9 10% $5",
    "naïve café e\u0301 a\u0323\u0307 \u212b \u1e9b\u0323 \uac00 \u1100\u1161\u11a8 q\u0307\u0323 \u0958 \u2126 \ufb01",
    "中文没有空格。日本語、カタカナ！ 한국어 русский ελληνικά עברית العربية ไทย हिन्दी \U00020000",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 👍🏽 🇩🇪 \u2603\ufe0f \u200b\ufeff\ufffd\ufffe \U0010ffff \ue000",
    # letters, digits and marks of Unicode 14, 15, 16 and 17, and a code point without a character yet
    "\U00010570\U0001e030\U00031350\U00010d40\U000105c0\U00010940\U000323b0 a\u1ac1\u0316\u0897\u0301 \u0378x",
    "\x00\x01\x1b[0m\x7f\x85\u2028\u2029\x1c\x1d\x1e\x1f\x0b\x0c\u180e a\x00b\x00",
    "def f(x):\n    if x != 0:\n\t\treturn {'a': [x ** 2, -x]}  # ok\n\n\n        pass\r\n\r\nf->g(&x);;\t\t\n  ",
    "https://www.example.org/a_b/c-d?q=1&r=%20#top user@example.com C:\\a\\b.txt $HOME/~x @name... --- ===\n---\n",
    "a" * 300 + "!" * 300 + "0" * 300 + "\n" * 300 + "ab" * 300 + "é" * 100 + "東" * 100 + " \n" * 100 + " " * 300,
    "<|endoftext|><|padding|> <|im_start|>user\n<|im_end|> </s> [EOS] <eos> <|endoftext|",
    " The state-of-the-art (SOTA) isn't “quoted” — it's ‘here’; see §4.2, Fig. 3–5… internationalization\n\n\tEND ",
)


class ByteBPE:
    """Encodes text by tiktoken; a control token that a text spells is encoded as text.

    Args:
        ranks: bytes of each token -> id.
        pattern: the regular expression that splits text.
        normalizer: None, or the NFC normalizer of the `tokenizers` library, so that both know the same version of
            Unicode.
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, normalizer: Any, end_of_text: int) -> None:
        import tiktoken

        # without any special token tiktoken looks for an empty one at every character, which halves the speed
        special = {"<|endoftext|>": end_of_text}
        self._encoding = tiktoken.Encoding("ids", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self._normalizer = normalizer

    def encode(self, text: str) -> np.ndarray:
        """Return ids, 1-D uint32. Raises ValueError if a run of white space exhausts the memory of the pattern."""
        # text that is NFC in a later Unicode (Python's) is NFC in an earlier one (the library's)
        if self._normalizer is not None and not text.isascii() and not is_normalized("NFC", text):
            text = self._normalizer.normalize_str(text)
        return self._encoding.encode_to_numpy(text, disallowed_special=())


def build_byte_bpe(config: dict[str, Any], end_of_text: int) -> ByteBPE | None:
    """Return the tokenizer of a tokenizer.json by tiktoken, or None if the ids are not known to be the same."""
    added_tokens = config.get("added_tokens") or []
    words, longest = _match_pattern(config.get("pre_tokenizer")), _find_longest_run(added_tokens, end_of_text)
    normalizer = config.get("normalizer")
    if words is None or longest is None or normalizer not in (None, {"type": "NFC"}):
        return None
    added = {token["id"]: token["content"] for token in added_tokens} | {end_of_text: ""}
    ranks = _read_ranks(config["model"], added)
    if ranks is None:
        return None
    last = LAST
    if longest:
        if words != GPT2_WORDS:
            return None
        # a run of spaces is always a piece by itself, and no other piece has two spaces in a row, so each of these
        # entries is used for a whole run only
        ranks |= {content.encode(): i for i, content in added.items() if content.startswith("  ")}
        words, last = f"{words}| {{2,{longest}}}", LAST_OUTSIDE_RUNS
    if len(set(ranks.values()) | {end_of_text}) != len(ranks) + 1:
        return None
    from tokenizers import normalizers

    return ByteBPE(ranks, f"(?:{words})|{last}", normalizers.NFC() if normalizer else None, end_of_text)


def _match_pattern(pre_tokenizer: Any) -> str | None:
    """Return the first alternatives of the pattern that splits text, or None for an unknown pattern."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False} if pre_tokenizer.get("use_regex", True):
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return next((words for words in (GPT2_WORDS, QWEN2_WORDS) if pattern == f"{words}|{LAST}"), None)
    return None


def _find_longest_run(added_tokens: list[dict[str, Any]], end_of_text: int) -> int | None:
    """Return n if the added tokens besides control tokens are the runs of 2, 3, … n spaces, and 0 if there are none.

    None means that there are others, which tiktoken would treat in another way.
    """
    others = [token for token in added_tokens if not token.get("special") and token["id"] != end_of_text]
    runs = {" " * length for length in range(2, 2 + len(others))}
    plain = not any(token.get(flag) for token in others for flag in ("single_word", "lstrip", "rstrip"))
    if {token["content"] for token in others} != runs or len({token.get("normalized") for token in others}) > 1:
        return None
    return (len(others) + 1 if others else 0) if plain else None


def _read_ranks(model: dict[str, Any], added: dict[int, str]) -> dict[bytes, int] | None:
    """Return bytes of each token -> id, or None if the conditions above do not hold.

    Args:
        added: ids that no merge makes.
    """
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(
        model.get(key) for key in (*affixes, "dropout", "unk_token", "byte_fallback", "ignore_merges")
    ):
        return None
    vocab = {token: i for token, i in model["vocab"].items() if i not in added}
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merges = [(left, right) for left, right in pairs]
    before = -1
    for left, right in merges:
        token = vocab.get(left + right, -1)
        if not (before < token and vocab.get(left, token) < token and vocab.get(right, token) < token):
            return None
        before = token
    letters = build_byte_alphabet()
    if any(letter not in letters for token in vocab for letter in token):
        return None
    ranks = {bytes(letters[letter] for letter in token): i for token, i in vocab.items()}
    single = {token[0] for token in ranks if len(token) == 1}
    if len(single) + len(merges) != len(ranks) or not set(range(256)) - NEVER_IN_UTF8 <= single:
        return None
    return ranks if _encodes_each_to_itself(vocab, merges) else None


def _encodes_each_to_itself(vocab: dict[str, int], merges: list[tuple[str, str]]) -> bool:
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.BPE(vocab, merges, cache_capacity=0))
    tokens = list(vocab)
    for start in range(0, len(tokens), AT_ONCE):
        some = tokens[start : start + AT_ONCE]
        if any(e.ids != [vocab[token]] for token, e in zip(some, library.encode_batch_fast(some), strict=True)):
            return False
    return True


def build_byte_alphabet() -> dict[str, int]:
    """Return letter -> byte: the printable letter that stands for each byte in the tokens of a byte-level BPE.

    GPT-2 chose these letters.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def convert_gpt2_ranks(name: str, raw: bytes) -> bytes:
    """Return the tokenizer.json of a gpt2.tiktoken (a line of base64 and id for each token); end of text is 50256.

    Raises:
        ValueError: it is not such a file. Other encodings split text by patterns that their files do not hold.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{name} line {number} is not a token in base64 and its rank: {line[:40]!r}") from error
    if len(ranks) != GPT2_RANKS:
        raise ValueError(
            f"{name} has {len(ranks)} ranks; the only .tiktoken file that can be read is GPT-2's, with {GPT2_RANKS}: "
            "give the tokenizer.json of another tokenizer"
        )
    try:
        return build_tokenizer_json(ranks)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def build_tokenizer_json(ranks: dict[bytes, int]) -> bytes:
    """Return a tokenizer.json with GPT-2's pattern for tiktoken's ranks 0, 1, … n - 1, and <|endoftext|> as id n.

    Raises:
        ValueError: the ranks are not a byte-level BPE.
    """
    tokens = sorted(ranks, key=ranks.__getitem__)
    if list(map(ranks.__getitem__, tokens)) != list(range(len(tokens))) or {len(t) for t in tokens[:256]} != {1}:
        raise ValueError("ranks must be 0, 1, 2, ... without a gap, and the first 256 the single bytes")
    letter = {byte: letter for letter, byte in build_byte_alphabet().items()}
    spelt = {token: "".join(map(letter.__getitem__, token)) for token in tokens}
    merges = []
    for token in tokens[256:]:
        parts = _merge_bytes(token, ranks)
        if len(parts) != 2:
            raise ValueError(f"rank {ranks[token]}, {token!r}, does not come from two earlier ones")
        merges.append(f"{spelt[parts[0]]} {spelt[parts[1]]}")
    end = {"id": len(tokens), "content": "<|endoftext|>", "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {spelt[token]: ranks[token] for token in tokens}, "merges": merges}
    config = {
        "version": "1.0",
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(config).encode()


def _merge_bytes(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts that the bytes of a token form after all merges before its own."""
    parts = [token[k : k + 1] for k in range(len(token))]
    end = ranks[token]
    while len(parts) > 2:
        rank, k = min((ranks.get(parts[k] + parts[k + 1], end), k) for k in range(len(parts) - 1))
        if rank >= end:
            break
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    return parts
