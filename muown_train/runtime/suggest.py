"""Guess what a mistyped word means: the nearest known name, or the setting that a stray word belongs to."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


def suggest_nearest(word: Any, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` with the nearest known name, or "" if none is near.

    The word may be a number or a truth value, as YAML reads it.
    """
    name = find_nearest(str(word), known)
    return f" (did you mean {name}?)" if name else ""


def find_nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a word resembles most, whatever its case; a name that the word begins with is preferred."""
    names = {str(name).lower(): str(name) for name in known}
    matches = difflib.get_close_matches(word.lower(), list(names), n=3, cutoff=cutoff)
    best = next((name for name in matches if word.lower().startswith(name)), matches[0] if matches else None)
    return names[best] if best else None


def find_nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that was probably meant.

    The first choice is a similar name in the same section, then a key that is similar as a whole, then the same name in
    another section. A key without a dot may lack its section, so there the same name in a section is the first choice.
    """
    known = list(known)
    section, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    namesake = min((other for other in known if other.lower().endswith(f".{name.lower()}")), key=len, default=None)
    if not section:
        return namesake or find_nearest(name, siblings)
    sibling = find_nearest(name, siblings, 0.7)
    return siblings[sibling] if sibling else find_nearest(key, known, 0.8) or namesake


def explain_stray_word(words: Sequence[str], i: int) -> str:
    """Return a sentence about the i-th word of a command line, which cannot be read as a setting.

    The words before and after it show whether there is a stray space, a colon, or a missing `=`.
    """
    before, word, after = words[i - 1] if i else "", words[i], [*words[i + 1 :], "=", "="]
    meant = None
    if before.endswith("="):
        meant = before + word
    elif len(words) > i + 1 and after[0].startswith("="):
        meant = word + after[0] + (after[1] if after[0] == "=" and len(words) > i + 2 else "")
    elif re.fullmatch(r"[A-Za-z_][\w./]*", word) and "=" not in after[0]:
        meant = f"{word}={after[0]}"
    elif re.fullmatch(r"[A-Za-z_][\w.]*:[^=]+", word):
        meant = word.replace(":", "=", 1)
    if meant:
        return f"cannot read {word!r}: settings are key=value without spaces (did you mean {meant}?)"
    return f"cannot read {word!r}: settings are key=value, text with special characters in quotes"
