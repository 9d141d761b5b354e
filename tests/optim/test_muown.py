"""Muown against a naive reading of Algorithm 1, its invariants, and its edge cases."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import Muown
from muown_train.optim.core.magnitudes import clamp_away_from_zero
from muown_train.optim.muown import FLOOR


def parameter(m, n, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter((scale * torch.randn(m, n, dtype=torch.float64, generator=generator)).to(dtype))


def gradients(steps, *shape, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *shape, dtype=torch.float64, generator=generator).to(dtype)


def run(optimizer, p, grads):
    for G in grads:
        p.grad = G.clone()
        optimizer.step()


def naive(W, grads, lr, weight_decay=0.0, beta=0.95, nesterov=True, magnitude="adam"):
    """Follow the paper, not our formulas: row by row, with explicit R and a projection matrix for each row."""
    m, n = W.shape
    W = W.clone()
    g = torch.stack([row.norm() for row in W])
    R, M = W.clone(), torch.zeros_like(W)
    mean, square = torch.zeros(m, dtype=W.dtype), torch.zeros(m, dtype=W.dtype)
    for t, G in enumerate(grads, start=1):
        grad_R, grad_g = torch.zeros_like(W), torch.zeros(m, dtype=W.dtype)
        for i in range(m):
            d = R[i] / R[i].norm()
            grad_g[i] = G[i] @ d
            grad_R[i] = g[i] / R[i].norm() * (torch.eye(n, dtype=W.dtype) - torch.outer(d, d)) @ G[i]
        M = beta * M + grad_R
        U, _, Vh = torch.linalg.svd(beta * M + grad_R if nesterov else M, full_matrices=False)
        R = R - 0.2 * math.sqrt(max(m, n)) * lr * U @ Vh
        mean = 0.9 * mean + 0.1 * grad_g
        square = 0.95 * square + 0.05 * grad_g**2
        if magnitude == "adam":
            g = g - lr * mean / (1 - 0.9**t) / ((square / (1 - 0.95**t)).sqrt() + 1e-8)
        elif magnitude == "signum":
            g = g - lr * mean.sign()
        old = W
        W = torch.stack([g[i] * R[i] / R[i].norm() for i in range(m)])
        if weight_decay:
            W = W - lr * weight_decay * old
            g = torch.stack([row.norm() for row in W]) * g.sign()
            R = torch.stack([W[i] / g[i] * R[i].norm() for i in range(m)])
    return W, g


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6), (7, 2), (1, 6)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("magnitude", ["adam", "signum", "fixed"])
def test_naive_reference(shape, weight_decay, magnitude):
    p, grads = parameter(*shape, scale=0.2), gradients(15, *shape)
    W, g = naive(p.detach(), grads, 0.02, weight_decay, magnitude=magnitude)
    optimizer = Muown([p], lr=0.02, weight_decay=weight_decay, magnitude=magnitude, orthogonalizer="svd")
    run(optimizer, p, grads)
    torch.testing.assert_close(p.detach(), W, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state[p]["magnitude"], g, rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(
    st.integers(2, 7),
    st.integers(2, 7),
    st.integers(0, 99),
    st.sampled_from(["adam", "signum", "fixed"]),
    st.sampled_from([0.0, 0.5]),
)
def test_row_norms_are_the_magnitudes(m, n, seed, magnitude, weight_decay):
    p = parameter(m, n, seed)
    before = p.detach().clone()
    optimizer = Muown([p], lr=0.1, magnitude=magnitude, weight_decay=weight_decay)
    assert torch.equal(p.detach(), before)  # starts where Muon starts
    assert torch.equal(optimizer.create_state(p, optimizer.param_groups[0])["magnitude"], before.norm(dim=1))
    for G in gradients(6, m, n, seed=seed + 1):
        run(optimizer, p, [G])
        torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())
    if magnitude == "fixed" and not weight_decay:
        torch.testing.assert_close(p.detach().norm(dim=1), before.norm(dim=1))
    assert not torch.allclose(p.detach(), before)


@settings(max_examples=20)
@given(st.integers(0, 99), st.floats(1e-2, 1e4))
def test_the_scale_of_the_loss_does_not_matter(seed, scale):
    a, b = parameter(5, 7, seed), parameter(5, 7, seed)
    grads = gradients(5, 5, 7, seed=seed + 1)
    run(Muown([a], lr=0.05, adam_eps=1e-15, orthogonalizer="svd"), a, grads)
    run(Muown([b], lr=0.05, adam_eps=1e-15, orthogonalizer="svd"), b, grads * scale)
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@settings(max_examples=20)
@given(st.integers(0, 99), st.permutations(range(5)))
def test_permuting_rows_commutes_with_steps(seed, order):
    a, grads = parameter(5, 7, seed), gradients(5, 5, 7, seed=seed + 1)
    b = torch.nn.Parameter(a.detach()[order].clone())
    run(Muown([a], lr=0.05, weight_decay=0.1), a, grads)
    run(Muown([b], lr=0.05, weight_decay=0.1), b, grads[:, order])
    torch.testing.assert_close(a.detach()[order], b.detach(), rtol=1e-7, atol=1e-7)


def test_magnitudes_go_through_zero_and_stay_finite():
    p = parameter(4, 6, scale=0.01)
    optimizer = Muown([p], lr=0.01, orthogonalizer="svd")
    start = p.detach().clone()
    for _ in range(30):  # a constant loss <G, W> pushes every row through zero to the other side
        run(optimizer, p, [start])
        assert p.isfinite().all()
    assert (optimizer.state[p]["magnitude"] < 0).all()
    torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())
    assert ((p.detach() * start).sum(1) < 0).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_magnitudes_that_land_on_zero_stop_at_the_floor(weight_decay):
    p = torch.nn.Parameter(0.5 * torch.eye(3, 4, dtype=torch.float64))
    optimizer = Muown([p], lr=0.5, magnitude="signum", orthogonalizer="svd", weight_decay=weight_decay)
    run(optimizer, p, [p.detach().clone()])  # signum takes each g from 0.5 to exactly 0
    state = optimizer.state[p]
    if not weight_decay:
        assert (state["magnitude"] == 0.5 * FLOOR).all()
    for G in gradients(4, 3, 4):
        run(optimizer, p, [G])
        assert p.isfinite().all() and state["row_norm"].isfinite().all()
        torch.testing.assert_close(p.detach().norm(dim=1), state["magnitude"].abs())


def test_exact_zeros_keep_the_sign_they_had():
    g_old, floor = torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.full((4,), 0.5)
    assert clamp_away_from_zero(torch.tensor([0.0, 0.0, 0.1, -0.1]), g_old, floor).tolist() == [0.5, -0.5, 0.5, -0.5]
    assert clamp_away_from_zero(torch.tensor([2.0, -2.0]), g_old[:2], floor[:2]).tolist() == [2.0, -2.0]


def test_decay_to_nothing_stops_at_the_floor():
    p = parameter(3, 4)
    optimizer = Muown([p], lr=1.0, weight_decay=1.0, magnitude="fixed")
    run(optimizer, p, torch.zeros(3, 3, 4, dtype=torch.float64))  # W - lr wd W = 0
    assert (p.detach().norm(dim=1) > 0).all()
    torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())


@pytest.mark.parametrize("orthogonalizer", ["newton_schulz", "svd"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("kind", ["zero", "rank one", "parallel", "one row"])
def test_degenerate_gradients(orthogonalizer, shape, kind):
    p = parameter(*shape)
    u, v = gradients(1, shape[0])[0], gradients(1, shape[1], seed=2)[0]
    G = {
        "zero": torch.zeros(shape, dtype=torch.float64),
        "rank one": torch.outer(u, v),
        "parallel": p.detach().clone(),  # no component along R at all
        "one row": torch.zeros(shape, dtype=torch.float64).index_fill(0, torch.tensor([0]), 1.0),
    }[kind]
    before = p.detach().clone()
    optimizer = Muown([p], lr=0.01, orthogonalizer=orthogonalizer)
    run(optimizer, p, [G] * 3)
    assert p.isfinite().all()
    torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())
    if kind == "zero":
        torch.testing.assert_close(p.detach(), before)


@pytest.mark.parametrize("orthogonalizer", ["newton_schulz", "svd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_one_number_only_change_magnitude(orthogonalizer, dtype):
    p, grads = parameter(8, 1, dtype=dtype), gradients(40, 8, 1, dtype=dtype)
    q = torch.nn.Parameter(p.detach().clone())
    run(Muown([p], lr=0.1, orthogonalizer=orthogonalizer), p, grads)
    run(torch.optim.Adam([q], lr=0.1, betas=(0.9, 0.95)), q, grads)
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


def test_zero_rows_are_an_error_with_three_ways_out():
    p = parameter(4, 6)
    p.data[1] = 0
    with pytest.raises(ValueError, match=r"'out.weight': 1 of 4 rows are zero") as error:
        Muown([("out.weight", p)])
    for way in ("initialise", "reparameterize=False", "zero_rows=0.57"):
        assert way in str(error.value)


def test_zero_rows_start_with_a_magnitude():
    p = parameter(4, 6)
    p.data[1:3] = 0
    optimizer = Muown([p], lr=0.01, zero_rows=0.57, magnitude="fixed", orthogonalizer="svd")
    run(optimizer, p, torch.zeros(2, 4, 6, dtype=torch.float64))
    assert optimizer.state[p]["magnitude"][1:3].tolist() == [0.57, 0.57]
    assert (p.detach()[1:3] == 0).all() and p.isfinite().all()
    G = gradients(1, 4, 6)[0]
    run(optimizer, p, [G])
    torch.testing.assert_close(p.detach()[1:3].norm(dim=1), torch.full((2,), 0.57, dtype=torch.float64))
    assert ((p.detach() * G)[1:3].sum(1) < 0).all()


def test_without_reparameterization_it_is_muon_with_heavy_ball_momentum():
    p = parameter(5, 7)
    p.data[2] = 0
    optimizer = Muown([{"params": [p], "reparameterize": False}], lr=0.03, weight_decay=0.2, orthogonalizer="svd")
    W, M = p.detach().clone(), torch.zeros(5, 7, dtype=torch.float64)
    for G in (grads := gradients(5, 5, 7)):
        M = 0.95 * M + G
        U, _, Vh = torch.linalg.svd(0.95 * M + G, full_matrices=False)
        W = (1 - 0.03 * 0.2) * W - 0.03 * 0.2 * math.sqrt(7) * U @ Vh
    run(optimizer, p, grads)
    torch.testing.assert_close(p.detach(), W)
    assert optimizer.state[p].keys() == {"step", "momentum_buffer"}


def test_weights_loaded_between_construction_and_the_first_step_count():
    p, q = parameter(4, 6, seed=3), parameter(4, 6, seed=4, scale=9.0)
    early = Muown([p], orthogonalizer="svd")
    p.data.copy_(q.data)
    late, grads = Muown([q], orthogonalizer="svd"), gradients(3, 4, 6)
    run(early, p, grads)
    run(late, q, grads)
    assert torch.equal(p, q)


def test_bfloat16_parameters_keep_float32_vectors():
    p, q = parameter(16, 24, dtype=torch.bfloat16), parameter(16, 24, dtype=torch.bfloat16)
    exact = torch.nn.Parameter(q.detach().float())
    optimizer, reference = (Muown([w], lr=0.1, ns_dtype="float32") for w in (p, exact))
    grads = gradients(5, 16, 24, dtype=torch.bfloat16)
    run(optimizer, p, grads)
    run(reference, exact, grads.float())
    state = optimizer.state[p]
    assert state["momentum_buffer"].dtype == torch.bfloat16
    assert all(state[k].dtype == torch.float32 for k in ("magnitude", "row_norm", "magnitude_exp_avg_sq"))
    torch.testing.assert_close(p.detach().float().norm(dim=1), state["magnitude"].abs(), rtol=2**-8, atol=0)
    rounding = 2**-9 * exact.norm()
    assert (p.float() - exact).norm() < 5 * rounding < 0.2 * (exact - q.float()).norm()


def test_lr_scales():
    p = parameter(12, 4)
    optimizer = Muown([{"params": [p], "blocks": (4, 8)}])
    group = optimizer.param_groups[0]
    assert optimizer.get_lr_scales(group) == [0.2 * math.sqrt(4), 0.2 * math.sqrt(8)]
    group["adjust_lr_fn"] = "original"
    assert optimizer.get_lr_scales(group) == [1.0, math.sqrt(2)]
    group["adjust_lr_fn"] = None
    assert optimizer.get_lr_scales(group) == [1.0, 1.0]


def test_own_orthogonalizer():
    p = parameter(3, 5)
    seen = []

    def sign(X):
        seen.append(X.shape)
        return X.sign()

    before = p.detach().clone()
    run(Muown([p], orthogonalizer=sign, lr=0.1), p, gradients(1, 3, 5))
    assert seen[0][-2:] == (3, 5) and not torch.equal(p, before)
    with pytest.raises(ValueError, match="shape"):
        run(Muown([p], orthogonalizer=lambda X: X.mT), p, gradients(1, 3, 5))


def test_direction_scale():
    p, q, grads = parameter(4, 6), parameter(4, 6), gradients(4, 4, 6)
    optimizer = Muown([p], lr=0.05, direction_scale=0.4, magnitude="fixed", orthogonalizer="svd")
    assert optimizer.get_lr_scales(optimizer.param_groups[0]) == [0.4 * math.sqrt(6)]
    run(optimizer, p, grads)
    run(Muown([q], lr=0.1, magnitude="fixed", orthogonalizer="svd"), q, grads)
    torch.testing.assert_close(p, q)
    with pytest.raises(ValueError, match=r"direction_scale.*0"):
        Muown([parameter(2, 3)], direction_scale=0.0)


@pytest.mark.parametrize("blocks", [None, (2, 3)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_row_norm_schedule(blocks, weight_decay):
    p, grads = parameter(5, 7), gradients(9, 5, 7)
    group = {"params": [p], "blocks": blocks, "row_norm_schedule": [2.5, 7, 1.2]}
    optimizer = Muown([group], lr=0.05, magnitude="fixed", orthogonalizer="svd", weight_decay=weight_decay)
    start = p.detach().norm(dim=1)
    for t, G in enumerate(grads, start=1):
        run(optimizer, p, [G])
        expected = start + (2.5 - start) * min(1, (t - 1) / 6) ** 1.2
        torch.testing.assert_close(optimizer.state[p]["row_norm"], expected)
        torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs())


def test_row_norm_schedule_is_algorithm_1_with_rows_of_r_lengthened():
    p, grads = parameter(4, 6), gradients(6, 4, 6)
    R, M, start = p.detach().clone(), torch.zeros(4, 6, dtype=torch.float64), p.detach().norm(dim=1)
    for t, G in enumerate(grads, start=1):
        R.requires_grad_()
        (grad_R,) = torch.autograd.grad((G * (start / R.norm(dim=1))[:, None] * R).sum(), R)
        M = 0.95 * M + grad_R
        U, _, Vh = torch.linalg.svd(0.95 * M + grad_R, full_matrices=False)
        R = R.detach() - 0.05 * 0.2 * math.sqrt(6) * U @ Vh
        R = R / R.norm(dim=1, keepdim=True) * (start + (3 - start) * min(1, (t - 1) / 3) ** 2)[:, None]
    options = {"magnitude": "fixed", "orthogonalizer": "svd", "row_norm_schedule": (3, 4, 2)}
    run(Muown([p], lr=0.05, **options), p, grads)
    torch.testing.assert_close(p.detach(), (start / R.norm(dim=1))[:, None] * R)


@pytest.mark.parametrize("magnitude", ["adam", "signum"])
def test_magnitude_lr_scale(magnitude):
    """A step of g is that of a learning rate so many times as large; the directions stay the same."""
    p, q, s = (parameter(4, 6) for _ in range(3))
    (G,) = gradients(1, 4, 6)
    start = p.detach().norm(dim=1)
    run(Muown([p], lr=0.05, magnitude=magnitude, magnitude_lr_scale=0.1), p, [G])
    run(Muown([q], lr=0.005, magnitude=magnitude), q, [G])
    run(Muown([s], lr=0.05, magnitude=magnitude), s, [G])
    torch.testing.assert_close(p.detach().norm(dim=1), q.detach().norm(dim=1))
    torch.testing.assert_close(F.normalize(p.detach(), dim=1), F.normalize(s.detach(), dim=1))
    moved = [(W.detach().norm(dim=1) - start).abs() for W in (p, s)]
    torch.testing.assert_close(moved[0], 0.1 * moved[1])
    with pytest.raises(ValueError, match=r"magnitude_lr_scale.*0"):
        Muown([p], magnitude_lr_scale=0.0)


@pytest.mark.parametrize(
    "schedule", [(2.5, 7), (0.0, 7, 1.2), (2.5, 0, 1.2), (2.5, 1.5, 1.2), (2.5, 7, 0.0), 2.5, "abc"]
)
def test_invalid_row_norm_schedules(schedule):
    with pytest.raises(ValueError, match="row_norm_schedule"):
        Muown([parameter(2, 3)], row_norm_schedule=schedule)


def test_zero_rows_follow_the_row_norm_schedule_from_their_magnitude():
    p = parameter(3, 4)
    p.data[1] = 0
    optimizer = Muown([p], lr=0.01, zero_rows=0.5, row_norm_schedule=(1.5, 3, 1.0), orthogonalizer="svd")
    run(optimizer, p, gradients(2, 3, 4))
    assert optimizer.state[p]["row_norm"][1].item() == pytest.approx(1.0)
    assert p.isfinite().all() and (p.detach()[1] != 0).all()
