"""Cross-entropy of a linear head without all of its logits at once.

The gradients of a cross-entropy are known as soon as its logits are, so that a chunk of rows is multiplied, judged and
differentiated while it is in the cache, and forgotten: three products of matrices as without chunks, and memory for
one chunk in place of the (N, V) logits, their float32 copy and their gradient. (The idea is that of Liger Kernel's
fused linear cross-entropy, Hsu et al. 2024, arXiv 2410.10989; here without kernels of our own, for any device.)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # a target that does not count, as in torch's cross-entropy

# Logits of a chunk, by device: on a CPU what its caches hold, on a GPU enough to fill it. (Measured:
# docs/performance.md.) But of D rows or more where there are so many: the (V, D) gradient is added to with each chunk.
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**27}


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Summed cross-entropy in nats of the logits x @ weight^T + bias, a float32 scalar.

    Under autocast the products are in its dtype, as those of F.linear; the softmax is always in float32.

    Args:
        x: (N, D); weight: (V, D), of any floating dtype.
        targets: (N,) integers below V; -100 does not count.
        bias: (V,).
        softcap: c > 0, of `softcapped` logits; None leaves them as they are.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else weight.dtype
    x = x.to(dtype)
    if torch.is_grad_enabled():
        loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, bias, softcap)  # type: ignore[no-untyped-call]
        return loss
    return _forward(x, weight, targets, bias, softcap)


def softcapped(logits: Tensor, c: float) -> Tensor:
    """c z / sqrt(z^2 + c^2), below c in absolute value: close to z where |z| is small."""
    return c * logits * (logits.square() + c * c).rsqrt()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None
    ) -> Tensor:
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss = _forward(x, weight, targets, bias, softcap, (grad_x, grad_weight, grad_bias))
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        of_bias = None if grad_bias is None else grad_bias * grad
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad, None, of_bias, None


def _forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    grads: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:
    """The summed loss; of `grads` that of x (N, D) is written, those of weight (V, D) and bias (V,) are added to."""
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    vocab_size, dim = weight.shape
    rows = chunk_rows(x.shape[0], vocab_size, dim, x.device)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        part, wanted = x[start : start + rows], targets[start : start + rows, None]
        counts = wanted != IGNORE
        wanted = wanted.where(counts, 0)
        log_p, slope = _log_probabilities(F.linear(part, weight, bias), softcap)
        loss = loss - log_p.gather(1, wanted).where(counts, 0).sum()
        if grads is None:
            continue
        grad_logits = log_p.exp_().scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=log_p.dtype))
        if slope is not None:
            grad_logits *= slope
        grad_logits = grad_logits.to(x.dtype)
        grad_x, grad_weight, grad_bias = grads
        part = part * counts  # for rows that do not count, here and below: (n, D) is less work than (n, V)
        grad_weight += grad_logits.T @ part
        grad_x[start : start + rows] = (grad_logits @ weight) * counts
        if grad_bias is not None:
            grad_bias += grad_logits.T @ counts.squeeze(1).to(x.dtype)
    return loss


def _log_probabilities(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Of the logits (n, V) once they are capped; and the cap's derivative (n, V), if there is one; both float32."""
    slope = None
    if softcap is not None:
        logits = logits.float()
        factor = softcap * (logits.square() + softcap * softcap).rsqrt()
        logits, slope = logits * factor, factor**3
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32), slope


def chunk_rows(rows: int, vocab_size: int, dim: int, device: torch.device) -> int:
    """How many of `rows` a chunk has."""
    most = max(dim, CHUNK_LOGITS.get(device.type, 2**27) // vocab_size)
    chunks = max(1, math.ceil(rows / most))
    return max(1, math.ceil(rows / chunks))  # chunks of one size
