"""Weight normalization of the rows of a matrix, W = Diag(g / r) R, and the steps of its parts (paper, Algorithm 1).

    W (..., m, n)  the weight        g (..., m)  signed magnitudes, |g_i| = ||W_i||, never 0
    R (..., m, n)  the directions    r (..., m)  row norms of R, never 0
    D (..., m, n)  = Diag(1/r) R = Diag(1/g) W, rows of unit length

These are pure functions, batched over leading dimensions. Mixed dtypes promote: bfloat16 matrices with float32 vectors
are computed and returned in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_norms(W: Tensor) -> Tensor:
    """Return ||W_i|| of each row: (..., m, n) -> (..., m), in float32 for bfloat16 and float16, else in W's dtype."""
    dtype = W.dtype if W.dtype in (torch.float32, torch.float64) else torch.float32
    norms: Tensor = torch.linalg.vector_norm(W, dim=-1, dtype=dtype)
    return norms.reshape(W.shape[:-1])  # torch 2.9 keeps the dimension of a single column on the meta device


def count_zero_rows(W: Tensor) -> int:
    """Return how many rows of W (m, n) have no direction; 0 on the meta device, which has no numbers."""
    return 0 if W.is_meta else int((row_norms(W) == 0).sum())


def weight_to_direction(W: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """Return R = Diag(r / g) W, (..., m, n): the first line of Algorithm 1."""
    return W * (r / g).unsqueeze(-1)


def direction_to_weight(R: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """Return W = Diag(g / r) R, (..., m, n): the last line of Algorithm 1."""
    return R * (g / r).unsqueeze(-1)


def split_gradient(W: Tensor, G: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Split the gradient G of W into the gradients of g and R (Algorithm 1, "obtain decoupled gradients").

        D = Diag(1/g) W;   grad_g = (G * D) 1_n;   grad_R = Diag(g/r) (G - Diag(grad_g) D)

    Traffic for a float32 matrix: 9 numbers per element (G W: 3, its sum: 1, the two lines of grad_R: 2 and 3).

    Returns:
        grad_g (..., m) and grad_R (..., m, n), in g's dtype; neither shares memory with an argument.
    """
    W, G = W.to(g.dtype), G.to(g.dtype)
    inner = (G * W).sum(-1)  # <G_i, W_i>; with W = Diag(g) D written out, the matrix D is never formed
    grad_g = inner / g
    grad_R = G * (g / r).unsqueeze(-1)
    grad_R.addcmul_(W, (inner / (g * r)).unsqueeze(-1), value=-1)
    if W.shape[-1] == 1:
        # A row of one number cannot turn: its grad_R is only rounding error, which orthogonalising would blow up.
        grad_R = grad_R * (W == 0)
    return grad_g, grad_R


def step_directions(
    W: Tensor,
    O: Tensor,  # noqa: E741
    g: Tensor,
    r: Tensor,
    rate: float | Tensor,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Take the step R' = R - rate O in terms of W: V = Diag(g/r) R' = W - rate Diag(g/r) O.

    The rows of V have the directions of R', so R' itself is never formed: W' = Diag(g'/||V||_row) V up to signs.
    Traffic for a float32 matrix: 4 numbers per element (3 in place, 1 for the norms), 5 with a copy.

    Returns:
        V (..., m, n), in g's dtype, W itself if `in_place`; and ||R'||_row (..., m).
    """
    V = W if in_place else W.to(g.dtype, copy=True)
    V.addcmul_(O, (g / r).mul(-rate).unsqueeze(-1))
    return V, row_norms(V) * (r / g).abs()
