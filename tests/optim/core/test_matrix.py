"""The shared step of Muon and Muown: blocks, batches, state, and error messages."""

import copy

import pytest
import torch

from muown_train.optim import Muon, Muown
from muown_train.optim.core import blocks
from muown_train.runtime.benchmark import measure_peak_memory

BOTH = pytest.mark.parametrize("kind", [Muon, Muown])


def exact(kind):
    """Return options with which results do not depend on how matrices are batched."""
    return {"orthogonalizer": "svd"} if kind is Muown else {"ns_dtype": "float64"}


def parameter(m, n, seed=0, dtype=torch.float64):
    return torch.nn.Parameter(torch.randn(m, n, dtype=dtype, generator=torch.Generator().manual_seed(seed)))


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


def steps(optimizer, seeds):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for seed in seeds:
        set_gradients(parameters, seed)
        optimizer.step()
    return parameters


def same_state(a, b):
    for p, q in zip(a.state.values(), b.state.values(), strict=True):
        assert p.keys() == q.keys()
        assert all(torch.equal(p[k], q[k]) and p[k].dtype == q[k].dtype for k in p)


@pytest.mark.parametrize("blocks", [(4, 4, 4), (2, 7, 3), (12,), [6, 6]])
@pytest.mark.parametrize("magnitude", ["adam", "signum", "fixed"])
def test_blocks_are_separate_matrices_bit_for_bit(blocks, magnitude):
    fused = parameter(12, 5)
    apart = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(list(blocks))]
    options = {"lr": 0.03, "weight_decay": 0.1, "magnitude": magnitude, "orthogonalizer": "svd"}
    one, many = Muown([{"params": [fused], "blocks": blocks}], **options), Muown(apart, **options)
    for seed in range(5):
        set_gradients([fused], seed)
        for p, G in zip(apart, fused.grad.split(list(blocks)), strict=True):
            p.grad = G.clone()
        one.step()
        many.step()
    assert torch.equal(fused.detach(), torch.cat([p.detach() for p in apart]))
    for key, value in one.state[fused].items():
        if key != "step":
            assert torch.equal(value, torch.cat([many.state[p][key] for p in apart]))


@BOTH
def test_the_bound_on_batches_does_not_change_results(kind, monkeypatch):
    shapes = [(4, 6), (6, 4), (4, 6), (4, 6), (4, 6)]
    results = []
    for bound in (2**21, 2 * 24, 1):
        monkeypatch.setitem(blocks.LIMITS, "cpu", blocks.LIMITS["cpu"]._replace(batch=bound))
        parameters = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
        steps(kind(parameters, lr=0.1, **exact(kind)), range(3))
        results.append([p.detach() for p in parameters])
    for others in results[1:]:
        for p, q in zip(results[0], others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_a_batch_is_bounded(monkeypatch):
    monkeypatch.setitem(blocks.LIMITS, "cpu", blocks.LIMITS["cpu"]._replace(batch=2 * 24))
    seen = []

    def identity(X):
        seen.append(tuple(X.shape))
        return X

    optimizer = Muown([parameter(4, 6, seed=i) for i in range(5)], orthogonalizer=identity)
    steps(optimizer, [0])
    assert seen == [(2, 4, 6), (2, 4, 6), (1, 4, 6)]


def test_groups_with_and_without_reparameterization_share_a_batch():
    apart = []
    for which in ([0], [1], [0, 1]):
        pair = [parameter(4, 6, dtype=torch.bfloat16), parameter(4, 6, seed=1, dtype=torch.bfloat16)]
        groups = [{"params": [pair[0]]}, {"params": [pair[1]], "reparameterize": False}]
        optimizer = Muown([groups[i] for i in which], lr=0.1, nesterov=False, orthogonalizer="svd")
        for p in pair:
            p.grad = p.detach().flip(0)
        optimizer.step()
        apart.append(pair)
    torch.testing.assert_close(apart[2][0], apart[0][0])
    torch.testing.assert_close(apart[2][1], apart[1][1])


@BOTH
def test_the_shapes_of_state(kind):
    p = parameter(4, 6)
    optimizer = kind([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[p].items()}
    assert shapes.pop("step") == () and shapes["momentum_buffer"] == (4, 6)
    assert set(shapes.values()) <= {(4, 6), (4,)}
    assert optimizer.state[p]["step"].dtype == torch.float32 and optimizer.state[p]["step"] == 1


@BOTH
@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_dict_round_trip(kind, done, dtype):
    def make():
        p = parameter(6, 5, dtype=dtype)
        return kind([{"params": [p], "blocks": (2, 4)}], lr=0.05, weight_decay=0.1)

    one, two = make(), make()
    steps(one, range(done))
    state = copy.deepcopy(one.state_dict())
    two.load_state_dict(one.state_dict())
    for p, q in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        q.data.copy_(p.data)
    same_state(one, two)
    [p], [q] = steps(one, range(done, done + 3)), steps(two, range(done, done + 3))
    assert torch.equal(p, q)
    same_state(one, two)
    assert one.param_groups[0].keys() == two.param_groups[0].keys()
    assert not done or state["state"][0]["step"] == done  # loading and stepping did not touch what was saved


def test_state_that_does_not_fit_is_refused():
    def muown(m=4, **options):
        optimizer = Muown([("w", parameter(m, 6))], **options)
        steps(optimizer, [0])
        return optimizer

    with pytest.raises(ValueError, match=r"'w'.*magnitude_exp_avg_sq"):
        muown().load_state_dict(muown(magnitude="signum").state_dict())
    with pytest.raises(ValueError, match=r"'w'.*momentum_buffer has shape \(5, 6\), not \(4, 6\)"):
        muown().load_state_dict(muown(5).state_dict())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this one of \[2\]"):
        Muown([parameter(4, 6), parameter(4, 6)]).load_state_dict(muown().state_dict())


@BOTH
def test_strided_parameters(kind):
    p = parameter(6, 4)
    q = torch.nn.Parameter(p.detach().T.contiguous().T)
    assert not q.is_contiguous()
    a, b = kind([p], lr=0.1), kind([q], lr=0.1)
    steps(a, range(3)), steps(b, range(3))
    torch.testing.assert_close(p, q)


@BOTH
@pytest.mark.parametrize(
    "weight, message",
    [
        (torch.randn(3), "2-D parameters, got 1-D"),
        (torch.randn(2, 3, 4), "2-D parameters, got 3-D"),
        (torch.randn(2, 3, dtype=torch.complex64), "complex64"),
        (torch.ones(2, 3, dtype=torch.int64), "int64"),
        (torch.randn(0, 3), r"shape \(0, 3\)"),
    ],
)
def test_invalid_parameters(kind, weight, message):
    weight = torch.nn.Parameter(weight, requires_grad=weight.is_floating_point())
    with pytest.raises(ValueError, match="'blocks.0.w'.*" + message):
        kind([("blocks.0.w", weight)])
    with pytest.raises(ValueError, match="parameter 1 of group 0.*" + message):
        kind([parameter(2, 2), weight])


@BOTH
@pytest.mark.parametrize("blocks", [(4, 4), (4, 4, 5), (12, 0), (13, -1), (6.0, 6.0), (), 12, "12", (True, 11)])
def test_invalid_blocks(kind, blocks):
    with pytest.raises(ValueError, match=r"'qkv'.*blocks.* 12 rows"):
        kind([{"params": [("qkv", parameter(12, 5))], "blocks": blocks}])


SHARED = [
    ("lr", -0.1), ("lr", float("nan")), ("lr", float("inf")), ("lr", "0.1"), ("lr", None), ("lr", True),
    ("lr", torch.tensor([0.1, 0.2])), ("lr", torch.tensor(-0.1)), ("weight_decay", -1),
    ("weight_decay", None), ("momentum", 1.0), ("momentum", -0.1), ("momentum", "high"),
    ("eps", 0.0), ("eps", -1e-7), ("nesterov", "yes"), ("ns_steps", 0), ("ns_steps", 100),
    ("ns_steps", 2.5), ("ns_steps", True),
    ("ns_coefficients", (1.0, 2.0)), ("ns_coefficients", "abc"),
    ("ns_coefficients", (1.0, 2.0, float("nan"))), ("adjust_lr_fn", "match_rms"),
    ("ns_dtype", "float8"), ("ns_dtype", torch.int8),
]  # fmt: skip
OWN = [
    ("betas", (0.9,)), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("betas", 0.9), ("adam_eps", 0),
    ("magnitude", "lion"), ("orthogonalizer", "qr"), ("orthogonalizer", 3), ("zero_rows", "ignore"),
    ("zero_rows", 0.0), ("zero_rows", -1.0), ("reparameterize", "no"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, key, value", [(k, *o) for k in (Muon, Muown) for o in SHARED] + [(Muown, *o) for o in OWN]
)
def test_invalid_options(kind, key, value):
    with pytest.raises(ValueError, match=key):
        kind([{"params": [parameter(2, 3)], key: value}])


def test_choices_are_listed():
    with pytest.raises(ValueError, match="'adam', 'signum', 'fixed', got 'lion'"):
        Muown([parameter(2, 3)], magnitude="lion")
    with pytest.raises(ValueError, match="'newton_schulz', 'polar_express', 'svd' or a callable, got 'qr'"):
        Muown([parameter(2, 3)], orthogonalizer="qr")


@BOTH
@pytest.mark.slow
def test_the_extra_memory_of_a_step_does_not_grow_with_the_number_of_matrices(kind, monkeypatch):
    monkeypatch.setitem(blocks.LIMITS, "cpu", blocks.LIMITS["cpu"]._replace(batch=4 * 64 * 64))
    few, many = (kind([parameter(64, 64, dtype=torch.float32) for _ in range(k)], ns_dtype="float32") for k in (4, 32))
    batch = 4 * 64 * 64 * 4  # bytes
    assert extra_memory(few) < 6 * batch
    assert extra_memory(many) < 1.1 * extra_memory(few)


def extra_memory(optimizer):
    """Return the peak memory of a step beyond what was allocated before, in bytes."""
    steps(optimizer, [0])
    most = measure_peak_memory(optimizer.step, "cpu")
    assert most > 0
    return most
