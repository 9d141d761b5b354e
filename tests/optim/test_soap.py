"""SOAP: symmetries that fix the algorithm, its limits, and the edges (trajectories are in test_golden)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import SOAP


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(optimizer, p, grads):
    for G in grads:
        p.grad = G.clone()
        optimizer.step()


@settings(max_examples=10)
@given(st.integers(2, 6), st.integers(0, 99))
def test_rotating_a_problem_rotates_its_solution(n, seed):
    # which Adam alone does not do, and SOAP exactly, as long as its eigenbases are unique
    left, right = (torch.linalg.qr(randn(n, n, seed=seed + k)).Q for k in (1, 2))
    W, grads = randn(n, n, seed=seed), randn(7, n, n, seed=seed + 3)
    p, q = torch.nn.Parameter(W.clone()), torch.nn.Parameter(left @ W @ right)
    for w, G in ((p, grads), (q, left @ grads @ right)):
        run(SOAP([w], lr=0.1, precondition_frequency=3, weight_decay=0.1), w, G)
    torch.testing.assert_close(left @ p.detach() @ right, q.detach(), rtol=1e-6, atol=1e-6)


def test_transposing_a_problem_transposes_its_solution():
    W, grads = randn(4, 6), randn(9, 4, 6, seed=1)
    p, q = torch.nn.Parameter(W.clone()), torch.nn.Parameter(W.T.clone())
    run(SOAP([p], lr=0.1, precondition_frequency=3, max_precondition_dim=4), p, grads)
    run(SOAP([q], lr=0.1, precondition_frequency=3, max_precondition_dim=4), q, grads.mT)
    torch.testing.assert_close(p.detach().T, q.detach())


@pytest.mark.parametrize("shape", [(7,), (), (2, 3, 4), (5, 6)])
def test_parameters_without_preconditioner_take_adam_after_the_first_gradient(shape):
    p, grads = torch.nn.Parameter(randn(*shape)), randn(8, *shape, seed=1)
    q = torch.nn.Parameter(p.detach().clone())
    optimizer = SOAP([p], lr=0.1, eps=1e-15, max_precondition_dim=4)  # eps is added at another place than in Adam
    run(optimizer, p, grads)
    run(torch.optim.Adam([q], lr=0.1, eps=1e-15, betas=(0.9, 0.95)), q, grads[1:])
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_without_bias_correction_the_first_step_is_smaller():
    moves = []
    for correct_bias in (True, False):
        p = torch.nn.Parameter(randn(4, 4))
        before = p.detach().clone()
        run(SOAP([p], lr=0.1, correct_bias=correct_bias), p, randn(2, 4, 4, seed=1))
        moves.append(p.detach() - before)
    torch.testing.assert_close(moves[0] * (1 - 0.9) / (1 - 0.95) ** 0.5, moves[1], rtol=1e-4, atol=1e-6)


def test_longer_sides_have_no_state_and_no_other_is_missing():
    p = torch.nn.Parameter(randn(6, 4))
    optimizer = SOAP([p], max_precondition_dim=5)
    shapes = {key: tuple(s.shape) for key, s in optimizer.create_state(p, optimizer.param_groups[0]).items()}
    averages = {"step": (), "exp_avg": (6, 4), "exp_avg_sq": (6, 4)}
    assert shapes == averages | {"right_0": (4, 4), "right_basis_0": (4, 4)}


def test_bases_stay_orthogonal_and_near_the_eigenvectors():
    p = torch.nn.Parameter(randn(6, 5, dtype=torch.float32))
    scales = torch.diag(2.0 ** -torch.arange(6.0))
    optimizer = SOAP([p], lr=0.01, precondition_frequency=2)
    run(optimizer, p, scales @ randn(60, 6, 5, seed=1, dtype=torch.float32))
    state = optimizer.state[p]
    for side, size in (("left", 6), ("right", 5)):
        basis = state[f"{side}_basis_0"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(size), rtol=0, atol=1e-5)
    rotated = state["left_basis_0"].T @ state["left_0"] @ state["left_basis_0"]
    assert (rotated - rotated.diag().diag()).norm() < 0.1 * rotated.norm()
    assert (rotated.diag().diff() < 0).all()  # largest eigenvalue first


def test_a_first_gradient_of_zeros_or_of_low_rank():
    for first in (torch.zeros(4, 6, dtype=torch.float64), torch.outer(randn(4), randn(6))):
        p = torch.nn.Parameter(randn(4, 6))
        optimizer = SOAP([p], lr=0.01, precondition_frequency=2)
        run(optimizer, p, [first, *randn(6, 4, 6, seed=1)])
        assert p.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[p].values())


def test_eigenvectors_fall_back_to_float64(monkeypatch):
    eigh, dtypes = torch.linalg.eigh, []

    def fails_in_float32(A):
        dtypes.append(A.dtype)
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(A)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    p = torch.nn.Parameter(randn(3, 3, dtype=torch.float32))
    run(SOAP([p], lr=0.01), p, randn(2, 3, 3, dtype=torch.float32))
    assert dtypes == [torch.float32, torch.float64] * 2 and p.isfinite().all()


@pytest.mark.parametrize("blocks", [(4, 4, 4), (2, 7, 3)])
def test_blocks_are_separate_matrices(blocks):
    fused, grads = torch.nn.Parameter(randn(12, 5)), randn(8, 12, 5, seed=1)
    apart = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(list(blocks))]
    options = {"lr": 0.03, "weight_decay": 0.1, "precondition_frequency": 2}
    run(SOAP([{"params": [fused], "blocks": blocks}], **options), fused, grads)
    for p, G in zip(apart, grads.split(list(blocks), dim=1), strict=True):
        run(SOAP([p], **options), p, G)
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in apart]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "key, value",
    [("precondition_frequency", 0), ("precondition_frequency", 2.5), ("max_precondition_dim", -1), ("eps", 0.0),
     ("correct_bias", 1), ("betas", (0.9,)), ("blocks", (3, 3)), ("blocks", (4, 0)), ("blocks", 4)],
)  # fmt: skip
def test_invalid_options(key, value):
    with pytest.raises(ValueError, match=key):
        SOAP([{"params": [torch.nn.Parameter(randn(4, 3))], key: value}])


def test_only_matrices_have_blocks():
    with pytest.raises(ValueError, match=r"'bias'.*blocks"):
        SOAP([{"params": [("bias", torch.nn.Parameter(randn(4)))], "blocks": (2, 2)}])
