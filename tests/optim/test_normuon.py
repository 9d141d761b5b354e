"""NorMuon and NorMuown against a naive reading of the papers, by automatic differentiation."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import Muon, Muown, NorMuon, NorMuown
from muown_train.optim.normuon import equalize_rows
from muown_train.optim.row_shards.exchange import Matrix


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(optimizer, p, grads):
    for G in grads:
        p.grad = G.clone()
        optimizer.step()


def polar(X):
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def normalized(O, v, beta2):  # noqa: E741
    """Apply NorMuon's Algorithm 1 row by row; v is a list that changes in place."""
    rows = []
    for i, row in enumerate(O):
        v[i] = beta2 * v[i] + (1 - beta2) * float((row**2).mean())
        rows.append(row / math.sqrt(v[i]))
    scaled = torch.stack(rows)
    return scaled * O.norm() / scaled.norm()


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6), (1, 6), (6, 1)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_naive_normuon(shape, nesterov):
    p, grads = torch.nn.Parameter(randn(*shape)), randn(10, *shape, seed=1)
    W, M, v = p.detach().clone(), torch.zeros(shape, dtype=torch.float64), [0.0] * shape[0]
    for G in grads:
        M = 0.9 * M + 0.1 * G
        O = normalized(polar(0.9 * M + 0.1 * G if nesterov else M), v, 0.8)  # noqa: E741
        W = (1 - 0.02 * 0.1) * W - 0.02 * 0.2 * math.sqrt(max(shape)) * O
    options = {"momentum": 0.9, "beta2": 0.8, "nesterov": nesterov, "orthogonalizer": "svd"}
    optimizer = NorMuon([p], lr=0.02, weight_decay=0.1, **options)
    run(optimizer, p, grads)
    torch.testing.assert_close(p.detach(), W, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state[p]["row_second_moment"], torch.tensor(v, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (1, 6)])
def test_naive_normuown(shape):
    p, grads = torch.nn.Parameter(randn(*shape)), randn(10, *shape, seed=1)
    R, g = p.detach().clone(), p.detach().norm(dim=1)
    M, v = torch.zeros_like(R), [0.0] * shape[0]
    for G in grads:
        R, g = R.requires_grad_(), g.requires_grad_()
        grad_R, grad_g = torch.autograd.grad((G * (g / R.norm(dim=1))[:, None] * R).sum(), (R, g))
        M = 0.95 * M + grad_R
        O = normalized(polar(0.95 * M + grad_R), v, 0.8)  # noqa: E741
        R = R.detach() - 0.02 * 0.2 * math.sqrt(max(shape)) * O
        g = g.detach() - 0.02 * grad_g.sign()  # signum without averaging
    options = {"magnitude": "signum", "betas": (0.0, 0.95), "beta2": 0.8, "orthogonalizer": "svd"}
    run(NorMuown([p], lr=0.02, **options), p, grads)
    torch.testing.assert_close(p.detach(), (g / R.norm(dim=1))[:, None] * R, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99), st.floats(0, 0.99))
def test_the_frobenius_norm_stays_and_the_first_rows_are_equal(m, n, seed, beta2):
    O = randn(m, n, seed=seed)  # noqa: E741
    before = O.clone()
    v = torch.zeros(m, dtype=torch.float64)
    equal = equalize_rows(O, v, beta2, Matrix(tuple(O.shape)))
    assert torch.equal(O, before)
    torch.testing.assert_close(equal.norm(), O.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(equal.norm(dim=1), (O.norm() / math.sqrt(m)).expand(m), rtol=1e-6, atol=0)
    torch.testing.assert_close(v, (1 - beta2) * O.square().mean(1))


@settings(max_examples=15)
@given(st.sampled_from([NorMuon, NorMuown]), st.integers(0, 99), st.permutations(range(5)))
def test_permuting_rows_commutes_with_steps(kind, seed, order):
    p, grads = torch.nn.Parameter(randn(5, 7, seed=seed)), randn(4, 5, 7, seed=seed + 1)
    q = torch.nn.Parameter(p.detach()[order].clone())
    for w, G in ((p, grads), (q, grads[:, order])):
        run(kind([w], lr=0.05, weight_decay=0.1, orthogonalizer="svd"), w, G)
    torch.testing.assert_close(p.detach()[order], q.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind, plain", [(NorMuon, Muon), (NorMuown, Muown)])
def test_rows_of_one_size_are_left_to_the_plain_algorithm(kind, plain):
    # a square O is orthogonal and its rows are unit vectors, so that there is nothing to equalise
    p, q, grads = torch.nn.Parameter(randn(6, 6)), torch.nn.Parameter(randn(6, 6)), randn(4, 6, 6, seed=1)
    run(kind([p], lr=0.05, weight_decay=0.1, orthogonalizer="svd", adjust_lr_fn="original"), p, grads)
    group = {"params": [q], "orthogonalizer": "svd"}
    run(plain([group], lr=0.05, weight_decay=0.1, adjust_lr_fn="original"), q, grads)
    torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)


def test_rows_without_gradient_stay_and_get_no_nan():
    G = randn(5, 7)
    G[1:3] = 0
    p = torch.nn.Parameter(randn(5, 7, seed=1))
    before = p.detach().clone()
    run(NorMuon([p], lr=0.1), p, [G] * 3)
    assert torch.equal(p.detach()[1:3], before[1:3]) and p.isfinite().all()
    assert (p.detach() != before)[[0, 3, 4]].all()


def test_normuown_takes_every_option_of_muown():
    arguments = dict(inspect.signature(NorMuown).parameters)
    assert arguments.pop("beta2").default == inspect.signature(NorMuon).parameters["beta2"].default
    assert list(arguments.values()) == list(inspect.signature(Muown).parameters.values())


def test_normuown_keeps_muowns_invariant_and_options():
    p = torch.nn.Parameter(torch.cat([randn(4, 6), torch.zeros(2, 6, dtype=torch.float64)]))
    optimizer = NorMuown([p], lr=0.1, zero_rows=0.5, weight_decay=0.1, row_norm_schedule=(3.0, 5, 1.0))
    for G in randn(6, 6, 6, seed=1):
        run(optimizer, p, [G])
        torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())
    assert optimizer.state[p]["row_norm"].tolist() == [3.0] * 6
    with pytest.raises(ValueError, match="beta2"):
        NorMuown([torch.nn.Parameter(randn(2, 2))], beta2=1.0)
