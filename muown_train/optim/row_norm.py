"""Weight normalization of the rows of a matrix: W = Diag(g / r) R, with r = ||R||_row (paper, Algorithm 1).

    W (..., m, n)  the weight        g (..., m)  signed magnitudes, |g_i| = ||W_i||, never 0
    R (..., m, n)  the directions    r (..., m)  row norms of R, never 0
    D (..., m, n)  = Diag(1/r) R = Diag(1/g) W, rows of unit length

Pure functions, batched over leading dimensions. Mixed dtypes promote: bfloat16 matrices with float32 vectors
are computed and returned in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_norms(W: Tensor) -> Tensor:
    """||W_i|| of each row: (..., m, n) -> (..., m), float32 for bfloat16 and float16, else W's dtype."""
    dtype = W.dtype if W.dtype in (torch.float32, torch.float64) else torch.float32
    norms: Tensor = torch.linalg.vector_norm(W, dim=-1, dtype=dtype)
    return norms


def direction(W: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """R = Diag(r / g) W, (..., m, n): first line of Algorithm 1."""
    return W * (r / g).unsqueeze(-1)


def recompose(R: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """W = Diag(g / r) R, (..., m, n): last line of Algorithm 1."""
    return R * (g / r).unsqueeze(-1)


def split_gradient(W: Tensor, G: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient G of W as the gradients of g and R (Algorithm 1, "obtain decoupled gradients").

        D = Diag(1/g) W;   grad_g = (G * D) 1_n;   grad_R = Diag(g/r) (G - Diag(grad_g) D)

    Returns:
        grad_g (..., m) and grad_R (..., m, n); neither shares memory with an argument.
    """
    D = W / g.unsqueeze(-1)
    grad_g = (G * D).sum(-1)
    grad_R = D.mul_(-grad_g.unsqueeze(-1)).add_(G).mul_((g / r).unsqueeze(-1))
    if W.shape[-1] == 1:
        # A row of one number cannot turn: what is left is rounding, and orthogonalising would blow it up.
        grad_R = grad_R * (W == 0)
    return grad_g, grad_R
