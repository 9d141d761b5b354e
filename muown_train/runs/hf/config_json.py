"""What export, import and the layouts share: reading a config.json of `transformers`, whichever version wrote it."""

from collections.abc import Mapping
from typing import Any

from muown_train.config.instantiate import is_number

ORIGIN = "muown_train.json"  # in an export: what was exported; marks a folder as ours


def demand(config: Mapping[str, Any], model_type: str, wanted: Mapping[str, tuple[Any, Any]]) -> None:
    """Check what a model of ours cannot have otherwise.

    Args:
        wanted: key -> the only value that fits, and what `transformers` takes where the key is absent.

    Raises:
        ValueError: naming the first that does not fit.
    """
    for key, (value, default) in wanted.items():
        given = config.get(key, default)
        if given != value:
            raise ValueError(f"config.json has {key}={given!r}: of a {model_type} model only {key}={value!r} fits here")


def size(config: Mapping[str, Any], key: str) -> int:
    """A size that config.json must give.

    Raises:
        ValueError: it is missing, or no positive integer.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json has {key}={value!r}: it must be a positive integer")
    return value


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number of config.json.

    Raises:
        ValueError: it is there, and none.
    """
    value = config.get(key, default)
    if not is_number(value) or value <= 0:
        raise ValueError(f"config.json has {key}={value!r}: it must be a positive number")
    return float(value)


def rope_base(config: Mapping[str, Any], default: float = 10_000.0) -> float:
    """Base of the rotation: `rope_theta`, in `rope_parameters` since transformers 5.

    Raises:
        ValueError: the rotation is a scaled or partial one, or its base no positive number.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config.json rotates by {parameters!r}: it must be a mapping")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"config.json rotates by {parameters!r}: only the plain rotation (rope_type 'default') fits")
    return positive({**config, **parameters}, "rope_theta", default)
