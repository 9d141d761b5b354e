"""The theorems' bounds hold for measured runs, and would not with other constants."""

import math

import numpy as np
import pytest
import torch

from muown_train.analysis.convergence import (
    Rates,
    bound_noise,
    compare_with_theorem,
    compute_deterministic_rates,
    compute_stochastic_rates,
    make_problem,
    run_muown_sign,
)
from muown_train.optim.core.weight_norm import row_norms, split_gradient


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_without_noise(seed):
    """The bound holds, a quarter of it (1 in place of the theorem's 4) does not, and longer runs get closer."""
    comparisons = {T: compare_with_theorem(make_problem(seed=seed), T) for T in (3, 10, 100, 400)}
    for T, found in comparisons.items():
        assert 0 < found.measured <= found.bound
        assert found.momentum == 0
        if T >= 100:
            assert found.measured > found.bound / 4
    assert comparisons[10].measured > comparisons[100].measured > comparisons[400].measured


def test_with_momentum():
    found = compare_with_theorem(make_problem(), 100, deviation=0.03, seeds=3)
    assert found.momentum > 0
    assert found.measured <= found.bound
    assert found.measured > found.bound / 40  # of 6, 8 and 4 a fortieth is too little


def test_an_l_that_is_too_small_is_noticed():
    of, T = make_problem(), 50
    L = compare_with_theorem(of, T).L
    rates = compute_deterministic_rates(L / 100, float(of.loss(of.start)), T)
    assert run_muown_sign(of, T, rates).L > L / 100


def test_bounds_by_hand():
    assert compute_deterministic_rates(2.0, 8.0, 4) == Rates(1.0, 0.0, 8.0)
    rates = compute_stochastic_rates(1.0, 1.0, 1000, 10.0)
    assert rates.momentum == pytest.approx(0.99)  # T^(-2/3) is above sqrt(1 / 10^5)
    assert rates.step == pytest.approx(math.sqrt(0.01 / 1000))
    assert rates.bound == pytest.approx(6 * math.sqrt(1e-3) + 8 * 0.1**0.25 + 4)


def test_the_problem_s_gradient():
    of = make_problem()
    W = of.start.clone().requires_grad_()
    of.loss(W).backward()
    assert torch.allclose(W.grad, of.gradient(of.start), rtol=1e-10)
    assert of.loss(of.start) == pytest.approx(float(np.log(np.cosh(of.start @ of.X - of.Y)).mean()), rel=1e-10)


def test_the_noise_bound_covers_what_is_drawn():
    of, generator = make_problem(), torch.Generator().manual_seed(0)
    W = of.start
    m, n = W.shape
    g, r = row_norms(W), 1.5 * row_norms(W)
    draws = [split_gradient(W, torch.randn(W.shape, generator=generator, dtype=W.dtype), g, r) for _ in range(500)]
    sigma_g = math.sqrt(np.mean([float(d_g.abs().sum()) ** 2 for d_g, _ in draws]))
    sigma_R = math.sqrt(np.mean([float(torch.linalg.matrix_norm(d_R, "nuc")) ** 2 for _, d_R in draws]))
    measured = math.sqrt(m) * sigma_g + math.sqrt(min(m, n)) * sigma_R
    assert 0.7 * bound_noise(g, r, 1.0, n) < measured < bound_noise(g, r, 1.0, n) * 1.02
