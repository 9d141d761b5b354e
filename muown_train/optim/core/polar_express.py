"""Polar Express (Amsel et al. 2025, "The Polar Express: optimal matrix sign methods and their application to the Muon
algorithm", arXiv 2505.16932): odd quintics, each the best for where the one before it has left the singular values.

Given singular values in [l, 1], step k maps those in [l_k, u_k] by the odd quintic p_k with the least max |1 - p_k| on
that interval (their Theorem 3.1: doing so step by step is optimal for the composition); then l_(k+1) = p_k(l_k) and
u_(k+1) = 2 - l_(k+1). Unlike the Newton-Schulz iteration of Muon it converges: every value goes to 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .orthogonalize import NS_EPS, compose

Quintic = tuple[float, float, float]  # (a, b, c) of a x + b x^3 + c x^5

# The paper's Algorithm 1 (and the authors' github.com/NoahAmsel/PolarExpress): l = 1e-3, with the cushion of their
# section 3.4 (p_k is optimal on [max(l_k, 0.02407 u_k), u_k] and then centred); what follows is the last again.
_OPTIMAL = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # Algorithm 1: x is divided by it before each quintic but the last, and once more before the first


def coefficients(steps: int) -> list[Quintic]:
    """The quintics of `steps` steps from values in [0, 1] on, with room for rounding."""
    safe = [_shrunk(quintic) for quintic in _OPTIMAL[:-1]] + [_OPTIMAL[-1]]
    return [_shrunk(safe[0]), *(safe[min(k, len(safe) - 1)] for k in range(1, steps))]


def _shrunk(quintic: Quintic) -> Quintic:
    """p(x / SAFETY)."""
    a, b, c = quintic
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def polar_express(
    X: Tensor | Sequence[Tensor], steps: int = 8, eps: float = NS_EPS, dtype: torch.dtype | str | None = None
) -> Tensor:
    """Approximate U V^T of X = U S V^T by `steps` steps of Polar Express.

    After 5 steps singular values from 1e-3 of the norm on are within 0.2 of 1, after 8 within 1e-6 (exact arithmetic).

    Args:
        X: (..., m, n), any floating dtype, or k of (m, n) to be stacked. Not modified.
        steps: from the eighth on the quintic is (1.875, -1.25, 0.375).
        eps: the least norm that X is divided by; zeros stay zeros.
        dtype: to iterate in, or its name; None for `default_dtype`.

    Returns:
        (..., m, n) or (k, m, n), in X's dtype.
    """
    # three steps on one Gram matrix would raise its rounding 8 * 4 * 4 times, out of what the next quintic is for:
    # bfloat16 matrices of sides 1:2 or more then became infinite one time in four
    return compose(X, coefficients(steps), eps, dtype, on_gram=False)
