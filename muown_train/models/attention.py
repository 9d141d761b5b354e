"""Causal attention by the faster of two ways.

As a rule `scaled_dot_product_attention`, FlashAttention on GPUs. On CPUs in bfloat16, where its kernel is far
from the rate of a plain product, blocks of queries against the keys that they may see: two batched products each, with
the probabilities kept for the backward pass. (Measured: docs/performance.md.)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # least number of queries in a block; at most four blocks, as larger ones waste less on starting products
LONGEST = 2048  # up to which blocks are faster; the probabilities kept are 5/8 B h T^2 numbers


Observer = Callable[[Tensor, Tensor, float], None]  # of q, k (B, h, T, d) and the scale of their products
_observer: Observer | None = None  # a compiled model is compiled for its absence


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Meanwhile `by` is shown what each call of `causal_attention` multiplies; of a model, layer by layer."""
    global _observer
    _observer = by
    try:
        yield
    finally:
        _observer = None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v over the keys up to each query's own; all (B, h, T, d) of one dtype.

    Args:
        scale: by default 1 / sqrt(d).
    """
    if _observer is not None:
        _observer(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if wants_blocks(q.device.type, q.dtype, q.shape[2]):
        return by_blocks(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def wants_blocks(device: str, dtype: torch.dtype, length: int) -> bool:
    """Whether blocks are the faster way, on a device of this type."""
    return device == "cpu" and dtype == torch.bfloat16 and length <= LONGEST


def blocks(length: int) -> list[tuple[int, int]]:
    """Where each block of queries starts and ends, which is also the end of the keys that it sees."""
    size = min(length, max(BLOCK, math.ceil(length / 4)))
    return [(start, min(length, start + size)) for start in range(0, length, size)]


def by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """The same by blocks of queries; scores and probabilities are in q's dtype, the softmax computes in float32."""
    B, h, T, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    q, k, v = (x.reshape(B * h, T, d) for x in (q, k, v))
    spans = blocks(T)
    size = spans[0][1]  # of all but the last, which may be smaller
    width = size * len(spans)
    # the last block's mask; earlier ones see a part of it, moved to the left
    mask = torch.full((size, width), -math.inf, dtype=q.dtype).triu(width - size + 1)
    parts = []
    for start, end in spans:
        first = width - size - start
        seen = mask[: end - start, first : first + end]
        scores = torch.baddbmm(seen, q[:, start:end], k[:, :end].mT, alpha=scale)  # (B h, t, end)
        parts.append(torch.softmax(scores, dim=-1) @ v[:, :end])
    return torch.cat(parts, dim=1).view(B, h, T, d)
