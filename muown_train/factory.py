"""A section of the configuration -> a callable with its settings checked against the signature that they are for."""

import inspect
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from hydra.utils import instantiate

from muown_train.config import nearest


def factory(settings: Mapping[str, Any], section: str, given: Iterable[str] = ()) -> partial[Any]:
    """The `_target_` among settings with the others as its arguments.

    Args:
        section: what messages call the settings, such as `optim.rest`.
        given: arguments that come from the program and cannot be set.

    Raises:
        ValueError: see `check_settings`.
    """
    made: partial[Any] = instantiate({**settings, "_partial_": True, "_convert_": "all"})
    check_settings(made.keywords, made, section, given)
    return made


def check_settings(settings: Any, target: partial[Any], section: str, given: Iterable[str] = ()) -> None:
    """Check names, and kinds of values as far as the defaults in the target's signature tell them.

    Raises:
        ValueError: a setting that is no argument of the target, with the nearest one that is, or one of another kind.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{section}={settings!r} must be a mapping of settings, such as {{lr: 0.001}}")
    parameters = {key: p for key, p in inspect.signature(target.func).parameters.items() if key not in set(given)}
    for key, value in settings.items():
        if key not in parameters:
            raise ValueError(f"{section}.{key} is no setting of {target.func.__name__}{nearest(key, parameters)}")
        kind = _kind(parameters[key].default)
        if kind and _kind(value) != kind:
            raise ValueError(f"{section}.{key}={value!r} must be {kind}")


def _kind(value: Any) -> str | None:
    """The kind of a value in words; None for one that tells nothing."""
    if isinstance(value, bool):
        return "true or false"
    if is_number(value):
        return "a number"
    if isinstance(value, list | tuple) and value and all(map(is_number, value)):
        return f"{len(value)} numbers"
    return None


def is_number(value: Any) -> bool:
    """Whether value is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
