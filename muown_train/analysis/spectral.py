"""Spectral norms of weight matrices and what they are made of (paper, Proposition 1; Figs. 1 and spectral appendix).

    W = Diag(g) D,   g = ||W||_row,   C = D D^T,   P = Diag(|g| / ||g||_inf)
    ||W||_S_inf^2 = ||g||_inf^2 lambda_max(P C P)

P C P = W W^T / ||g||_inf^2, so that the identity leaves nothing to choose: with an exact spectral norm the coherence
follows from it. `coherence` computes lambda_max(P C P) from P and C all the same, as a check.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muown_train.optim.core.weight_norm import row_norms


class Spectral(NamedTuple):
    """The factors of Proposition 1 of a matrix, or of a batch of them with these as (...,) tensors."""

    spectral_norm: Tensor  # ||W||_S_inf, the largest singular value
    max_row_norm: Tensor  # ||g||_inf
    coherence: Tensor  # lambda_max(P C P), at least 1


def singular_values(W: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """All min(m, n) singular values of W (..., m, n), largest first, in `dtype`: exact to its rounding.

    Those of a matrix with an element that is no finite number are NaN, where a decomposition would be an error.
    """
    W = W.to(dtype)
    finite = W.isfinite().flatten(-2).all(-1)  # (...,)
    values: Tensor = torch.linalg.svdvals(torch.where(finite[..., None, None], W, 0))
    return torch.where(finite[..., None], values, torch.nan)


def spectral(W: Tensor) -> Spectral:
    """The factors of Proposition 1, exact, of W (..., m, n), in float64; of a zero matrix the coherence is NaN."""
    return factors(singular_values(W)[..., 0], W)


def spectral_by_power_iteration(W: Tensor, iterations: int = 30, seed: int = 0) -> tuple[Spectral, Tensor]:
    """The same by power iteration on the smaller of W W^T and W^T W, in float32 or W's wider dtype.

    Each iteration reads W twice, in place of the O(m n min(m, n)) work of a decomposition.

    Returns:
        the factors, and how far the spectral norm is at most from some singular value (in practice the largest,
        unless the start happens to be orthogonal to it): the residual ||S v - lambda v|| bounds the distance of
        lambda = sigma^2 to an eigenvalue of S (Weyl), which divided by sigma is a distance of sigma.
    """
    dtype = torch.promote_types(W.dtype, torch.float32)
    A = W.to(dtype) if W.shape[-2] >= W.shape[-1] else W.to(dtype).mT  # the longer side first
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(A.shape[-1], 1, generator=generator, dtype=dtype).to(W.device).expand(*A.shape[:-2], -1, -1)
    v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    for _ in range(iterations):
        v = A.mT @ (A @ v)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    u = A @ v
    squared = u.square().sum((-2, -1))  # the Rayleigh quotient of v
    residual = torch.linalg.vector_norm(A.mT @ u - squared[..., None, None] * v, dim=(-2, -1))
    sigma = squared.sqrt()
    return factors(sigma, W), residual / sigma


def factors(spectral_norm: Tensor, W: Tensor) -> Spectral:
    """Those of W (..., m, n) whose spectral norm (...,) is known."""
    largest = row_norms(W.to(spectral_norm.dtype)).amax(-1)
    return Spectral(spectral_norm, largest, (spectral_norm / largest).square())


def coherence(W: Tensor) -> Tensor:
    """lambda_max(P C P) of W (..., m, n) from its definition, in float64; rows must not be zero."""
    W = W.double()
    g = row_norms(W)
    D = W / g.unsqueeze(-1)
    p = g / g.amax(-1, keepdim=True)
    PCP = p.unsqueeze(-1) * (D @ D.mT) * p.unsqueeze(-2)
    largest: Tensor = torch.linalg.eigvalsh(PCP)[..., -1]
    return largest
