"""Muon against torch.optim.Muon itself."""

import inspect
import math

import pytest
import torch

from muown_train.optim import Muon, NorMuon


def pair(*shape, dtype=torch.float32):
    W = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.nn.Parameter(W.clone()), torch.nn.Parameter(W.clone())


def step_both(mine, theirs, optimizers, steps=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def test_arguments_and_defaults_are_torchs():
    ours = inspect.signature(Muon).parameters
    for name, parameter in inspect.signature(torch.optim.Muon).parameters.items():
        assert ours[name].default == parameter.default
    assert list(ours) == [*inspect.signature(torch.optim.Muon).parameters, "ns_dtype", "direction_scale"]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (1, 8), (8, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 0.01},
        {"nesterov": False, "weight_decay": 0.0, "momentum": 0.8, "ns_steps": 3},
        {"lr": torch.tensor(0.02), "adjust_lr_fn": "original"},
    ],
)
def test_trajectory_is_torchs(shape, options):
    p, q = pair(*shape)
    start = p.detach().clone()
    step_both([p], [q], [Muon([p], ns_dtype=torch.bfloat16, **options), torch.optim.Muon([q], **options)])
    # another order of the same operations: bfloat16 turns that into per cents (see golden/README.md)
    assert (p - q).norm() / (q - start).norm() < 0.1


def test_matrices_orthogonalised_together_are_torchs():
    pairs = [pair(12, 20), pair(20, 12), pair(12, 20), pair(12, 20)]
    mine, theirs = map(list, zip(*pairs, strict=True))
    starts = [p.detach().clone() for p in mine]
    step_both(mine, theirs, [Muon(mine, ns_dtype="bfloat16"), torch.optim.Muon(theirs)])
    for p, q, start in zip(mine, theirs, starts, strict=True):
        assert (p - q).norm() / (q - start).norm() < 0.1


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_iteration(shape, nesterov):
    p, q = pair(*shape)
    W, M = q.detach().clone(), torch.zeros(shape)
    optimizer = Muon([p], lr=0.05, nesterov=nesterov, ns_dtype="float32")
    for seed in range(6):
        G = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        M = 0.95 * M + 0.05 * G
        Y = 0.95 * M + 0.05 * G if nesterov else M
        Y = Y / Y.norm()
        for _ in range(5):
            A = Y @ Y.T
            Y = 3.4445 * Y + (-4.775 * A + 2.0315 * A @ A) @ Y
        W = (1 - 0.05 * 0.1) * W - 0.05 * max(1, shape[0] / shape[1]) ** 0.5 * Y
        p.grad = G
        optimizer.step()
    torch.testing.assert_close(p.detach(), W, rtol=1e-4, atol=1e-4)


def test_state_dict_of_torchs_muon_loads():
    p, q = pair(6, 9)
    theirs = torch.optim.Muon([q], lr=0.01)
    q.grad = torch.randn(6, 9)
    theirs.step()
    p.data.copy_(q.data)
    mine = Muon([p], lr=0.5, ns_dtype="bfloat16")
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == 0.01 and mine.param_groups[0]["ns_dtype"] == "bfloat16"
    start = q.detach().clone()
    step_both([p], [q], [mine, theirs])
    assert (p - q).norm() / (q - start).norm() < 0.1


def test_lr_scales():
    p = torch.nn.Parameter(torch.randn(12, 4))
    optimizer = Muon([{"params": [p], "blocks": (4, 8)}])
    assert optimizer.get_lr_scales(optimizer.param_groups[0]) == [1.0, math.sqrt(2)]


@pytest.mark.parametrize("kind", [Muon, NorMuon])
def test_a_direction_scale_is_a_factor_of_the_learning_rate(kind):
    p, q = pair(4, 6)
    scaled = kind([p], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", direction_scale=1.0)
    assert scaled.get_lr_scales(scaled.param_groups[0]) == [math.sqrt(6)]
    step_both([p], [q], [scaled, kind([q], lr=0.05, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")])
    torch.testing.assert_close(p, q)
    with pytest.raises(ValueError, match=r"direction_scale.*0"):
        kind([p], direction_scale=0.0)
