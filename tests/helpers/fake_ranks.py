"""Several ranks in one process: DTensors of a process group that sends nothing, and threads that save together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muown_train.optim.row_shards.placement import take_own_rows, wrap_local
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.state import ModelState, OptimizerState, Stateful, flatten, list_parts
from muown_train.runtime.distributed import World

CPU = torch.device("cpu")


class Way(NamedTuple):
    """A number of ranks, and the mesh over which they shard parameters: () for replicas."""

    size: int
    mesh: tuple[int, ...] = ()


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """Make this process one of several ranks, whose collectives return at once, in which nothing arrives."""
    from torch.distributed.tensor import DTensor, debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # what is cached holds meshes of the ranks before; torch 2.9 has no function that clears it
    in_python = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    getattr(debug, "_clear_sharding_prop_cache", in_python)()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Rows(nn.Module):
    """Parameters of given shapes with standard normal values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))


def shard_rows(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard the parameters of a model by FSDP2 over a mesh; over the last axis of one with two."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Step with gradients that are the same, as wholes, on any number of ranks, and are never sent."""
    torch.manual_seed(seed)
    for p in model.parameters():
        whole = torch.randn(p.shape)
        p.grad = wrap_local(take_own_rows(whole, p).clone(), p, p.shape) if hasattr(p, "device_mesh") else whole
    optimizer.step()
    optimizer.zero_grad()


Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_state(way: Way, shapes: Sequence[tuple[int, ...]], make: Make, seed: int) -> dict[str, Stateful]:
    """The state of a model and its optimizer after a step, on the fake rank that this process is."""
    model: nn.Module = Rows(shapes, seed)
    if way.mesh:
        from torch.distributed.device_mesh import init_device_mesh

        names = ("replicas", "rows")[-len(way.mesh) :]
        model = shard_rows(model, init_device_mesh("cpu", way.mesh, mesh_dim_names=names))
    optimizer = make(model)
    step_once(model, optimizer, seed)
    return {"model": ModelState(model), "optimizer": OptimizerState(optimizer, model)}


def list_tensors(state: dict[str, Stateful]) -> dict[Any, Tensor]:
    """Copies of all that this rank holds, by key and rows."""
    parts = list_parts(flatten({name: each.state_dict() for name, each in state.items()}))
    return {part: tensor.detach().clone() for part, tensor in parts.items()}


def join(ranks: Sequence[dict[Any, Tensor]]) -> dict[str, Tensor]:
    """The whole tensors of what ranks hold, whose replicas must agree."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for held in ranks:
        for part, tensor in held.items():
            first = part.rows[0] if part.rows else 0
            assert torch.equal(pieces.setdefault(part.key, {}).setdefault(first, tensor), tensor), part
    return {
        key: torch.cat([rows[first] for first in sorted(rows)]) if len(rows) > 1 else rows[0]
        for key, rows in pieces.items()
    }


class _Meeting:
    """Values of threads, each of which gets those of all."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=60), [None] * size
        self.arrived = [threading.Event() for _ in range(size)]  # each is set when its thread gathers first

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.arrived[rank].set()
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass(frozen=True)
class _ThreadWorld(World):
    meeting: Any = None

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = self.meeting.gather(self.rank, value)
        return gathered


def save_together(folder: Path, size: int, make: Callable[[int], dict[str, Stateful]]) -> list[dict[Any, Tensor]]:
    """Save what each fake rank makes as one checkpoint of step 1; return what each rank holds."""
    meeting, held, threads, errors = _Meeting(size), [], [], []

    def save(rank: int, state: dict[str, Stateful]) -> None:
        try:
            Checkpoints(folder, _ThreadWorld(rank, size, CPU, meeting=meeting)).save(1, state, wait=True)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    for rank in range(size):
        with fake_rank(rank, size):
            state = make(rank)
            held.append(list_tensors(state))
            threads.append(threading.Thread(target=save, args=(rank, state)))
            threads[-1].start()
            while threads[-1].is_alive() and not meeting.arrived[rank].wait(0.01):
                pass  # until then it asks which rank this process is
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return held
