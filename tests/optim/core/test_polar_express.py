"""The published coefficients against what characterises them, and the iteration against the exact factor."""

import math

import pytest
import torch

from muown_train.optim import Muon, Muown
from muown_train.optim.core.orthogonalize import (
    _OPTIMAL_QUINTICS,
    SAFETY,
    list_polar_express_quintics,
    newton_schulz,
    polar_express,
    svd,
)

CUSHION = 0.02407327424182761  # the paper's, section 3.4


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def evaluate(quintic, x):
    a, b, c = quintic
    return a * x + b * x**3 + c * x**5


def interior_extrema(quintic):
    """Return the two positive roots of the derivative a + 3 b x^2 + 5 c x^4."""
    a, b, c = quintic
    root = math.sqrt(9 * b * b - 20 * a * c)
    return math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))


def test_each_quintic_is_optimal_for_what_the_one_before_leaves():
    # An odd quintic has the least error against 1 on [low, high] if and only if its error alternates in sign, with one
    # size, at four points (Chebyshev). Up to the factor that centres it, that is p(low) = p(r) < 1 < p(q) = p(high).
    lower, upper = 1e-3, 1.0
    for quintic in _OPTIMAL_QUINTICS[:-1]:
        low = max(lower, CUSHION * upper)
        q, r = interior_extrema(quintic)
        assert low < q < r < upper
        values = [evaluate(quintic, x) for x in (low, q, r, upper)]
        assert values[0] == pytest.approx(values[2], rel=1e-12) and values[1] == pytest.approx(values[3], rel=1e-12)
        assert evaluate(quintic, lower) + evaluate(quintic, upper) == pytest.approx(2, rel=1e-12)  # centred
        lower = evaluate(quintic, lower)
        upper = 2 - lower
    assert 0 < 1 - lower < 2e-9
    a, b, c = _OPTIMAL_QUINTICS[-1]  # the limit for an interval of one point: p(1) = 1, p'(1) = p''(1) = 0
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)


def test_singular_values_end_where_the_docstring_says():
    x = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for steps, error in ((5, 0.2), (8, 1e-6), (12, 1e-12)):
        y = x.clone()
        for quintic in list_polar_express_quintics(steps):
            y = evaluate(quintic, y)
        assert (y - 1).abs().max() < error


def test_the_last_quintic_repeats_and_is_the_only_one_without_room_for_rounding():
    quintics = list_polar_express_quintics(12)
    assert [list_polar_express_quintics(steps) for steps in (1, 3, 8)] == [quintics[:1], quintics[:3], quintics[:8]]
    assert quintics[7:] == [_OPTIMAL_QUINTICS[-1]] * 5
    for k, factor in ((0, SAFETY**2), (1, SAFETY), (6, SAFETY)):
        for value, optimal, power in zip(quintics[k], _OPTIMAL_QUINTICS[k], (1, 3, 5), strict=True):
            assert value == pytest.approx(optimal / factor**power)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (5, 40), (40, 5), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("dtype, atol", [("float64", 1e-9), ("float32", 1e-4), ("bfloat16", 0.02)])
def test_it_converges_to_the_exact_factor(shape, dtype, atol):
    X = randn(3, *shape)
    X[1] = 0
    O = polar_express(X, steps=10, dtype=dtype)  # noqa: E741
    torch.testing.assert_close(O, svd(X), rtol=0, atol=atol)


def test_long_matrices_of_falling_singular_values_stay_finite_in_bfloat16():
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        for decay in (1, 3, 8):
            left = torch.randn(32, 32, generator=generator) * torch.logspace(0, -decay, 32)
            X = left @ torch.randn(32, 128, generator=generator)
            for matrix in (X, X.T):
                O = polar_express(matrix, steps=12, dtype="bfloat16")  # noqa: E741
                assert torch.linalg.matrix_norm(O, 2) < 1.05


def test_the_12_steps_of_the_track_3_benchmark():
    X = randn(12, 20)
    torch.testing.assert_close(newton_schulz(X, 12, (2.0, -1.5, 0.5)), svd(X), rtol=0, atol=1e-6)
    p, q = (torch.nn.Parameter(X.clone()) for _ in range(2))
    p.grad = q.grad = randn(12, 20).flip(0)
    Muon([p], ns_steps=12, ns_coefficients=(2.0, -1.5, 0.5), momentum=0.0, weight_decay=0.0, lr=0.1).step()
    Muown([{"params": [q], "reparameterize": False}], orthogonalizer="svd", adjust_lr_fn=None, lr=0.1).step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_as_an_option_of_an_optimizer():
    exact, approximate, rough = (torch.nn.Parameter(randn(6, 8)) for _ in range(3))
    for p, options in (
        (exact, {"orthogonalizer": "svd"}),
        (approximate, {"orthogonalizer": "polar_express", "ns_steps": 12}),
        (rough, {"orthogonalizer": "polar_express", "ns_steps": 2}),
    ):
        optimizer = Muown([p], lr=0.1, **options)
        for k in range(3):
            p.grad = randn(6, 8).roll(k + 1)
            optimizer.step()
    torch.testing.assert_close(exact, approximate, rtol=0, atol=1e-5)
    assert (exact - rough).abs().max() > 1e-3
