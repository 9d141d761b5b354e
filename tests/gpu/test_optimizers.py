"""Optimizers on a GPU: the golden trajectories, compiled steps, skipped steps, and no wait for the device."""

import copy

import pytest
import torch

from muown_train.optim import Combined, Lion, Muon, Muown, NorMuon, NorMuown
from muown_train.optim.core.orthogonalize import newton_schulz, polar_express
from muown_train.optim.core.skip_step import can_skip_on_device, step_or_skip
from tests.optim.shared.test_golden import CASES, make, tensors, tolerance

pytestmark = pytest.mark.gpu
assert tensors  # the fixture of the golden trajectories

SHAPES = [(96, 64), (64, 64), (32, 64), (64, 32)]  # the first is fused of three
BAD = {2, 3, 6}  # steps whose gradients are not finite


def matrices(device):
    torch.manual_seed(0)
    first, *rest = (torch.nn.Parameter((0.1 * torch.randn(shape)).to(device)) for shape in SHAPES)
    return [{"params": [first], "blocks": (32, 32, 32)}, {"params": rest}]


def vectors(device):
    return [torch.nn.Parameter(torch.ones(5, device=device)), torch.nn.Parameter(torch.tensor(2.0, device=device))]


KINDS = {
    "muown": lambda device: Muown(matrices(device), lr=0.05),
    "muown, weight decay": lambda device: Muown(matrices(device), lr=0.05, weight_decay=0.1),
    "muown, polar express": lambda device: Muown(matrices(device), lr=0.05, orthogonalizer="polar_express"),
    "muon": lambda device: Muon(matrices(device), lr=0.05),
    "normuon": lambda device: NorMuon(matrices(device), lr=0.05),
    "normuown": lambda device: NorMuown(matrices(device), lr=0.05),
    "lion": lambda device: Lion(vectors(device), lr=0.05, weight_decay=0.1),
    "combined": lambda device: Combined(
        Muown(matrices(device), lr=0.05), torch.optim.AdamW(vectors(device), lr=0.05, fused=True)
    ),
}
COMPILED = ("muown", "muown, weight decay", "muon", "normuon")


def list_parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer, number):
    # other numbers than those of the weights: a gradient along W has no part along R but rounding
    generator = torch.Generator().manual_seed(1000 + number)
    for p in list_parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def run(optimizer, steps, skipped=()):
    """Take steps as the trainer does: under a flag on the device that says whether the step is skipped."""
    for number in steps:
        set_gradients(optimizer, number)
        if number in skipped:
            list_parameters(optimizer)[0].grad.view(-1)[3] = torch.nan
        bad = [~p.grad.isfinite().all() for p in list_parameters(optimizer)]
        step_or_skip(optimizer, torch.stack(bad).any().float())
    return list_parameters(optimizer)


@pytest.mark.parametrize("precision", ["as stored", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_golden_trajectory(name, precision, tensors, device):
    """Agreement is as on a CPU; trajectories of float64, computed in float32, agree to its accuracy."""
    case = CASES[name]
    w0, grads, lrs, weights = (tensors[f"{name}/{key}"] for key in ("w0", "grads", "lr", "weights"))
    allowed = tolerance(case)
    if precision == "float32":
        if w0.dtype == torch.float32:
            pytest.skip("it is stored in float32")
        w0, grads, weights, allowed = w0.float(), grads.float(), weights.float(), 2e-4
    parameter, optimizer = make(case, w0.to(device))
    if precision == "float32" and "ns_dtype" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["ns_dtype"] = "float32"
    expected = dict(zip(case["weights_after"], weights.to(device), strict=True))
    for i, (G, lr) in enumerate(zip(grads.to(device), lrs.tolist(), strict=True), start=1):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = G.clone()
        optimizer.step()
        if i in expected:
            error, change = (parameter - expected[i]).norm(), (expected[i] - w0.to(device)).norm()
            assert error <= max(allowed, 1e-7 if device.type == "cuda" else 0) * change


@pytest.mark.parametrize("shape", [(3, 128, 128), (2, 384, 128), (2, 96, 256)])
@pytest.mark.parametrize("iterate", [newton_schulz, polar_express])
def test_orthogonalizers_equal_those_of_the_cpu(iterate, shape, device):
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    reference = iterate(X.double())
    for dtype, allowed in (("float32", 1e-4), ("bfloat16", 0.05)):
        O = iterate(X.to(device), dtype=dtype).cpu().double()  # noqa: E741
        assert (O - reference).norm() <= allowed * reference.norm(), dtype


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_steps_equal_eager_ones(kind, device):
    eager, compiled = KINDS[kind](device), KINDS[kind](device)
    for group in eager.param_groups + compiled.param_groups:
        group["ns_dtype"] = "float32"
    torch._dynamo.reset()
    compiled.compile()
    for p, q in zip(run(eager, range(6), {3}), run(compiled, range(6), {3}), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_steps_leave_no_trace(kind, device):
    skipping, plain = KINDS[kind](device), KINDS[kind](device)
    assert can_skip_on_device(skipping)
    run(skipping, range(8), BAD)
    run(plain, [number for number in range(8) if number not in BAD])
    for p, q in zip(list_parameters(skipping), list_parameters(plain), strict=True):
        assert torch.equal(p, q) and p.isfinite().all()
        for key, value in plain.state[q].items():
            assert torch.equal(skipping.state[p][key].cpu(), value.cpu()), key


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_device(kind, compiled, device, forbid_sync):
    if compiled and kind not in COMPILED:
        pytest.skip("one kind of compiled step is like another")
    optimizer, found_inf = KINDS[kind](device), torch.zeros((), device=device)
    if compiled:
        torch._dynamo.reset()
        optimizer.compile()
    run(optimizer, range(3))
    set_gradients(optimizer, 3)
    before = copy.deepcopy([p.detach() for p in list_parameters(optimizer)])
    with forbid_sync():
        step_or_skip(optimizer, found_inf)
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] *= 0.9
        step_or_skip(optimizer, found_inf)
    assert not any(map(torch.equal, before, list_parameters(optimizer)))
