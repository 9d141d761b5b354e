"""Proposition 1 as an identity, power iteration within its stated error, effective rank by its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.analysis.matrices import find_matrices
from muown_train.analysis.spectral import (
    compute_effective_rank,
    compute_normalised_effective_rank,
    compute_singular_values,
    derive_factors,
    estimate_spectral_factors,
)
from muown_train.models.gpt import GPT
from muown_train.optim.core.weight_norm import row_norms

shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))


def compute_spectral_factors(W):
    return derive_factors(compute_singular_values(W)[..., 0], W)


def compute_coherence(W):
    """lambda_max(P C P) by its definition."""
    g = row_norms(W)
    D, p = W / g.unsqueeze(-1), g / g.amax()
    return torch.linalg.eigvalsh(p.unsqueeze(-1) * (D @ D.mT) * p)[-1]


def matrix(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(shapes, st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e6]))
@settings(max_examples=50)
def test_proposition_1(shape, seed, scale):
    W = matrix(shape, seed, scale)
    found = compute_spectral_factors(W)
    assert math.isclose(found.spectral_norm**2, found.max_row_norm**2 * compute_coherence(W), rel_tol=1e-10)
    assert math.isclose(found.coherence, compute_coherence(W), rel_tol=1e-10)
    assert found.coherence >= 1 - 1e-12
    assert math.isclose(found.spectral_norm, np.linalg.svd(W.numpy(), compute_uv=False)[0], rel_tol=1e-10)


def test_orthonormal_rows_have_coherence_one():
    Q = torch.linalg.qr(matrix((16, 16), 0)).Q[:5]
    assert math.isclose(compute_spectral_factors(3 * Q).coherence, 1.0, rel_tol=1e-10)
    equal_rows = matrix((1, 7), 0).expand(4, 7)
    assert math.isclose(compute_spectral_factors(equal_rows).coherence, 4.0, rel_tol=1e-10)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (3, 20, 50)])
@pytest.mark.parametrize("iterations", [3, 30])
def test_power_iteration_keeps_to_its_error(shape, iterations):
    W = matrix(shape, 1)
    found, error = estimate_spectral_factors(W, iterations)
    distance = (compute_singular_values(W) - found.spectral_norm[..., None]).abs().amin(-1)
    assert (distance <= error * (1 + 1e-9)).all()
    assert (found.spectral_norm <= compute_spectral_factors(W).spectral_norm * (1 + 1e-12)).all()
    if iterations == 30:
        assert (found.spectral_norm > 0.97 * compute_spectral_factors(W).spectral_norm).all()


def test_power_iteration_of_a_clear_spectrum():
    U, V = torch.linalg.qr(matrix((64, 64), 0)).Q, torch.linalg.qr(matrix((32, 32), 1)).Q
    W = U[:, :32] @ torch.diag(0.7 ** torch.arange(32, dtype=torch.float64)) @ V
    found, error = estimate_spectral_factors(W.float())
    assert math.isclose(found.spectral_norm, 1.0, rel_tol=1e-5)
    assert error < 1e-5


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20).filter(lambda s: sum(s) > 1e-3))
def test_effective_rank_is_between_one_and_all(s):
    rank = float(compute_effective_rank(torch.tensor(s, dtype=torch.float64)))
    assert 1 - 1e-9 <= rank <= len(s) + 1e-9
    p = [x / sum(s) for x in s if x > 0]
    assert math.isclose(rank, math.exp(-sum(q * math.log(q) for q in p if q > 0)), rel_tol=1e-9)


def test_effective_rank_of_known_matrices():
    assert math.isclose(compute_normalised_effective_rank(torch.eye(6)), 1.0, rel_tol=1e-12)
    assert math.isclose(compute_normalised_effective_rank(torch.ones(6, 4)), 1 / 4, rel_tol=1e-6)


def test_matrices_are_the_blocks_that_optimizers_see():
    model = GPT(vocab_size=11, layers=2, dim=8, heads=2, seq_len=4)
    found = list(find_matrices(model))
    assert [m.name for m in found[:4]] == [
        *(f"blocks.0.attention.qkv.weight:{i}" for i in range(3)),
        "blocks.0.attention.out.weight",
    ]
    assert len(found) == 2 * 6
    assert torch.equal(found[1].take_rows(found[1].parameter), model.blocks[0].attention.qkv.weight[8:16])
