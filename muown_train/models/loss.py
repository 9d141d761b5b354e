"""Cross-entropy of a linear head that never holds all logits at once.

The gradients of a cross-entropy are known as soon as its logits are. So each chunk of rows is multiplied, compared with
its targets and differentiated while it is in the cache, and then forgotten. This takes three matrix products, as
without chunks, and memory for one chunk in place of the (N, V) logits, their float32 copy and their gradient. (The idea
is that of Liger Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv 2410.10989. Here it runs on any device,
without kernels of our own.)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # a target that does not count, as in torch's cross-entropy

# The number of logits in a chunk, by device: as many as a CPU's caches hold, or enough to fill a GPU. (Measured:
# docs/performance.md.) A chunk has at least D rows where there are so many, since each adds to the (V, D) gradient.
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**27}


Differentiate = Callable[..., tuple[Tensor, Tensor | None]]  # see `differentiate_logits`


def differentiate_logits(
    logits: Tensor, targets: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of logits (n, V), a float32 scalar, and with_grad its gradient (n, V) in their dtype.

    The rows of targets (n, 1) that do not count add nothing to the loss, but have a gradient, which is of no use.
    """
    counts = targets != IGNORE
    targets = targets.where(counts, 0)
    log_p, slope = _compute_log_softmax(logits, softcap)
    loss = -log_p.gather(1, targets).where(counts, 0).sum()
    if not with_grad:
        return loss, None
    grad = log_p.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=log_p.dtype))
    if slope is not None:
        grad *= slope
    return loss, grad.to(logits.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    differentiate: Differentiate = differentiate_logits,
) -> Tensor:
    """Return the summed cross-entropy in nats of the logits x @ weight^T + bias, a float32 scalar.

    Under autocast the products are in its dtype, as with F.linear; the softmax is always in float32.

    Args:
        x: (N, D); weight: (V, D), of any floating dtype.
        targets: (N,) integers below V; -100 does not count.
        bias: (V,).
        softcap: the bound c > 0 of `softcap_logits`; None leaves the logits as they are.
        differentiate: `differentiate_logits`, or what torch.compile makes of it.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else weight.dtype
    x = x.to(dtype)
    capped = partial(differentiate, softcap=softcap)
    if torch.is_grad_enabled():
        loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, bias, capped)  # type: ignore[no-untyped-call]
        return loss
    return _compute_loss(x, weight, targets, bias, capped)


def softcap_logits(logits: Tensor, c: float) -> Tensor:
    """Return c z / sqrt(z^2 + c^2), which is below c in absolute value and close to z where |z| is small."""
    return c * logits * (logits.square() + c * c).rsqrt()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, differentiate: Differentiate
    ) -> Tensor:
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss = _compute_loss(x, weight, targets, bias, differentiate, (grad_x, grad_weight, grad_bias))
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        grad_bias = None if grad_bias is None else grad_bias * grad
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad, None, grad_bias, None


def _compute_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    differentiate: Differentiate,
    grads: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Return the summed loss and fill `grads`.

    The gradient of x (N, D) is written; those of weight (V, D) and bias (V,) are added to.
    """
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    vocab_size, dim = weight.shape
    rows = choose_chunk_rows(x.shape[0], vocab_size, dim, x.device)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        chunk, chunk_targets = x[start : start + rows], targets[start : start + rows, None]
        logits = F.linear(chunk, weight, bias)
        chunk_loss, grad_logits = differentiate(logits, chunk_targets, with_grad=grads is not None)
        loss = loss + chunk_loss
        if grads is None:
            continue
        assert grad_logits is not None
        counts = chunk_targets != IGNORE
        grad_x, grad_weight, grad_bias = grads
        # rows that do not count are zeroed in factors and results of (n, D), which is less work than in (n, V)
        chunk = chunk * counts
        grad_weight += grad_logits.T @ chunk
        grad_x[start : start + rows] = (grad_logits @ weight) * counts
        if grad_bias is not None:
            grad_bias += grad_logits.T @ counts.squeeze(1).to(x.dtype)
    return loss


def _compute_log_softmax(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of logits (n, V) after the cap, and the cap's derivative (n, V) if there is a cap.

    Both are in float32.
    """
    slope = None
    if softcap is not None:
        logits = logits.float()
        factor = softcap * (logits.square() + softcap * softcap).rsqrt()
        logits, slope = logits * factor, factor**3
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32), slope


def choose_chunk_rows(rows: int, vocab_size: int, dim: int, device: torch.device) -> int:
    """Return the number of rows in a chunk; all chunks of `rows` have about the same size."""
    most = max(dim, CHUNK_LOGITS.get(device.type, 2**27) // vocab_size)
    chunks = max(1, math.ceil(rows / most))
    return max(1, math.ceil(rows / chunks))
