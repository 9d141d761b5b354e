"""The names of parameters: without the parts that wrappers add, and as messages give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    torch.compile adds `_orig_mod.` anywhere in the name, DistributedDataParallel `module.` in front.
    """
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def describe_parameter(group: dict[str, Any], i: int, j: int) -> str:
    """Return the words for parameter i of group j in messages: its name, or its place and shape."""
    names = group.get("param_names", ())
    if i < len(names):
        return f"parameter {names[i]!r}"
    return f"parameter {i} of group {j}, of shape {tuple(group['params'][i].shape)}"


def list_options(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options of a group as text that is the same on all ranks.

    A function is described by its name, since its repr has an address, and a tensor on a device by its type, since the
    host would wait for its value.
    """
    for key, value in group.items():
        if key == "params":
            continue
        if callable(value) or (isinstance(value, Tensor) and not value.is_cpu):
            yield key, getattr(value, "__qualname__", type(value).__name__)
        else:
            yield key, repr(value)
