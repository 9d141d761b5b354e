"""Every optimizer of the library: safety at the edges, state, and what torch's tools expect."""

import copy
import inspect
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import SOAP, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown

MATRIX = (Muon, Muown, NorMuon, NorMuown, MuownSign)
EVERY = (*MATRIX, Lion, SOAP)
each = pytest.mark.parametrize("kind", EVERY)
SCHEDULE = {"row_norm_schedule": (2.0, 5, 1.2)}
VARIANTS = [(kind, {}) for kind in EVERY] + [
    (Muown, SCHEDULE),
    (NorMuown, SCHEDULE),
    (SOAP, {"max_precondition_dim": 5}),
]


def parameter(*shape, seed=0, dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps(optimizer, seeds):
    parameters = parameters_of(optimizer)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return parameters


def same(a, b):
    """Parameters and state of two optimizers are equal bit for bit."""
    assert len(a.state) == len(b.state)
    for p, q in zip(parameters_of(a), parameters_of(b), strict=True):
        assert torch.equal(p, q) and a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            assert torch.equal(value, b.state[q][key]) and value.dtype == b.state[q][key].dtype


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("gradient", ["zero", "rank one", "parallel", "one row", "tiny", "huge"])
def test_degenerate_gradients(kind, dtype, shape, gradient):
    p = parameter(*shape, dtype=dtype)
    before = p.detach().clone()
    G = {
        "zero": torch.zeros(shape),
        "rank one": torch.outer(torch.arange(1.0, shape[0] + 1), torch.arange(1.0, shape[1] + 1)),
        "parallel": before.float(),
        "one row": torch.zeros(shape).index_fill(0, torch.tensor([0]), 1.0),
        "tiny": 1e-12 * torch.randn(shape, generator=torch.Generator().manual_seed(1)),
        "huge": 1e12 * torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    }[gradient]
    optimizer = kind([p], lr=0.01)
    for _ in range(12):  # over a refinement of SOAP
        p.grad = G.to(dtype)
        optimizer.step()
    assert p.isfinite().all() and all(value.isfinite().all() for value in optimizer.state[p].values())
    assert p.dtype == dtype
    if gradient == "zero" and optimizer.defaults["weight_decay"] == 0:
        torch.testing.assert_close(p.detach(), before)


@settings(max_examples=40)
@given(st.sampled_from(EVERY), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99), st.integers(-12, 0))
def test_ill_conditioned_gradients_and_driving_to_zero(kind, m, n, seed, exponent):
    p = parameter(m, n, seed=seed)
    optimizer = kind([p], lr=0.3)
    scales = 10.0 ** torch.linspace(exponent, 0, m)
    for _ in range(8):
        p.grad = scales[:, None] * p.detach()  # towards 0 and past it
        optimizer.step()
    assert p.isfinite().all()
    if "magnitude" in optimizer.state[p]:
        torch.testing.assert_close(p.detach().norm(dim=1), optimizer.state[p]["magnitude"].abs(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_bfloat16_parameters_follow_float32_ones(kind, options):
    p = parameter(16, 24, dtype=torch.bfloat16)
    q = torch.nn.Parameter(p.detach().float())
    start = q.detach().clone()
    generator = torch.Generator().manual_seed(1)
    if kind in (Muon, Muown, NorMuon, NorMuown):
        options = options | {"ns_dtype": "float32"}
    optimizers = [kind([w], lr=0.1, **options) for w in (p, q)]
    for _ in range(4):
        p.grad = torch.randn(16, 24, generator=generator).bfloat16()
        q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert (p.float() - q).norm() < 0.2 * (q - start).norm()
    dtypes = {key: value.dtype for key, value in optimizers[0].state[p].items()}
    for key, dtype in dtypes.items():  # only momenta are kept in the dtype of the parameter
        lion_or_momentum = key == "momentum_buffer" or kind is Lion
        assert dtype == (torch.bfloat16 if lion_or_momentum else torch.float32), key


@pytest.mark.parametrize("kind, options", VARIANTS)
@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_through_json(kind, options, done, dtype):
    one, two = (kind([("w", parameter(6, 5, dtype=dtype))], lr=0.05, **options) for _ in range(2))
    steps(one, range(done))
    for p, q in zip(parameters_of(one), parameters_of(two), strict=True):
        q.data.copy_(p.data)
    saved = one.state_dict()
    groups = json.loads(json.dumps(saved["param_groups"]))  # as a checkpoint without pickle keeps options
    two.load_state_dict({"state": copy.deepcopy(saved["state"]), "param_groups": groups})
    same(one, two)
    steps(one, range(done, done + 4)), steps(two, range(done, done + 4))
    same(one, two)


@pytest.mark.parametrize("kind, options", VARIANTS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_continue_identically(kind, options, again):
    optimizer = kind([parameter(4, 6)], lr=0.05, **options)
    steps(optimizer, range(2))
    other = again(optimizer)
    steps(optimizer, [7, 8]), steps(other, [7, 8])
    same(optimizer, other)
    assert next(iter(optimizer.state)) is not next(iter(other.state))


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_state_is_created_at_the_first_step_with_a_gradient(kind, options):
    p, q = parameter(4, 6), parameter(4, 6, seed=1)
    optimizer, before = kind([p, q], **options), q.detach().clone()
    assert not optimizer.state
    p.grad = torch.ones(4, 6)
    optimizer.step()
    shapes = {key: (value.shape, value.dtype) for key, value in optimizer.state[p].items()}
    for _ in range(2):
        optimizer.step()
    assert {key: (value.shape, value.dtype) for key, value in optimizer.state[p].items()} == shapes
    assert torch.equal(q, before) and q not in optimizer.state
    on_meta = optimizer.create_state(p.detach().to("meta"), optimizer.param_groups[0])
    assert {key: (value.shape, value.dtype) for key, value in on_meta.items()} == shapes


@each
def test_every_argument_is_an_option_of_groups(kind):
    defaults = kind([parameter(4, 6)]).param_groups[0]
    arguments = dict(inspect.signature(kind).parameters)
    assert arguments.pop("params").default is inspect.Parameter.empty
    for name, argument in arguments.items():
        assert defaults[name] == argument.default, name


@each
def test_schedulers_and_tensor_lr(kind):
    scheduled, by_hand = kind([parameter(4, 6)], lr=0.1), kind([parameter(4, 6)], lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1 / (1 + step))
    for i in range(4):
        by_hand.param_groups[0]["lr"].fill_(0.1 / (1 + i))
        [p], [q] = steps(scheduled, [i]), steps(by_hand, [i])
        scheduler.step()
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@each
def test_closure(kind):
    p = parameter(4, 6)
    optimizer, calls = kind([p], lr=0.01), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert calls == [True] * 4 and losses[-1] < losses[0] and optimizer.step() is None


@each
def test_grad_scaler_leaves_out_a_step_that_is_not_finite(kind):
    p, q = parameter(4, 6), parameter(4, 6)
    scaled, plain = kind([p], lr=0.01), kind([q], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (float("inf"), 1.0, 2.0):
        scaler.scale(factor * (p**3).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        if factor < float("inf"):
            (factor * (q**3).sum()).backward()
            plain.step()
            plain.zero_grad()
    torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@each
def test_gradients_are_only_read(kind):
    p = parameter(4, 6)
    optimizer = kind([p], lr=0.01)
    for _ in range(2):
        p.grad = torch.randn(4, 6)
        grad, before = p.grad, p.grad.clone()
        optimizer.step()
        assert p.grad is grad and torch.equal(grad, before)


@each
def test_groups_added_later(kind):
    p, q = parameter(4, 6), parameter(6, 3)
    optimizer = kind([("v", p)], lr=0.1)
    optimizer.add_param_group({"params": [("u", q)], "lr": 0.0, "magnitude_lr": 0.0})
    before = q.detach().clone()
    steps(optimizer, [0, 1])
    assert optimizer.state[q].keys() == optimizer.state[p].keys()
    assert torch.equal(q.detach(), before)
    with pytest.raises(ValueError, match=r"'w'.*complex64"):
        optimizer.add_param_group({"params": [("w", torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))]})
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [("w", parameter(2, 2))], "lr": -1})
    assert len(optimizer.param_groups) == 2 == len(optimizer.state)
    steps(optimizer, [2])


@each
@pytest.mark.parametrize("key, value", [("lr", -0.1), ("lr", float("nan")), ("lr", "fast"), ("weight_decay", -1.0)])
def test_invalid_hyperparameters(kind, key, value):
    with pytest.raises(ValueError, match=f"{key}.*{value}"):
        kind([{"params": [parameter(2, 3)], key: value}])


@each
def test_sparse_gradients_are_refused_before_anything_moves(kind):
    p, q = parameter(4, 6), parameter(4, 6, seed=1)
    optimizer, before = kind([("fine", p), ("lookup", q)]), p.detach().clone()
    p.grad, q.grad = torch.ones(4, 6), torch.ones(4, 6).to_sparse()
    with pytest.raises(ValueError, match=r"'lookup'.*dense"):
        optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state


@each
def test_a_parameter_has_one_owner(kind):
    p = parameter(2, 3)
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        kind([p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        kind([{"params": [p]}, {"params": [p]}])


@pytest.mark.parametrize("kind", MATRIX)
def test_only_matrices(kind):
    for shape in ((3,), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"'w'.*2-D"):
            kind([("w", parameter(*shape))])


@each
def test_state_that_does_not_fit_is_refused(kind):
    optimizer = kind([("w", parameter(4, 6))])

    def save(kind, *shapes):
        saved = kind([parameter(*shape) for shape in shapes])
        steps(saved, [0])
        return saved.state_dict()

    with pytest.raises(ValueError, match=r"'w'.*shape"):
        optimizer.load_state_dict(save(kind, (5, 6)))
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters"):
        optimizer.load_state_dict(save(kind, (4, 6), (4, 6)))
    other = Lion if kind is not Lion else SOAP
    with pytest.raises(ValueError, match=r"'w'.*exp_avg"):
        optimizer.load_state_dict(save(other, (4, 6)))


@pytest.mark.parametrize("kind", MATRIX)
@pytest.mark.parametrize("blocks", [(4, 4, 4), (2, 7, 3)])
def test_blocks_are_separate_matrices(kind, blocks):
    fused = parameter(12, 5)
    apart = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(list(blocks))]
    options = {} if kind is MuownSign else {"ns_dtype": "float64"}
    one, many = kind([{"params": [fused], "blocks": blocks}], lr=0.03, **options), kind(apart, lr=0.03, **options)
    for seed in range(4):
        fused.grad = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))
        for p, G in zip(apart, fused.grad.split(list(blocks)), strict=True):
            p.grad = G.clone()
        one.step(), many.step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in apart]), rtol=1e-4, atol=1e-5)
