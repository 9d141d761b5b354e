"""The cost of a step, by which `shard` balances ranks and a plan tells the time, is what torch really counts."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from muown_train.optim import SOAP, Muon, Muown, NorMuon, soap
from muown_train.optim.sharding import FLOPS_PER_BYTE, estimate_step_cost

# with and without a Gram matrix, wide, tall and square, and one of three blocks
SHAPES = ((48, 32), (32, 80), (96, 32), (64, 64))


def make_parameters(*shapes: tuple[int, int]) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def count_products(step, steps: int = 1) -> float:
    """Return the operations of a step that torch counts, the mean over some steps."""
    with FlopCounterMode(display=False) as counter:
        for _ in range(steps):
            step()
    return counter.get_total_flops() / steps


def sum_costs(optimizer: torch.optim.Optimizer) -> int:
    """Return the estimated operations of products."""
    return sum(
        estimate_step_cost(p, group) - FLOPS_PER_BYTE * p.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
    )


@pytest.mark.parametrize(
    "make",
    [
        Muown,
        Muon,
        NorMuon,
        partial(Muon, ns_steps=1),
        partial(Muon, ns_steps=7),
        partial(Muown, orthogonalizer="polar_express", ns_steps=4),
        torch.optim.Muon,
    ],
    ids=["Muown", "Muon", "NorMuon", "1 step", "7 steps", "Polar Express", "torch.optim.Muon"],
)
def test_products_of_an_orthogonalised_step(make):
    groups = [{"params": make_parameters(*SHAPES)}]
    if make is not torch.optim.Muon:
        groups.append({"params": make_parameters((96, 32)), "blocks": (32, 32, 32)})
    optimizer = make(groups)
    assert sum_costs(optimizer) == count_products(optimizer.step) > 0


def test_products_of_soap(monkeypatch):
    monkeypatch.setattr(soap, "QR_SLOWDOWN", 0)  # torch does not count a QR decomposition
    optimizer = SOAP(make_parameters(*SHAPES), precondition_frequency=3, max_precondition_dim=90)
    optimizer.step()  # initialises
    assert sum_costs(optimizer) == pytest.approx(count_products(optimizer.step, 3), abs=len(SHAPES))
