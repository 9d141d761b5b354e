"""Normalised effective rank of gradients (paper, section 5 and appendix "Gradient Conditioning").

erank(s) = exp(-sum p_i log p_i) with p = s / ||s||_1 over singular values s (Roy and Vetterli 2007), divided by
min(m, n): the fraction of directions that an orthogonalising optimizer effectively explores.
"""

import torch
from torch import Tensor

from muown_train.analysis.spectral import singular_values


def effective_rank(s: Tensor) -> Tensor:
    """erank of singular values s (..., k): (...,), between 1 and k; of all zeros NaN."""
    p = s / s.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(p).sum(-1).exp()
    return rank


def normalised_effective_rank(G: Tensor) -> Tensor:
    """erank / min(m, n) of matrices G (..., m, n): (...,) in float64, between 1 / min(m, n) and 1."""
    return effective_rank(singular_values(G)) / min(G.shape[-2:])
