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


def count_zero_rows(W: Tensor) -> int:
    """Rows of W (m, n) without a direction; on the meta device, which has no numbers, 0."""
    return 0 if W.is_meta else int((row_norms(W) == 0).sum())


def direction(W: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """R = Diag(r / g) W, (..., m, n): first line of Algorithm 1."""
    return W * (r / g).unsqueeze(-1)


def recompose(R: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """W = Diag(g / r) R, (..., m, n): last line of Algorithm 1."""
    return R * (g / r).unsqueeze(-1)


def split_gradient(W: Tensor, G: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient G of W as the gradients of g and R (Algorithm 1, "obtain decoupled gradients").

        D = Diag(1/g) W;   grad_g = (G * D) 1_n;   grad_R = Diag(g/r) (G - Diag(grad_g) D)

    Traffic for a float32 matrix: 9 numbers an element (G W: 3, its sum: 1, the two lines of grad_R: 2 and 3).

    Returns:
        grad_g (..., m) and grad_R (..., m, n), in g's dtype; neither shares memory with an argument.
    """
    W, G = W.to(g.dtype), G.to(g.dtype)
    inner = (G * W).sum(-1)  # <G_i, W_i>; with W = Diag(g) D written out, no matrix D is made
    grad_g = inner / g
    grad_R = G * (g / r).unsqueeze(-1)
    grad_R.addcmul_(W, (inner / (g * r)).unsqueeze(-1), value=-1)
    if W.shape[-1] == 1:
        # A row of one number cannot turn: what is left is rounding, and orthogonalising would blow it up.
        grad_R = grad_R * (W == 0)
    return grad_g, grad_R


def turn(W: Tensor, O: Tensor, g: Tensor, r: Tensor, rate: float | Tensor, in_place: bool) -> tuple[Tensor, Tensor]:  # noqa: E741
    """The step R' = R - rate O, seen from W: V = Diag(g/r) R' = W - rate Diag(g/r) O.

    V has the rows' directions of R', so that R' itself need not be made: W' = Diag(g'/||V||_row) V up to signs.
    Traffic for a float32 matrix: 4 numbers an element (3 in place, 1 for the norms), 5 with a copy.

    Returns:
        V (..., m, n), in g's dtype, W itself if `in_place`; and ||R'||_row (..., m).
    """
    V = W if in_place else W.to(g.dtype, copy=True)
    V.addcmul_(O, (g / r).mul(-rate).unsqueeze(-1))
    return V, row_norms(V) * (r / g).abs()
