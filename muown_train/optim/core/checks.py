"""Checks of the options that users give: each raises a ValueError with the option's name and the offending value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from numbers import Real
from typing import Any

from torch import Tensor


def is_sequence(value: object) -> bool:
    """Return whether value is a list, a tuple or another sized, ordered iterable, but not a string."""
    return isinstance(value, Iterable) and hasattr(value, "__len__") and not isinstance(value, str | dict | Set)


def is_whole_number(value: object) -> bool:
    """Return whether value is an integer, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(key: str, value: object) -> None:
    """Raise ValueError unless value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")


def check_number(key: str, value: object, *, low: float = 0.0, below: float = math.inf, positive: bool = False) -> None:
    """Raise ValueError unless value is a finite number (or a tensor of one) with low <= value < below."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool):
        number = float(number)
        if math.isfinite(number) and low <= number < below and not (positive and number == 0):
            return
    bounds = ["> 0"] if positive else [f">= {low:g}"] if low > -math.inf else []
    bounds += [f"< {below:g}"] if below < math.inf else []
    raise ValueError(f"{key} must be a finite number {' and '.join(bounds)}".rstrip() + f", got {value!r}")


def check_numbers(key: str, value: Any, count: int, *, low: float = 0.0, below: float = math.inf) -> tuple[float, ...]:
    """Return the numbers in value as a tuple; raise ValueError unless there are `count` of them, in [low, below)."""
    if not is_sequence(value) or len(value) != count:
        raise ValueError(f"{key} must be {count} numbers, got {value!r}")
    for number in value:
        check_number(key, number, low=low, below=below)
    return tuple(float(number) for number in value)


def check_choice(key: str, value: object, choices: tuple[str | None, ...], other: str = "") -> None:
    """Raise ValueError unless value is one of the choices; `other` describes further values that are allowed."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{key} must be one of {allowed}{' or ' + other if other else ''}, got {value!r}")


def check_blocks(name: str, W: Tensor, blocks: Any, key: str = "blocks") -> None:
    """Raise ValueError naming parameter W unless its rows are those of the blocks, or blocks is None."""
    if blocks is None:
        return
    whole = is_sequence(blocks) and all(is_whole_number(rows) and rows > 0 for rows in blocks)
    if not whole or sum(blocks) != W.shape[0]:
        raise ValueError(
            f"{name}: {key} must be positive whole numbers that sum to its {W.shape[0]} rows, got {blocks!r}"
        )


def check_no_dtensor(name: str, W: Tensor, kind: str) -> None:
    """Raise ValueError naming parameter W if it is a DTensor, which this kind of optimizer cannot move."""
    if hasattr(W, "device_mesh"):
        raise ValueError(f"{name} is a DTensor, which {kind} does not support: use plain parameters, as DDP has them")
