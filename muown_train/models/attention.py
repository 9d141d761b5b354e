"""Causal attention by the faster of two implementations, and the cache of keys and values for generating text.

The usual implementation is `scaled_dot_product_attention`, which is FlashAttention on GPUs. On CPUs in bfloat16 its
kernel is far slower than a plain matrix product. There, blocks of queries attend to the keys that they may see, with
two batched products each, and the probabilities are kept for the backward pass. (Measured: docs/performance.md.)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

BLOCK = 128  # least number of queries in a block; there are at most four, since fewer products start faster
LONGEST = 2048  # longest input for which blocks are faster; the probabilities kept are 5/8 B h T^2 numbers
_NAMES = {
    SDPBackend.MATH: "plain products",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}

Observer = Callable[[Tensor, Tensor, float], None]  # takes q and k (B, h, T, d) and the scale of their products
_observer: Observer | None = None  # compiled code never calls an observer


@contextmanager
def observe_attention(observer: Observer) -> Iterator[None]:
    """Call `observer` with the factors of each call of `causal_attention`, layer by layer, until the context ends."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T) v over the keys up to each query's own; all are (B, h, T, d) of one dtype.

    Args:
        scale: the factor of q k^T, by default 1 / sqrt(d).
    """
    if _observer is not None:
        _observer(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if _is_faster_in_blocks(q):
        return blockwise_attention(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def name_implementation(q: Tensor) -> str:
    """Return what `causal_attention` computes with where q, k and v are like q (B, h, T, d): words for people."""
    if _is_faster_in_blocks(q):
        return "blocks of queries"
    # how scaled_dot_product_attention itself decides; there is no public way to know it
    choice = torch._fused_sdp_choice(q, q, q, is_causal=True)
    return _NAMES.get(SDPBackend(choice), SDPBackend(choice).name)


def _is_faster_in_blocks(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= LONGEST


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute `causal_attention` by blocks of queries.

    Scores and probabilities have q's dtype; the softmax computes in float32.
    """
    B, h, T, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    q, k, v = (x.reshape(B * h, T, d) for x in (q, k, v))
    size = min(T, max(BLOCK, math.ceil(T / 4)))  # the last block may be smaller
    blocks = [(start, min(T, start + size)) for start in range(0, T, size)]  # the keys that it sees end there too
    width = size * len(blocks)
    # this is the last block's mask; earlier blocks use a part of it, shifted to the left
    mask = torch.full((size, width), -math.inf, dtype=q.dtype).triu(width - size + 1)
    outputs = []
    for start, end in blocks:
        first = width - size - start
        block_mask = mask[: end - start, first : first + end]
        scores = torch.baddbmm(block_mask, q[:, start:end], k[:, :end].mT, alpha=scale)  # (B h, t, end)
        outputs.append(torch.softmax(scores, dim=-1) @ v[:, :end])
    return torch.cat(outputs, dim=1).view(B, h, T, d)


class KeyValueCache:
    """The keys and values of all tokens that a model has read, for each layer; each forward pass adds its own.

    With a cache, a model that continues a text does not read the earlier tokens again.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of positions that earlier forward passes have added; layer 0 is the first to change it."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, h, T, d) of T further positions, and return all of them, (B, h, P + T, d)."""
        if layer in self.layers:
            earlier_k, earlier_v = self.layers[layer]
            k, v = torch.cat((earlier_k, k), dim=2), torch.cat((earlier_v, v), dim=2)
        self.layers[layer] = k, v
        return k, v


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention of the last T of P + T positions, each to the keys up to its own.

    Args:
        q: (B, h, T, d); k, v: (B, h, P + T, d).
        scale: the factor of q k^T, by default 1 / sqrt(d).
    """
    T, all_positions = q.shape[2], k.shape[2]
    mask = None if T == 1 else torch.ones(T, all_positions, dtype=torch.bool, device=q.device).tril(all_positions - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
