"""Checks of single settings. Each returns the value in its proper type or raises one sentence that names the key."""

import math
from collections.abc import Sequence
from typing import Any

from muown_train.runtime.suggest import suggest_nearest


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number; a boolean does not count as one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_int(key: str, value: Any, least: int) -> int:
    """Return `value` as an integer, also where YAML reads it as a float, such as 5e9.

    Raises:
        ValueError: it is not a whole number, is less than `least`, or does not fit 64 bits.
    """
    if not is_number(value) or value != int(value) or not least <= value < 2**63:
        raise ValueError(f"{key}={value!r} must be a whole number of at least {least} and less than 2^63")
    return int(value)


def check_positive(key: str, value: Any, unit: str = "") -> Any:
    """Return `value`, a finite number above 0, as it is.

    Args:
        unit: the words that follow "a positive number" in the message, such as " of minutes".

    Raises:
        ValueError: it is not a number, or not above 0.
    """
    if not is_number(value) or value <= 0:
        raise ValueError(f"{key}={value!r} must be a positive number{unit}")
    return value


def check_bool(key: str, value: Any) -> bool:
    """Return `value`, true or false.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return value


def check_choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, one of `choices`.

    Raises:
        ValueError: it is none of them; the message names the nearest one.
    """
    if value not in choices:
        *most, last = choices
        allowed = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{key}={value!r} must be {allowed}{suggest_nearest(str(value), choices)}")
    return str(value)
