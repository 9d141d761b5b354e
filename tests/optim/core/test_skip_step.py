"""Steps skipped on the device: everything is as if the host had skipped them."""

import copy
import math
import shutil

import pytest
import torch

from muown_train.optim import SOAP, Combined, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown, shard
from muown_train.optim.core import skip_step
from muown_train.optim.core.matrix import MatrixOptimizer
from tests.helpers.ranks import on_ranks

SHAPES = [(12, 6), (4, 6), (6, 4), (4, 6)]  # the first fused of three
OF_WEIGHTS = ("magnitude", "row_norm", "magnitude_floor", "row_norm_start")  # the state that W gives
STEPS, MISSING = 9, 4  # the last parameter has no gradient in step 4
BAD = {"first": {0, 1}, "middle": {4}, "consecutive": {2, 3, 4, 7}, "all": set(range(STEPS))}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def matrices(dtype=torch.float32):
    first, *rest = parameters(dtype)
    return [{"params": [first], "blocks": (4, 4, 4)}, {"params": rest}]


def with_zero_rows():
    groups = matrices()
    groups[0]["params"][0].data[[0, 5]] = 0
    return groups


def combined(other=torch.optim.AdamW, **options):
    vectors = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.tensor(2.0))]
    return Combined(Muown(matrices(), lr=0.05), other(vectors, lr=0.05, **options))


ON_DEVICE = {
    "muown": lambda: Muown(matrices(), lr=0.05),
    "decay": lambda: Muown(matrices(), lr=0.05, weight_decay=0.1, nesterov=False),
    "signum": lambda: Muown(matrices(), lr=0.05, magnitude="signum"),
    "fixed": lambda: Muown(matrices(), lr=0.05, magnitude="fixed", orthogonalizer="polar_express"),
    "zero rows": lambda: Muown(with_zero_rows(), lr=0.05, zero_rows=0.5),
    "schedule": lambda: Muown(matrices(), lr=0.05, row_norm_schedule=(2.0, 5, 1.2)),
    "not reparameterized": lambda: Muown([g | {"reparameterize": False} for g in matrices()], lr=0.05),
    "bfloat16": lambda: Muown(matrices(torch.bfloat16), lr=0.05),
    "float64": lambda: Muown(matrices(torch.float64), lr=0.05),
    "muon": lambda: Muon(matrices(), lr=0.05, nesterov=False),
    "normuon": lambda: NorMuon(matrices(), lr=0.05),
    "normuown": lambda: NorMuown(matrices(), lr=0.05),
    "lion": lambda: Lion(parameters(), lr=0.05, weight_decay=0.1),
    "with fused adamw": lambda: combined(fused=True),
    "with lion": lambda: combined(Lion),
}
WAITING = {
    "soap": lambda: SOAP(parameters(), lr=0.05),
    "sign": lambda: MuownSign(matrices(), lr=0.05),
    "svd": lambda: Muown(matrices(), lr=0.05, orthogonalizer="svd"),
    "of the user": lambda: Muown(matrices(), lr=0.05, orthogonalizer=torch.sign),
    "with plain adamw": lambda: combined(fused=False),
    "with sgd": lambda: combined(torch.optim.SGD, fused=True, momentum=0.9),
}
CASES = ON_DEVICE | WAITING


def of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer, number, bad):
    """Take a step; the gradient of a bad one is inf or NaN in one element or in all."""
    generator = torch.Generator().manual_seed(number)
    for i, p in enumerate(of(optimizer)):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if number in bad and (i == 0 or number % 2):
            p.grad.view(-1)[0 if i == 0 else slice(None)] = math.inf if number % 3 else math.nan
        if (i, number) == (len(SHAPES) - 1, MISSING):
            p.grad = None
    skip_step.step_or_skip(optimizer, torch.tensor(float(number in bad)))


def run(make, bad, on_device, compiled=False):
    optimizer = make()
    if compiled:
        optimizer.compile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skip_step, "can_read_without_sync", lambda skip: not on_device)
        for number in range(STEPS):
            before = copy.deepcopy([p.data for p in of(optimizer)])
            step(optimizer, number, bad)
            still = [torch.equal(p, q) for p, q in zip(of(optimizer), before, strict=True)]
            assert all(still) == (number in bad) or isinstance(optimizer, SOAP), number
    return optimizer


def check_same(one, two):
    for p, q in zip(of(one), of(two), strict=True):
        assert torch.equal(p, q) and p.isfinite().all()
        for key, value in two.state[q].items() if q in two.state else ():
            assert torch.equal(one.state[p][key], value), key
        if q not in two.state:  # a step that the device skips creates the state
            assert not any(value.any() for key, value in one.state.get(p, {}).items() if key not in OF_WEIGHTS)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("case", CASES)
def test_skipping_on_the_device_equals_skipping_on_the_host(case, bad):
    assert skip_step.can_skip_on_device(CASES[case]()) == (case in ON_DEVICE)
    check_same(run(CASES[case], BAD[bad], True), run(CASES[case], BAD[bad], False))


def test_the_host_does_not_read_the_flag(monkeypatch):
    flags = []
    monkeypatch.setattr(MatrixOptimizer, "step_groups", lambda self, params, skip: flags.append(skip))
    optimizer = Muown(parameters()[:1])
    monkeypatch.setattr(skip_step, "can_read_without_sync", lambda skip: False)
    for number in range(4):
        step(optimizer, number, {0, 2})
    assert [bool(flag) for flag in flags] == [True, False, True, False]
    assert "found_inf" not in vars(optimizer)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("muown", marks=pytest.mark.slow),
        *(pytest.param(c, marks=pytest.mark.long) for c in ("decay", "muon")),
    ],
)
def test_compiled(case):
    torch._dynamo.reset()
    check_same(
        run(ON_DEVICE[case], BAD["consecutive"], True, True), run(ON_DEVICE[case], BAD["consecutive"], False, True)
    )


def test_chunks_cover_all_parameters(monkeypatch):
    monkeypatch.setattr(skip_step, "MAX_CHUNK_ELEMENTS", 30)
    shapes = [(40,), (10,), (20,), (1,), (29,), ()]
    assert [[p.numel() for p in part] for part in skip_step.split_into_chunks([torch.zeros(s) for s in shapes])] == [
        [40], [10, 20], [1, 29], [1]
    ]  # fmt: skip
    assert list(skip_step.split_into_chunks([])) == []
    check_same(run(ON_DEVICE["lion"], BAD["middle"], True), run(ON_DEVICE["lion"], BAD["middle"], False))


def sharded(world):
    both = [
        run(lambda: shard(combined(fused=True)), BAD["consecutive"] | {0}, on_device) for on_device in (True, False)
    ]
    check_same(*both)
    return [p.data for p in of(both[0])], len(both[0].state)


@pytest.mark.slow
def test_sharded():
    (weights, count), (others, other_count) = on_ranks(2, sharded)
    assert all(torch.equal(p, q) for p, q in zip(weights, others, strict=True))
    assert count and other_count and count + other_count == len(weights)


@pytest.mark.parametrize("kind", [Muown, Muon, NorMuon, NorMuown, Lion])
def test_no_step_asks_the_device_for_a_number(kind):
    """The device "meta" has no numbers to give."""
    p, skip = torch.nn.Parameter(torch.empty(12, 6, device="meta")), torch.empty((), device="meta")
    optimizer = kind([{"params": [p], "blocks": (4, 4, 4)}], lr=0.1)
    p.grad = torch.empty_like(p)
    for _ in range(3):
        skip_step.step_or_skip(optimizer, skip)
    assert kind is Lion or optimizer.state[p]["step"].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ON_DEVICE)
def test_no_step_waits_for_the_gpu(case):
    optimizer = ON_DEVICE[case]()
    for p in of(optimizer):
        p.data, p.grad = p.data.cuda(), torch.randn_like(p).cuda()
    skip_step.step_or_skip(optimizer, torch.zeros((), device="cuda"))
    flags = torch.tensor([0.0, 1.0, 0.0], device="cuda")
    before = [p.data.clone() for p in of(optimizer)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for flag in flags:
            skip_step.step_or_skip(optimizer, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(torch.equal(p, q) for p, q in zip(of(optimizer), before, strict=True))
