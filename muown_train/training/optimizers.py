"""Optimizers made of settings, or a sentence on the setting that is wrong, by the name that the user gave it."""

import inspect
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def made(optimizer: partial[Any], parameters: list[Any], section: str) -> Optimizer:
    """An optimizer, or an error that names the section of the configuration."""
    try:
        done: Optimizer = optimizer(parameters)
    except ValueError as error:
        named = re.match(r"\w+(?=:? )", str(error))
        known = named and named.group() in inspect.signature(optimizer.func).parameters
        raise ValueError(f"{section}{'.' if known else ': '}{error}") from error
    return done


def try_out(optimizer: partial[Any], sections: Mapping[str, Mapping[str, Any]], ndim: int) -> None:
    """Refuse a value by the section that it stands in: an optimizer does not know where a group's settings come from.

    Args:
        sections: their settings by their names; those of later ones win.
        ndim: of the parameters that they are for.

    Raises:
        ValueError: naming the first setting that is wrong.
    """
    for section, settings in sections.items():
        optimizer = partial(optimizer, **settings)
        try:
            made(optimizer, _parameter(ndim), section)
        except ValueError as error:
            key = _without_which_all_is_well(optimizer, settings, ndim)
            # torch's optimizers say `Invalid learning rate`
            unnamed = key and str(error).startswith(f"{section}: ")
            raise ValueError(str(error).replace(section, f"{section}.{key}", 1) if unnamed else str(error)) from error


def _parameter(ndim: int) -> list[Any]:
    return [nn.Parameter(torch.ones([1] * ndim))]


def _without_which_all_is_well(optimizer: partial[Any], settings: Mapping[str, Any], ndim: int) -> str | None:
    for key in settings:
        try:
            partial(optimizer.func, **{k: v for k, v in optimizer.keywords.items() if k != key})(_parameter(ndim))
        except (TypeError, ValueError):
            continue
        return key
    return None
