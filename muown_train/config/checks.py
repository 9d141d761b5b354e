"""Checks of single settings. Each returns the value in its proper type or raises one sentence that names the key."""

import math
import os
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from muown_train.runtime.suggest import suggest_nearest

LARGEST = 10**15  # size that no number of a setting exceeds; budgets in tokens come nearest to it
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that a float can hold; a boolean does not count as one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def check_int(key: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Return `value` as an integer, also where YAML reads it as a float, such as 5e9.

    Raises:
        ValueError: it is not a whole number from `least` to `most`.
    """
    if not is_number(value) or value != int(value) or not least <= value <= most:
        range_ = f"of at least {least} and less than 2^63" if most == 2**63 - 1 else f"from {least} to {most}"
        raise ValueError(f"{key}={value!r} must be a whole number {range_}")
    return int(value)


def check_positive(key: str, value: Any, unit: str = "") -> Any:
    """Return `value`, a number above 0 and at most LARGEST, as it is.

    Args:
        unit: the words that follow "a positive number" in the message, such as " of minutes".

    Raises:
        ValueError: it is not a number, not above 0, or too large.
    """
    if not is_number(value) or not 0 < value <= LARGEST:
        raise ValueError(f"{key}={value!r} must be a positive number{unit}{_explain_size(value)}")
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


def check_text(key: str, value: Any, meaning: str = "text") -> str:
    """Return `value` as text; a whole number is text too, such as the name of the folder 2024.

    Raises:
        ValueError: it is something else, or empty.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return str(value)
    if not isinstance(value, str) or not value:
        hint = f", which quotes make of it: \"{key}='…'\"" if isinstance(value, int | float) else ""
        raise ValueError(f"{key}={value!r} must be {meaning}{hint}")
    return value


def check_path(key: str, value: Any, meaning: str = "a folder") -> str:
    """Return the path in `value` with `~` replaced by the user's folder.

    Raises:
        ValueError: it is no text or empty, or there is no such user.
    """
    path = os.path.expanduser(check_text(key, value, meaning))
    if path.startswith("~"):
        raise ValueError(f"{key}={value} begins with the folder of a user who does not exist")
    return path


def check_kind(key: str, value: Any, annotation: Any) -> Any:
    """Return `value` as an argument with this annotation takes it.

    Only plain data is judged, and only by what the annotation says about plain data: true or false, numbers, text,
    null, and lists of these. Where it says nothing, any value is returned as it is.

    Raises:
        ValueError: the value is of another kind, or a number larger than LARGEST.
    """
    kinds = _list_kinds(annotation)
    plain = isinstance(value, bool | int | float | str | list | tuple | Mapping | NoneType)
    if not kinds or not plain or any(_fits(value, kind) for kind in kinds):
        return value
    if isinstance(value, list | tuple):
        for kind in kinds:
            if get_origin(kind) is not tuple and get_args(kind):
                return [check_kind(f"{key}.{i}", item, get_args(kind)[0]) for i, item in enumerate(value)]
    if str in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return check_text(key, value)
    allowed = " or ".join(dict.fromkeys(map(_describe_kind, kinds)))
    raise ValueError(f"{key}={value!r} must be {allowed}{_explain_size(value)}")


def _list_kinds(annotation: Any) -> list[Any]:
    """Return the kinds of plain data that an annotation allows; none if it allows any."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        alternatives = [_list_kinds(each) for each in get_args(annotation)]
        return [kind for each in alternatives for kind in each]
    if origin is Literal:
        return [type(value) for value in get_args(annotation)]  # which of them it must be, the target says
    if origin in (tuple, list, Sequence):
        return [annotation]
    return [annotation] if annotation in _KINDS else []


def _fits(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return is_number(value) and abs(value) <= LARGEST and (kind is float or value == int(value))
    if kind in _KINDS:
        return isinstance(value, kind)
    if not isinstance(value, list | tuple):
        return False
    kinds = get_args(kind)
    if get_origin(kind) is not tuple:
        kinds = kinds * len(value)
    return len(value) == len(kinds) and all(
        any(_fits(item, each) for each in _list_kinds(of)) for item, of in zip(value, kinds, strict=True)
    )


def _describe_kind(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    return f"{len(get_args(kind))} numbers" if get_origin(kind) is tuple else "a list of texts"


def _explain_size(value: Any) -> str:
    is_large = isinstance(value, int | float) and not isinstance(value, bool) and LARGEST < abs(value) < math.inf
    return " of at most 10^15" if is_large else ""
