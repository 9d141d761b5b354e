"""Updates that are left out without the host knowing: it goes on, and the device decides.

The flag of an update is a tensor of one element on the device, 1 where the update is to be left out and 0 elsewhere.
Optimizers find it in their attribute `found_inf`, which is torch's own protocol: GradScaler sets it, and the fused Adam
and AdamW heed it. To ask a GPU for the flag would be to wait until the gradients are there, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

T = TypeVar("T")

MAX_ELEMENTS = 2**26  # that are copied together, which bounds the extra memory


def step_unless(skip: Tensor, optimizer: Optimizer) -> None:
    """`optimizer.step()`, which leaves parameters and state as they are if skip, a float32 tensor of one, is 1.

    The host waits for skip only where an optimizer cannot heed it on the device, and before its first update.
    """
    if is_known(skip) or not heeds_flag(optimizer):
        if not skip:
            optimizer.step()
        return
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def is_known(skip: Tensor) -> bool:
    """Whether a look at the flag costs nothing, as it does where there is nothing to wait for."""
    return skip.is_cpu


def heeds_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves an update out on the device."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):  # the fused SGD leaves a first momentum undefined
        return all(group["fused"] for group in optimizer.param_groups)
    return bool(getattr(optimizer, "heeds_flag", False))


def unless(skip: Tensor | None, change: Callable[[], T], tensors: Iterable[Tensor]) -> T:
    """What `change` returns, which writes to no tensors but these; if skip, a boolean (), they are as before.

    Takes a copy of them, and 5 numbers of traffic an element; compiled together with the change, nothing of both.
    """
    if skip is None:
        return change()
    before = [(tensor, tensor.clone()) for tensor in tensors]
    result = change()
    for tensor, old in before:
        torch.where(skip, old, tensor, out=tensor)
    return result


def unless_many(skip: Tensor | None, change: Callable[[], T], tensors: list[Tensor]) -> T:
    """As `unless`, for many small tensors of one shape: with few kernels, on which their time depends."""
    if skip is None or not tensors:
        return change()
    before = torch.stack(tensors)
    result = change()
    torch._foreach_copy_(tensors, torch.where(skip, before, torch.stack(tensors)).unbind())
    return result


def portions(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in order, in lists of at most MAX_ELEMENTS unless alone."""
    portion: list[Tensor] = []
    for p in params:
        if portion and sum(q.numel() for q in portion) + p.numel() > MAX_ELEMENTS:
            yield portion
            portion = []
        portion.append(p)
    if portion:
        yield portion
