"""Keep passwords and keys out of everything that a run writes and prints, by replacing them with ***.

These count as secrets: values of environment variables with names such as TOKEN, MY_KEY or DB_PASS; tokens and keys
of a known form (of the Hugging Face hub, W&B, GitHub, GitLab, OpenAI, AWS, Google, Slack, and web tokens); user and
password in an address, signatures and tokens in its query, and what follows the host of a webhook; and settings with
names such as `token` or `api_key`.
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
_SHORTEST = 8  # characters of a secret value; hiding shorter ones would hide innocent text
_VARIABLE = re.compile(
    r"(?:TOKEN|APIKEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|WEBHOOK(?:_URL)?|(?:^|_)(?:KEY|PASS|AUTH))$",
    re.IGNORECASE,
)
# the name of a secret setting; other tokens, such as eos_token, belong to texts
_NAME = (
    r"(?:(?:(?:hf|hub|access|auth|api|secret)_?)?token|\w+_pass|"
    r"(?:\w+_)?(?:api_?key|(?:access|secret|private|auth)_key|secret|password|passwd|passphrase|credentials?))"
)
# a webhook's host, or the path up to it; what follows it lets anyone write there
_WEBHOOK = r"hooks\.[\w.-]+|[\w.-]*webhook[\w.-]*|[\w.:-]+(?:/[\w.-]+)*?/(?:web)?hooks?"
_FORMS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}\b"), HIDDEN),  # a token of the Hugging Face hub
    (re.compile(r"\bwandb_v\d+_\w{16,}"), HIDDEN),
    (re.compile(r"\b(?:gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,})"), HIDDEN),
    (re.compile(r"\b(?:sk|pk|rk)[-_](?=[\w-]{0,99}\d)[\w-]{20,}"), HIDDEN),  # OpenAI and others
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),  # AWS
    (re.compile(r"\bAIza[\w-]{35}|\bxox[a-z]-[\w-]{10,}"), HIDDEN),  # Google, Slack
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"), HIDDEN),  # a JSON web token
    (re.compile(rf"(?i)(https?://(?:{_WEBHOOK})/)[^\s\"'<>]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)(key\W{1,4})[0-9a-f]{40}\b"), rf"\1{HIDDEN}"),  # W&B; commits of git look alike, without "key"
    (re.compile(r"(?i)\b(https?:/{1,2})[^\s/?#\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b([a-z][\w+.-]*:/{1,2})[^\s/?#:\"']*:[^\s/?#\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)([?&][\w.-]*(?:token|signature|credential|key|secret|password)=)[^\s&#\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(?<!\w)({_NAME}[\"']?\s*[:=]\s*[\"']?)(?!\$\{{)[^\s\"',&}}\]]{{8,}}"), rf"\1{HIDDEN}"),
)
_SECRET_KEY = re.compile(_NAME, re.IGNORECASE)


def redact(text: str) -> str:
    """Return the text with *** in place of every secret, also in the forms in which JSON or YAML write it."""
    return _redact(text, _list_environment_secrets())


def _redact(text: str, secrets: Iterable[str]) -> str:
    for value in secrets:
        for form in {value, json.dumps(value)[1:-1], repr(value)[1:-1], value.replace("'", "''")}:
            text = text.replace(form, HIDDEN)
    for pattern, replacement in _FORMS:
        text = pattern.sub(replacement, text)
    return text


def redact_tree(tree: Any) -> Any:
    """Return a copy of nested mappings and lists in which every text, keys too, is redacted."""
    return _redact_tree(tree, _list_environment_secrets())  # listed once, which takes longer than redacting a text


def _redact_tree(tree: Any, secrets: Sequence[str]) -> Any:
    if isinstance(tree, str):
        return _redact(tree, secrets)
    if isinstance(tree, Mapping):
        return {_redact_tree(key, secrets): _redact_value(key, value, secrets) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_redact_tree(item, secrets) for item in tree]
    return tree


def _redact_value(key: Any, value: Any, secrets: Sequence[str]) -> Any:
    """Hide the value of a setting whose name says that it is secret; redact any other value."""
    secret = isinstance(key, str) and isinstance(value, str) and len(value) >= _SHORTEST and _SECRET_KEY.fullmatch(key)
    return HIDDEN if secret else _redact_tree(value, secrets)


def _list_environment_secrets() -> list[str]:
    """Return the secrets among the environment's values, the longest first, since one may be a part of another."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


@contextmanager
def redact_tracebacks() -> Iterator[None]:
    """End the process with a redacted traceback and exit status 1 when an exception leaves this context.

    The context belongs inside anything else that shows exceptions. Tracebacks of other threads are redacted as well.
    """
    previous_hook = threading.excepthook
    threading.excepthook = lambda args: _print_redacted(args.exc_value)
    try:
        yield
    except Exception as error:
        _print_redacted(error)
        sys.exit(1)
    finally:
        threading.excepthook = previous_hook


def _print_redacted(error: BaseException | None) -> None:
    if error is not None:
        print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
