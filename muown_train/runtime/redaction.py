"""Passwords and keys stay out of all that a run writes and says: they are replaced by ***.

What counts as one: the values of environment variables with such names, tokens of the hub and keys of W&B by their
form, user and password in an address, signatures and tokens in its query, and settings with such names.
"""

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

HIDDEN = "***"
_SHORTEST = 8  # characters of a value in the environment; a shorter one would hide innocent text
_VARIABLE = re.compile(r"(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET|SECRET_KEY|PASSWORD|PASSWD)$", re.IGNORECASE)
# of a setting; other tokens, such as eos_token, belong to texts
_NAME = r"(?:(?:(?:hf|hub|access|auth|api|secret)_?)?token|(?:\w+_)?(?:api_?key|access_key|secret|password|passwd))"
_FORMS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}\b"), HIDDEN),  # of the Hugging Face hub
    (re.compile(r"\bwandb_v\d+_\w{16,}"), HIDDEN),
    (re.compile(r"(?i)(key\W{1,4})[0-9a-f]{40}\b"), rf"\1{HIDDEN}"),  # of W&B; so are git's commits, without "key"
    (re.compile(r"(?i)\b(https?:/{1,2})[^\s/?#\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b([a-z][\w+.-]*:/{1,2})[^\s/?#:\"']*:[^\s/?#\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)([?&][\w.-]*(?:token|signature|credential|key|secret|password)=)[^\s&#\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(?<!\w)({_NAME}[\"']?\s*[:=]\s*[\"']?)(?!\$\{{)[^\s\"',&}}\]]{{8,}}"), rf"\1{HIDDEN}"),
)
_SECRET_KEY = re.compile(_NAME, re.IGNORECASE)


def redact(text: str) -> str:
    """The text with *** in place of every secret, also of those that JSON or YAML would write otherwise."""
    return _redacted(text, _of_environment())


def _redacted(text: str, values: Iterable[str]) -> str:
    for value in values:
        for form in {value, json.dumps(value)[1:-1], repr(value)[1:-1], value.replace("'", "''")}:
            text = text.replace(form, HIDDEN)
    for pattern, replacement in _FORMS:
        text = pattern.sub(replacement, text)
    return text


def redact_tree(tree: Any) -> Any:
    """A copy of nested mappings and lists with `redact` texts, keys too."""
    return _redacted_tree(tree, _of_environment())  # read once: it takes longer than a text


def _redacted_tree(tree: Any, values: Sequence[str]) -> Any:
    if isinstance(tree, str):
        return _redacted(tree, values)
    if isinstance(tree, Mapping):
        return {_redacted_tree(key, values): _setting(key, value, values) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_redacted_tree(item, values) for item in tree]
    return tree


def _setting(key: Any, value: Any, values: Sequence[str]) -> Any:
    secret = isinstance(key, str) and isinstance(value, str) and len(value) >= _SHORTEST and _SECRET_KEY.fullmatch(key)
    return HIDDEN if secret else _redacted_tree(value, values)


def _of_environment() -> list[str]:
    """Secrets among the environment's values, the longest first: one may be a part of another."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


@contextmanager
def redact_tracebacks() -> Iterator[None]:
    """What leaves this context as an exception ends the process with a redacted traceback and exit status 1.

    To be used inside of what else would show an exception; those of other threads are redacted as well.
    """
    before = threading.excepthook
    threading.excepthook = lambda args: _show(args.exc_value)
    try:
        yield
    except Exception as error:
        _show(error)
        sys.exit(1)
    finally:
        threading.excepthook = before


def _show(error: BaseException | None) -> None:
    if error is not None:
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
