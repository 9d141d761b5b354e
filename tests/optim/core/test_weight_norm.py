import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim.core.magnitudes import MAGNITUDE_STATE, step_magnitudes
from muown_train.optim.core.weight_norm import direction_to_weight, row_norms, split_gradient, weight_to_direction


def parts(seed, *shape):
    """Return R, g with both signs, and r = ||R||_row."""
    generator = torch.Generator().manual_seed(seed)
    R = torch.randn(*shape, dtype=torch.float64, generator=generator)
    g = torch.randn(shape[:-1], dtype=torch.float64, generator=generator)
    return R, g, row_norms(R)


@settings(max_examples=25)
@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_weight_and_direction_are_inverses(seed, m, n, batched):
    R, g, r = parts(seed, *((3, m, n) if batched else (m, n)))
    W = direction_to_weight(R, g, r)
    torch.testing.assert_close(row_norms(W), g.abs())
    torch.testing.assert_close(weight_to_direction(W, g, r), R)


@settings(max_examples=25)
@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 6))
def test_split_gradient_is_the_chain_rule(seed, m, n):
    R, g, r = parts(seed, m, n)
    G = torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    R, g = R.requires_grad_(), g.requires_grad_()
    (torch.diag(g / R.norm(dim=1)) @ R * G).sum().backward()
    with torch.no_grad():
        grad_g, grad_R = split_gradient(direction_to_weight(R, g, r), G, g, r)
    torch.testing.assert_close(grad_g, g.grad)
    torch.testing.assert_close(grad_R, R.grad)


def test_bfloat16_matrices_are_computed_in_float32():
    W, G = torch.randn(4, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    g = r = row_norms(W)
    assert g.dtype == torch.float32
    expected = split_gradient(W.float(), G.float(), g, r)
    for got, want in zip(split_gradient(W, G, g, r), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.0)])
def test_adam_is_torchs(betas):
    g = torch.nn.Parameter(torch.randn(7))
    reference = torch.optim.Adam([g], lr=0.1, betas=betas)
    mine, state = g.detach().clone(), {name: torch.zeros(7) for name in MAGNITUDE_STATE["adam"]}
    for step in range(1, 6):
        g.grad = torch.randn(7)
        reference.step()
        mine = step_magnitudes("adam", mine, g.grad, state, lr=0.1, step=step, betas=betas, eps=1e-8)
    torch.testing.assert_close(mine, g.detach())


def test_signum_and_fixed():
    g, state = torch.tensor([1.0, -2.0, 3.0]), {"magnitude_exp_avg": torch.tensor([0.0, 0.0, -10.0])}
    grad = torch.tensor([5.0, -5.0, 1.0])
    options = {"lr": 0.5, "step": 1, "betas": (0.9, 0.95), "eps": 1e-8}
    moved = step_magnitudes("signum", g, grad, state, **options)
    assert moved.tolist() == [0.5, -1.5, 3.5]
    torch.testing.assert_close(state["magnitude_exp_avg"], torch.tensor([0.5, -0.5, -8.9]))
    assert step_magnitudes("fixed", g, grad, {}, **options).equal(g)
