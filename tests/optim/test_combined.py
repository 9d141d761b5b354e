import copy
import io
import pickle

import pytest
import torch

from muown_train.optim import Combined, Muown


def make(seed=0):
    torch.manual_seed(seed)
    w, v, e = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((4, 6), (6,), (9, 4)))
    rest = [{"params": [("v", v)], "lr": 0.01}, {"params": [("e", e)]}]
    return Combined(Muown([("w", w)], lr=0.1, ns_dtype="float32"), torch.optim.AdamW(rest, lr=0.2))


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_step_is_a_step_of_each_part():
    together, alone = make(), make()
    for seed in range(3):
        step(together, seed)
        for part in alone.optimizers:
            for p, q in zip(parameters(alone), parameters(together), strict=True):
                p.grad = q.grad.clone()
            part.step()
    for p, q in zip(parameters(together), parameters(alone), strict=True):
        assert torch.equal(p, q)


def test_groups_and_state_are_the_parts_own():
    optimizer = make()
    muown, adamw = optimizer.optimizers
    assert isinstance(optimizer, torch.optim.Optimizer)
    for mine, own in zip(optimizer.param_groups, muown.param_groups + adamw.param_groups, strict=True):
        assert mine is own
    step(optimizer, 0)
    assert len(optimizer.state) == 3
    for p, state in optimizer.state.items():
        assert state is (muown.state[p] if p in muown.state else adamw.state[p])
    assert optimizer.state[torch.ones(1)] == {} and len(muown.state) == 1


def test_scheduler_reaches_the_parts():
    optimizer = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    step(optimizer, 0)
    scheduler.step()
    assert [group["lr"] for part in optimizer.optimizers for group in part.param_groups] == [0.05, 0.005, 0.1]


def test_scheduler_still_reaches_the_parts_after_loading():
    optimizer = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, 0)
    scheduler.step()
    assert optimizer.optimizers[0].param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("done", [0, 2])
def test_state_dict_round_trip(done):
    one, two = make(), make()
    for seed in range(done):
        step(one, seed)
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2]]
    assert set(saved["state"]) == ({0, 1, 2} if done else {0})
    two.load_state_dict(saved)
    for p, q in zip(parameters(one), parameters(two), strict=True):
        q.data.copy_(p.data)
    for seed in range(5, 8):
        step(one, seed)
        step(two, seed)
    for p, q in zip(parameters(one), parameters(two), strict=True):
        assert torch.equal(p, q)


def test_a_state_dict_with_other_groups_is_refused():
    optimizer = make()
    before = optimizer.optimizers[0].state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this one of \[1, 1, 1\]"):
        optimizer.load_state_dict(before)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_continue_identically(again):
    optimizer = make()
    step(optimizer, 0)
    other = again(optimizer)
    step(optimizer, 1)
    step(other, 1)
    for p, q in zip(parameters(optimizer), parameters(other), strict=True):
        assert p is not q and torch.equal(p, q)


def test_closure_runs_once_and_gradients_are_cleared():
    optimizer, calls = make(), []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = sum(p.square().sum() for p in parameters(optimizer))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == [True]
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))


def test_hooks_and_grad_scaler():
    optimizer, seen = make(), []
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = [p.detach().clone() for p in parameters(optimizer)]
    scaler.scale(sum(p.pow(3).sum() for p in parameters(optimizer))).backward()
    scaler.step(optimizer)
    assert seen == ["stepped"]
    assert all(not torch.equal(p, q) for p, q in zip(parameters(optimizer), before, strict=True))


def test_one_owner():
    w = torch.nn.Parameter(torch.randn(4, 6))
    with pytest.raises(ValueError, match="'w' is in two groups"):
        Combined(Muown([("w", w)]), torch.optim.AdamW([("w", w)]))
    with pytest.raises(ValueError, match=r"of shape \(4, 6\) is in two groups"):
        Combined(Muown([w]), torch.optim.AdamW([w]))
    with pytest.raises(ValueError, match="at least one"):
        Combined()


def test_groups_are_added_to_a_part():
    optimizer = make()
    with pytest.raises(ValueError, match=r"one of the parts"):
        optimizer.add_param_group({"params": []})
    optimizer.optimizers[0].add_param_group({"params": [("x", torch.nn.Parameter(torch.randn(3, 3)))]})
    assert len(optimizer.param_groups) == 4
