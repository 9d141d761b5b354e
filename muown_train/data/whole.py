"""Whole numbers as users write them: 5e9 is one."""

from __future__ import annotations

from typing import Any

from muown_train.factory import is_number


def whole(key: str, value: Any, least: int) -> int:
    """`value` as an integer; raises ValueError naming the key where it is none, less than `least` or beyond int64."""
    if not is_number(value) or value != int(value) or not least <= value < 2**63:
        raise ValueError(f"{key}={value!r} must be a whole number of at least {least} and less than 2^63")
    return int(value)
