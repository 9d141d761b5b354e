"""A model of awkward matrices, sharded by FSDP2 or HSDP, and what compares its steps with those of one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muown_train.models.gpt import FusedLinear
from muown_train.optim import MuownSign, param_groups
from muown_train.optim.row_shards.placement import get_local, take_own_rows

STEPS = 5


class Matrices(nn.Module):
    """Blocks that cross the borders of shards, fewer rows than ranks, one column, a convolution, equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = FusedLinear(20, (20, 20, 20))
        self.grouped = FusedLinear(20, (20, 7, 7))
        self.up = nn.Linear(20, 50, bias=False)
        self.down = nn.Linear(50, 20, bias=False)
        self.few = nn.Linear(20, 2, bias=False)
        self.column = nn.Linear(1, 9, bias=False)
        self.square = nn.Linear(20, 20, bias=False)
        self.conv = nn.Conv2d(3, 10, 3, bias=False)


def make_matrices(dtype: torch.dtype = torch.float32) -> Matrices:
    torch.manual_seed(0)
    return Matrices().to(dtype)


def make_mesh(size: int, hsdp: bool = False) -> DeviceMesh:
    if hsdp:
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (size,))


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def set_gradients(model: nn.Module, sharded: nn.Module, step: int) -> None:
    """Give both models the same gradients."""
    torch.manual_seed(100 + step)
    for q, p in zip(model.parameters(), sharded.parameters(), strict=True):
        q.grad = torch.randn(q.shape, dtype=torch.float64).to(q.dtype)
        assert isinstance(p, DTensor)
        p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)


def build(kind: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    groups = param_groups(model, conv="matrix")[0]
    optimizer: torch.optim.Optimizer = kind(groups, lr=1e-2, **options)
    return optimizer


def take_step(optimizer: torch.optim.Optimizer, step: int, skipped: bool | None = None) -> None:
    """Take a step with a learning rate of its own; `skipped` sets `found_inf`."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (1 - step / 10)
    if skipped is not None:
        optimizer.found_inf = torch.tensor(float(skipped))
    optimizer.step()


def measure_difference(
    model: nn.Module, optimizer: torch.optim.Optimizer, sharded: nn.Module, other: torch.optim.Optimizer
) -> float:
    """Return the largest difference in weights and state between one process and the rows that this rank has."""
    differences = [0.0]
    for q, p in zip(model.parameters(), sharded.parameters(), strict=True):
        assert optimizer.state[q].keys() == other.state[p].keys()
        pairs = [(q, p), *((value, other.state[p][key]) for key, value in optimizer.state[q].items())]
        for whole, rows in pairs:
            expected = take_own_rows(whole.detach(), rows.detach())
            assert rows.ndim == 0 or rows.shape == whole.shape
            differences += (get_local(rows.detach()) - expected).abs().flatten().tolist()
    return max(differences)


def compare(
    mesh: DeviceMesh,
    kind: Any,
    dtype: torch.dtype,
    flagged: bool = False,
    change: Callable[[Matrices], None] = lambda model: None,
    compiled: bool = False,
    **options: Any,
) -> float:
    """Return the largest difference after some steps of an optimizer, of which one is skipped if `flagged`."""
    model, sharded = make_matrices(dtype), make_matrices(dtype)
    change(model), change(sharded)
    shard_model(sharded, mesh)
    optimizers = [build(kind, each, **options) for each in (model, sharded)]
    if compiled:
        optimizers[1].compile(backend="eager")  # what is traced runs as it is: generating code takes minutes
    for step in range(STEPS):
        set_gradients(model, sharded, step)
        for optimizer in optimizers:
            take_step(optimizer, step, step == 2 if flagged else None)
    return measure_difference(model, optimizers[0], sharded, optimizers[1])


@torch.no_grad()
def set_rows_to_zero(model: Matrices) -> None:
    model.up.weight[30:].zero_()
    model.few.weight.zero_()


def list_options(kind: Any, ns_dtype: str | None) -> dict[str, Any]:
    return {} if kind is MuownSign else {"ns_dtype": ns_dtype}
