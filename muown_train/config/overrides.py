"""Words of a command line as overrides: `key=value` in Hydra's grammar, and what of it a run does not accept."""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from muown_train.runtime.suggest import suggest_nearest


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse words as Hydra understands them once `quote_text` has put quotes around plain text.

    Raises:
        HydraException: a word is not an override.
    """
    return OverridesParser.create().parse_overrides(quote_text(overrides))


def is_override(word: str) -> bool:
    """Return whether Hydra's grammar accepts a word."""
    try:
        parse_overrides([word])
    except HydraException:
        return False
    return True


def quote_text(overrides: Iterable[str]) -> list[str]:
    """Put quotes around values that are text but that Hydra's grammar cannot read.

    Names of runs contain `=`, and names of files contain letters of any language.
    """
    return [_quote_word(override) for override in overrides]


@cache  # Hydra's parser takes a millisecond for a word
def _quote_word(override: str) -> str:
    key, _, value = override.partition("=")
    if re.search(r"\d{1000}", value):  # Python refuses to read some of these, and nothing takes any of them
        raise HydraException(f"{key} has a number of a thousand digits or more")
    if re.fullmatch(r"[\w./+=@%~ *?,()-]+", value):
        try:
            OverridesParser.create().parse_override(override)
        except HydraException:
            return f"{key}='{value}'"
    return override


def expand_grid(overrides: Iterable[str], loader: ConfigLoader | None = None) -> list[tuple[str, ...]]:
    """Return the overrides of each run of a grid, in the order of Hydra's own sweeper: the last axis changes fastest.

    Of two words with one key the later one counts.

    Args:
        overrides: words in which a list with commas, `choice(…)` or `range(…)` is an axis of the grid.
        loader: of the configuration files, which `glob(…)` of a config group needs.

    Raises:
        HydraException: a word is no override, or it is an axis without an end.
    """
    axes: dict[str, list[str]] = {}
    for override in OverridesParser.create(loader).parse_overrides(quote_text(overrides)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            axes[key] = [str(override.input_line)]
        elif not override.is_discrete_sweep():
            raise HydraException(f"{override.input_line} is no list of values: give them, as in {key}=A,B,C")
        else:
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    return list(itertools.product(*axes.values()))


def find_varying_words(runs: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each run of a grid, the words that not all runs have."""
    common = set[str]().union(*runs[:1]).intersection(*runs)
    return [" ".join(word for word in run if word not in common) for run in runs]


def split_settings(words: Iterable[str], own_keys: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command's own keys, as far as they are given, and the overrides that choose the data.

    Raises:
        ValueError: a key is unknown; HydraException: a word is not an override.
    """
    words = list(words)
    check_overrides(words)
    own: dict[str, Any] = {}
    data: list[str] = []
    for override in parse_overrides(words):
        key = override.key_or_group
        if key.split(".")[0] == "data":
            data.append(str(override.input_line))
        elif key in own_keys:
            own[key] = override.value()
        else:
            raise ValueError(f"there is no key {key}{suggest_nearest(key, ['data', *own_keys])}; see --help")
    return own, data


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse to remove a key: Hydra would allow it, but no run can do without one.

    Raises:
        ValueError: naming the override.
    """
    for override in overrides:
        if override.startswith("~"):
            raise ValueError(f"{override}: settings cannot be removed, give another value")


def check_from_command_line(key: str, names: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuse names of code that a file brought along: only the person at the command line can trust code.

    Args:
        key: the setting, a list: `trust`, or `tasks`, whose files may name code.
        names: its entries in the composed configuration.
        overrides: the words of the command line.

    Raises:
        ValueError: naming those that the command line does not give.
    """
    given = [override.value() for override in parse_overrides(overrides) if override.key_or_group == key]
    if list(names) != (given[-1] if given else []):
        raise ValueError(f"{key}={list(names)} counts only on the command line, which has {key}={given}")
