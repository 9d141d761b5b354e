"""Errors as one sentence for a person: unwrapped from Hydra's layers, with the nearest name that exists, no secrets."""

import errno
import re
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser  # there is no public way to know Hydra's flags
from omegaconf import OmegaConf

from muown_train.cli.process import is_output_closed
from muown_train.config.compose import CONFIG_DIR, GROUPS, flatten, list_keys, list_options
from muown_train.config.overrides import is_override
from muown_train.runtime.redaction import redact
from muown_train.runtime.suggest import explain_stray_word, find_nearest_key, suggest_nearest


def explain_error(error: BaseException, overrides: Sequence[str]) -> str:
    """Return one sentence that says what went wrong.

    Args:
        overrides: the `key=value` words that were given, among which the cause may stand.
    """
    sentence = _explain_override(overrides) or _explain_key(str(error), overrides) or _explain_exception(error)
    return redact(sentence)


def _explain_override(overrides: Sequence[str]) -> str | None:
    """Say which word cannot be read or chooses an option that does not exist, if one does."""
    options = list_options()
    for i, override in enumerate(overrides):
        if not is_override(override):
            return explain_stray_word(overrides, i)
        if override.endswith("=") and overrides[i + 1 : i + 2] and "=" not in overrides[i + 1]:
            return explain_stray_word(overrides, i + 1)
        key, _, value = override.partition("=")
        group = key.lstrip("+")
        is_list = group == "probes" and value.startswith("[")
        for choice in map(str.strip, value.strip("[] ").split(",") if is_list else [value]):
            if group in options and choice not in options[group] and not (is_list and not choice):
                others = ", ".join(options[group]) or "none"
                return f"there is no {key}={choice}{suggest_nearest(choice, options[group])}; there are {others}"
    return None


def _explain_key(text: str, overrides: Sequence[str]) -> str | None:
    """Say what Hydra's complaint about a key means, if it is one."""
    if ambiguous := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = ambiguous.groups()
        return f"{key}={value}: text with a comma is \"{key}='{value}'\", a list '{key}=[{value}]'"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if not unknown:
        return None
    key, known = unknown.group(1), list_keys(overrides)
    if key not in known:
        return _explain_unknown_key(key, known)
    entries = [name for name in known if name.startswith(f"{key}.")]  # a mapping was given in place of these
    return f"a key of {key} is not among {', '.join(entries)}; further ones are given as +{key}.KEY=VALUE"


def _explain_exception(error: BaseException) -> str:
    while error.__cause__ is not None and type(error).__module__.startswith(("hydra", "omegaconf")):
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a file'}: the disk is full: make room, and the same command goes on"
    if isinstance(error, BrokenPipeError) and is_output_closed():
        return "nobody reads what it prints any more"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _explain_unknown_key(key: str, known: list[str]) -> str:
    if "/" in key:
        return f"there is no group {key}{suggest_nearest(key, (group for group in list_options() if '/' in group))}"
    elsewhere = _map_keys_to_options()
    if key in elsewhere:
        return f"there is no key {key} with the options chosen; {elsewhere[key]} has it"
    known = [name for name in known if not name.rpartition(".")[2].startswith("_")]
    meant = find_nearest_key(key, [*known, *elsewhere])
    if meant:
        option = "" if meant in known else f", of {elsewhere[meant]}"
        return f"there is no key {key} (did you mean {meant}{option}?)"
    return f"there is no key {key}; --help shows the most used, python -m muown_train --cfg job all"


def _map_keys_to_options() -> dict[str, str]:
    """Return every dotted key that an option of a config group brings, with that option, such as schedule=wsd."""
    options_by_key: dict[str, str] = {}
    for group, options in list_options().items():
        for option in options if group != "experiment" else ():  # an experiment sets keys of the others
            text = (CONFIG_DIR / group / f"{option}.yaml").read_text()
            prefix = "" if text.startswith("# @package _global_") else group.replace("/", ".") + "."
            keys = flatten(OmegaConf.to_container(OmegaConf.create(text), resolve=False) or {}, prefix)
            options_by_key |= {key: f"{group}={option}" for key, _ in keys if not re.search(r"(^|\.)(_|defaults)", key)}
    return options_by_key


def check_flags(words: Sequence[str]) -> None:
    """Refuse words that begin with a dash and are not Hydra's flags; Hydra would answer them with its usage.

    Args:
        words: the words of the command line.

    Raises:
        ValueError: naming the word, with the setting or the flag that was meant.
    """
    parser = get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        is_setting = word.startswith("-") and bool(equals or key in (*GROUPS, *list_keys([])))
        if is_setting and f"--{key}" not in flags and word not in flags:
            raise ValueError(f"{word} is no flag: settings have no dashes, as in {key}={value or '…'}")
    parser.error = _refuse  # type: ignore[method-assign]
    for word in parser.parse_known_args(words)[1]:
        if word.startswith("-"):
            raise ValueError(f"there is no flag {word}{suggest_nearest(word, flags)}; see --help")
        raise ValueError(f"{word} stands apart from other settings: flags go before or after all of them")


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"{message}; see --help")
