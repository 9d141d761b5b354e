"""Spectral norms of weight matrices and their factors, and the effective rank of gradients.

**Spectral norms** (paper, Proposition 1; Fig. 1 and the spectral appendix):

    W = Diag(g) D,   g = ||W||_row,   C = D D^T,   P = Diag(|g| / ||g||_inf)
    ||W||_S_inf^2 = ||g||_inf^2 lambda_max(P C P)

Since P C P = W W^T / ||g||_inf^2, an exact spectral norm determines the coherence lambda_max(P C P).

**Normalised effective rank** (paper, section 5 and the appendix "Gradient Conditioning"): erank(s) =
exp(-sum p_i log p_i) with p = s / ||s||_1 over singular values s (Roy and Vetterli 2007), divided by min(m, n). It is
the fraction of directions that an orthogonalising optimizer effectively explores.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muown_train.optim.core.weight_norm import row_norms


class SpectralFactors(NamedTuple):
    """The factors of Proposition 1 of a matrix, or of a batch of matrices with (...,) tensors."""

    spectral_norm: Tensor  # ||W||_S_inf, the largest singular value
    max_row_norm: Tensor  # ||g||_inf
    coherence: Tensor  # lambda_max(P C P), at least 1


def compute_singular_values(W: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return all min(m, n) singular values of W (..., m, n), largest first, exact to the rounding of `dtype`.

    A matrix with an infinite or NaN element gets NaN, where a decomposition would raise an error.
    """
    W = W.to(dtype)
    finite = W.isfinite().flatten(-2).all(-1)  # (...,)
    values: Tensor = torch.linalg.svdvals(torch.where(finite[..., None, None], W, 0))
    return torch.where(finite[..., None], values, torch.nan)


def estimate_spectral_factors(W: Tensor, iterations: int = 30) -> tuple[SpectralFactors, Tensor]:
    """Estimate the factors by power iteration on the smaller of W W^T and W^T W, in float32 or W's wider dtype.

    Each iteration reads W twice, where a decomposition takes O(m n min(m, n)) work.

    Returns:
        The factors, and a bound on the distance of the spectral norm to some singular value (in practice the largest,
        unless the start happens to be orthogonal to it): the residual ||S v - lambda v|| bounds the distance of
        lambda = sigma^2 to an eigenvalue of S (Weyl); divided by sigma it bounds a distance of sigma.
    """
    dtype = torch.promote_types(W.dtype, torch.float32)
    A = W.to(dtype) if W.shape[-2] >= W.shape[-1] else W.to(dtype).mT  # the longer side first
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(A.shape[-1], 1, generator=generator, dtype=dtype).to(W.device).expand(*A.shape[:-2], -1, -1)
    v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    for _ in range(iterations):
        v = A.mT @ (A @ v)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    u = A @ v
    squared = u.square().sum((-2, -1))  # the Rayleigh quotient of v
    residual = torch.linalg.vector_norm(A.mT @ u - squared[..., None, None] * v, dim=(-2, -1))
    sigma = squared.sqrt()
    return derive_factors(sigma, W), residual / sigma


def derive_factors(spectral_norm: Tensor, W: Tensor) -> SpectralFactors:
    """Return the factors of W (..., m, n) whose spectral norm (...,) is known; a zero matrix has the coherence NaN."""
    largest = row_norms(W.to(spectral_norm.dtype)).amax(-1)
    return SpectralFactors(spectral_norm, largest, (spectral_norm / largest).square())


def compute_effective_rank(s: Tensor) -> Tensor:
    """Return erank of singular values s (..., k): (...,), between 1 and k; NaN if all are zero."""
    p = s / s.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(p).sum(-1).exp()
    return rank


def compute_normalised_effective_rank(G: Tensor) -> Tensor:
    """Return erank / min(m, n) of matrices G (..., m, n): (...,) in float64, between 1 / min(m, n) and 1."""
    return compute_effective_rank(compute_singular_values(G)) / min(G.shape[-2:])
