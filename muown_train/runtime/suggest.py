"""What somebody meant who mistyped: the nearest name that there is, and the setting that a stray word belongs to."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


def suggest_nearest(word: Any, known: Iterable[str]) -> str:
    """` (did you mean …?)` or nothing; a word of YAML may be a number or a truth value."""
    found = find_nearest(str(word), known)
    return f" (did you mean {found}?)" if found else ""


def find_nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that a word resembles most, whatever its case; one that it begins with goes before others."""
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(word.lower(), list(names), n=3, cutoff=cutoff)
    best = next((name for name in found if word.lower().startswith(name)), found[0] if found else None)
    return names[best] if best else None


def find_nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The dotted key that was meant: a similar one beside it, one similar as a whole, or of that name elsewhere.

    Where there is no dot the section may have been forgotten: then the same name elsewhere goes first.
    """
    known = list(known)
    parent, _, name = key.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    same = min((other for other in known if other.lower().endswith(f".{name.lower()}")), key=len, default=None)
    if not parent:
        return same or find_nearest(name, beside)
    found = find_nearest(name, beside, 0.7)
    return beside[found] if found else find_nearest(key, known, 0.8) or same


def explain_word(words: Sequence[str], i: int) -> str:
    """What is wrong with the i-th word of a command line, which is no setting.

    A stray space, a colon or a forgotten `=` shows in the words before and after.
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
