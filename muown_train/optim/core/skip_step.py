"""Steps that are skipped on the device: the device decides, and the host continues without knowing.

The skip flag of a step is a tensor of one element on the device: 1 if the step is to be skipped, otherwise 0.
Optimizers find it in their attribute `found_inf`, which is torch's own protocol: GradScaler sets it, and the fused Adam
and AdamW obey it. Reading the flag from a GPU would make the host wait for the gradients in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

T = TypeVar("T")

MAX_CHUNK_ELEMENTS = 2**26  # elements copied together; this bounds the extra memory of a step that may be skipped


def step_or_skip(optimizer: Optimizer, skip: Tensor) -> None:
    """Run `optimizer.step()`, but leave parameters and state as they are if skip is 1.

    The host waits for the flag only if the optimizer cannot skip on the device, and before its first step.

    Args:
        skip: float32 tensor of one element, 0 or 1.
    """
    if can_read_without_sync(skip) or not can_skip_on_device(optimizer):
        if not skip:
            optimizer.step()
        return
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def can_read_without_sync(skip: Tensor) -> bool:
    """Return whether the host can read the flag without waiting for a device."""
    return skip.is_cpu


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer obeys `found_inf` without asking the host."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):  # the fused SGD leaves a first momentum undefined
        return all(group["fused"] for group in optimizer.param_groups)
    return bool(getattr(optimizer, "can_skip_on_device", False))


def run_or_restore(skip: Tensor | None, change: Callable[[], T], tensors: Iterable[Tensor]) -> T:
    """Call `change`, restore the tensors afterwards if skip is true, and return the result of `change`.

    This copies the tensors and costs 5 numbers of traffic per element; compiled together with `change`, it costs
    nothing of either.

    Args:
        skip: (), boolean, on the device; None if the step is not skipped.
        change: a function that writes to no other tensors.
    """
    if skip is None:
        return change()
    before = [(tensor, tensor.clone()) for tensor in tensors]
    result = change()
    for tensor, old in before:
        torch.where(skip, old, tensor, out=tensor)
    return result


def remember(skip: Tensor | None, tensors: list[Tensor]) -> Callable[[], None]:
    """Return a function that gives vectors the values that they have now, if skip is true.

    All of them are copied together, since the number of kernels, not of elements, decides how long small tensors take.

    Args:
        skip: as in `run_or_restore`.
        tensors: (m,), of any lengths, of one dtype and device.
    """
    if skip is None or not tensors:
        return lambda: None
    before, sizes = torch.cat(tensors), [len(tensor) for tensor in tensors]

    def restore() -> None:
        torch._foreach_copy_(tensors, torch.where(skip, before, torch.cat(tensors)).split(sizes))

    return restore


def split_into_chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in order, in lists of at most MAX_CHUNK_ELEMENTS elements or of a single parameter."""
    chunk: list[Tensor] = []
    for p in params:
        if chunk and sum(q.numel() for q in chunk) + p.numel() > MAX_CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(p)
    if chunk:
        yield chunk
