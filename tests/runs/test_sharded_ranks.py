"""Checkpoints between replicas, sharded optimizers, FSDP and HSDP on ranks that talk to one another."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from muown_train.optim import Combined, Lion, Muown, param_groups, shard
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.checkpoint_files import find_fault
from muown_train.runs.state import ModelState, OptimizerState, Stateful
from muown_train.runtime.distributed import World
from tests.helpers.fake_ranks import join, list_tensors
from tests.helpers.ranks import on_ranks
from tests.runs.test_checkpoint import Part, tied_model, train

pytestmark = pytest.mark.slow

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "lion": lambda model: Lion(model.parameters(), lr=0.01),
    "muown": lambda model: Combined(
        *(kind(group, lr=0.01) for kind, group in zip((Muown, torch.optim.AdamW), param_groups(model), strict=True))
    ),
}
# how the ranks share the work, and how many there are
KINDS = [("replicas", 1), ("replicas", 2), ("sharded optimizer", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)]


def make_mesh(kind: str, part: Part) -> Any:
    """The mesh over which the ranks shard parameters; the ranks of a part must all ask for it."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if kind == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "rows"))
    return DeviceMesh.from_group(part.group, "cpu", mesh_dim_names=("rows",)) if kind == "fsdp" else None


def make_trained(
    kind: str, part: Part, name: str, steps: int
) -> tuple[dict[str, Stateful], nn.Module, torch.optim.Optimizer]:
    """The state of a model that has trained, and been evaluated since, as the trainer would ask for it."""
    model: nn.Module = tied_model()
    if mesh := make_mesh(kind, part):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = OPTIMIZERS[name](model)
    if kind == "sharded optimizer":
        shard(optimizer, part.group)
    train(model, optimizer, steps)
    with torch.no_grad():
        model(torch.arange(7))
    return {"m": ModelState(model), "o": OptimizerState(optimizer, model)}, model, optimizer


def unite(part: Part, state: dict[str, Stateful]) -> dict[str, Tensor]:
    """All that the ranks hold, as whole tensors, which are copied into this process."""
    return join(part.gather(list_tensors(state)))


def exchange(world: World, folder: Path, name: str) -> tuple[int, list[str]]:
    """Save in each way, load in each way; return how often a rank loaded, and where something differed."""
    parts = {n: Part(world.rank, n, world.device, group=dist.new_group(range(n))) for n in (1, 2, 3, 4)}
    expected, wrong, loaded = {}, [], 0
    for kind, n in KINDS:
        if world.rank < n:
            state, _, _ = make_trained(kind, parts[n], name, steps=3)
            expected[kind, n] = unite(parts[n], state)
            Checkpoints(folder / f"{kind}{n}", parts[n]).save(3, state, wait=True)
        dist.barrier()
    wholes = world.gather(expected)[0]
    for source, whole in wholes.items():
        path = folder / f"{source[0]}{source[1]}"
        for kind, n in KINDS:
            if world.rank < n:
                state, model, optimizer = make_trained(kind, parts[n], name, steps=1)
                found_step = Checkpoints(path, parts[n]).load(state)
                found = unite(parts[n], state)
                same = {key for key, tensor in found.items() if key in whole and torch.equal(tensor, whole[key])}
                differ = (found.keys() | whole.keys()) - same
                if found_step != 3 or differ:
                    wrong.append(f"{source} to {kind, n}: {differ}")
                train(model, optimizer, 1)  # it goes on
                loaded += 1
    return loaded, wrong


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_in_one_way_it_loads_in_every_other(tmp_path, name):
    results = on_ranks(4, exchange, tmp_path, name)
    assert [wrong for _, wrong in results] == [[]] * 4
    assert [loaded for loaded, _ in results] == [len(KINDS) * sum(n > rank for _, n in KINDS) for rank in range(4)]
    for kind, n in KINDS:
        assert find_fault(tmp_path / f"{kind}{n}" / "step-00000003") is None


def save_twice_and_die(world: World, folder: Path, dies: int, after: int) -> None:
    """Save steps 1 and 2; a rank kills itself at one of the files that it opens, renames or removes for step 2."""
    part = Part(world.rank, world.size, world.device, group=dist.new_group(range(world.size)))
    state, model, optimizer = make_trained("fsdp", part, "adamw", steps=1)
    checkpoints = Checkpoints(folder, part)
    checkpoints.save(1, state, wait=True)
    train(model, optimizer, 1)
    left = after

    def count(event: str, args: tuple) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename") and "step-00000002" in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == dies:
        sys.addaudithook(count)
    checkpoints.save(2, state, wait=True)


@pytest.mark.parametrize("dies, after", [(2, 1), (0, 3), (0, 5)])
def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_one_before(tmp_path, dies, after):
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        on_ranks(3, save_twice_and_die, tmp_path, dies, after)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
    box: dict[str, Any] = {}

    class Box:
        def load_state_dict(self, state):
            box.update(state)

    here: Any = Box()
    assert Checkpoints(tmp_path, World(0, 1, torch.device("cpu"))).load({"m": here}) == 1
    assert {name: stored[...].shape for name, stored in box.items()} == {
        name: p.shape for name, p in ModelState(tied_model()).parameters.items()
    }
    assert not list(tmp_path.glob("damaged-*"))
