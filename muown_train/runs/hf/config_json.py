"""Read a config.json of `transformers`, whichever version wrote it; the layouts share these functions."""

from collections.abc import Mapping
from typing import Any

from muown_train.config.checks import check_int, check_positive

ORIGIN = "muown_train.json"  # a file of our exports: it marks the folder as ours and names the run and step


def check_values(config: Mapping[str, Any], model_type: str, wanted: Mapping[str, tuple[Any, Any]]) -> None:
    """Check the keys for which our model supports one value alone.

    Args:
        wanted: key -> the only value that fits, and the value that `transformers` takes if the key is absent.

    Raises:
        ValueError: naming the first value that does not fit.
    """
    for key, (value, default) in wanted.items():
        given = config.get(key, default)
        if given != value:
            raise ValueError(
                f"config.json has {key}={given!r}: for a {model_type} model only {key}={value!r} fits here"
            )


def read_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size that config.json must give.

    Raises:
        ValueError: it is missing, or not a whole number above 0.
    """
    return check_int(f"config.json: {key}", config.get(key), 1)


def read_positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number of config.json, or the default if it is absent.

    Raises:
        ValueError: it is there, and not a positive number.
    """
    return float(check_positive(f"config.json: {key}", config.get(key, default)))


def read_rope_base(config: Mapping[str, Any]) -> float:
    """Return the base of the rotation: `rope_theta` (default 10000), in `rope_parameters` since transformers 5.

    Raises:
        ValueError: the rotation is scaled or partial, or its base is not a positive number.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config.json rotates by {parameters!r}: it must be a mapping")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"config.json rotates by {parameters!r}: only the plain rotation (rope_type 'default') fits")
    return read_positive({**config, **parameters}, "rope_theta", 10_000.0)
