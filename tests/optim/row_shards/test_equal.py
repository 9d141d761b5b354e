"""Steps on DTensors against steps of one process: equal bit for bit, but for sums over ranks and bfloat16."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muown_train.optim import Muon, Muown, MuownSign, NorMuon, NorMuown
from tests.helpers.ranks import on_ranks
from tests.optim.row_shards.cases import (
    build,
    compare,
    list_options,
    make_mesh,
    measure_difference,
    set_gradients,
    set_rows_to_zero,
    shard_model,
    take_step,
)

LONG = pytest.mark.long
ZEROS = {"zero_rows": 0.5, "change": set_rows_to_zero}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (Muown, {}),
    "signum": (Muown, {"magnitude": "signum"}),
    "fixed": (Muown, {"magnitude": "fixed", "nesterov": False}),
    "decay": (Muown, {"weight_decay": 0.1}),
    "zero rows": (Muown, ZEROS),
    "skipped": (Muown, {"flagged": True}),
    "row norm schedule": (Muown, {"row_norm_schedule": (2.0, 4, 1.2)}),
    "svd": (Muown, {"orthogonalizer": "svd"}),
    "polar express": (Muown, {"orthogonalizer": "polar_express"}),
    "muon": (Muon, {"weight_decay": 0.1}),
    "sign": (MuownSign, {}),
    "normuon": (NorMuon, {}),
    "normuown": (NorMuown, {"flagged": True}),
}
DTYPES = {"float64": (torch.float64, None), "float32": (torch.float32, "float32"), "bf16": (torch.float32, "bfloat16")}
# The Frobenius norms of NorMuon are sums over ranks. In bfloat16 the norm of X is that of the rounded rows, and
# Newton-Schulz turns rounding into some per cent of a step of 0.2 sqrt(50) 0.01.
LIMITS = {"normuon": 1e-6, "normuown": 1e-5}
LIMIT_OF_BFLOAT16 = 1e-2


def find_differences(world, hsdp, names):
    """Return the cases of which the weights or the state differ by more than they may."""
    mesh = make_mesh(world.size, hsdp)
    found = {}
    for name in names:
        kind, options = CASES[name]
        for key, (dtype, ns_dtype) in DTYPES.items():
            if name == "zero rows" and key == "bf16":
                continue  # the direction of a row that begins at zero is that of one gradient alone
            difference = compare(mesh, kind, dtype, **list_options(kind, ns_dtype), **options)
            if difference > (LIMIT_OF_BFLOAT16 if key == "bf16" else LIMITS.get(name, 0.0)):
                found[name, key] = difference
    return found


def test_a_few_cases_equal_one_process():
    for found in on_ranks(2, find_differences, False, ["skipped"]):
        assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "hsdp"), [(1, False), (2, False), pytest.param(3, False, marks=LONG), (4, False), (4, True)]
)
def test_every_case_equals_one_process(size, hsdp):
    for found in on_ranks(size, find_differences, hsdp, list(CASES)):
        assert found == {}


class Drawn(nn.Module):
    """Linear layers with given row blocks and numbers of columns."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        for i, (blocks, n) in enumerate(layers):
            layer = nn.Linear(n, sum(blocks), bias=False, dtype=torch.float64)
            layer.row_blocks = blocks
            self.add_module(f"layer_{i}", layer)


LAYERS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.integers(1, 9)), min_size=1, max_size=4
)


def draw_models(world):
    mesh = make_mesh(world.size)
    count = 0

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)  # so all ranks draw the same
    @given(LAYERS, st.sampled_from([Muown, Muon]))
    def check(layers, kind):
        nonlocal count
        count += 1
        model, sharded = Drawn(layers), shard_model(Drawn(layers), mesh)
        # svd treats each matrix on its own, whatever is stacked
        options = {"orthogonalizer": "svd"} if kind is Muown else {}
        optimizers = [build(kind, each, **options) for each in (model, sharded)]
        for step in range(2):
            set_gradients(model, sharded, step)
            for optimizer in optimizers:
                take_step(optimizer, step)
        assert measure_difference(model, optimizers[0], sharded, optimizers[1]) <= 1e-15

    check()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=LONG), 4])
def test_any_shapes_and_blocks_equal_one_process(size):
    assert min(on_ranks(size, draw_models)) >= 50


def compile_steps(world, kind):
    mesh = make_mesh(world.size)
    options = {"ns_dtype": "float32", "flagged": True, "compiled": True}
    return compare(mesh, kind, torch.float32, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)  # ranks trace every shape of rows on what may be two busy cores
@pytest.mark.parametrize("kind", [Muown, pytest.param(NorMuown, marks=LONG)])
def test_compiled_steps_take_shards_of_any_number_of_rows(kind):
    assert max(on_ranks(2, compile_steps, kind)) < 1e-5
