"""Checkpoints between replicas, sharded optimizers, FSDP and HSDP on ranks that talk to one another."""

import os
import signal
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from muown_train.optim import Combined, Muown, param_groups, shard
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.checkpoint_files import find_fault
from muown_train.runs.state import ModelState, OptimizerState, Stateful
from muown_train.runtime.distributed import World
from tests.helpers.fake_ranks import join, list_tensors
from tests.helpers.ranks import on_ranks
from tests.runs.test_checkpoint import tied_model, train

pytestmark = pytest.mark.slow

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "muown": lambda model: Combined(
        *(kind(group, lr=0.01) for kind, group in zip((Muown, torch.optim.AdamW), param_groups(model), strict=True))
    ),
}
# how a number of ranks share the work
KINDS = {1: ["replicas"], 2: ["replicas", "sharded optimizer"], 3: ["fsdp"], 4: ["hsdp"]}


def make_trained(
    kind: str, world: World, name: str, steps: int
) -> tuple[dict[str, Stateful], nn.Module, torch.optim.Optimizer]:
    """The state of a model that has trained, and been evaluated since, as the trainer would ask for it."""
    model: nn.Module = tied_model()
    if kind in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((2, 2), ("replicas", "rows")) if kind == "hsdp" else ((world.size,), ("rows",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = OPTIMIZERS[name](model)
    if kind == "sharded optimizer":
        shard(optimizer)
    train(model, optimizer, steps)
    with torch.no_grad():
        model(torch.arange(7))
    return {"m": ModelState(model), "o": OptimizerState(optimizer, model)}, model, optimizer


def save_in_each_way(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Save after three steps; return the whole tensors that the ranks held, by the name of the folder."""
    wholes = {}
    for name, kind in product(OPTIMIZERS, KINDS[world.size]):
        state, _, _ = make_trained(kind, world, name, steps=3)
        source = f"{name}, {kind}, {world.size}"
        Checkpoints(folder / source, world).save(3, state, wait=True)
        wholes[source] = join(world.gather(list_tensors(state)))
    return wholes


def load_in_each_way(world: World, folder: Path, wholes: dict[str, dict[str, Tensor]]) -> tuple[int, list[str]]:
    """Load everything that was saved, and go on; return how often it was equal bit for bit, and where it was not."""
    equal, wrong = 0, []
    for (source, whole), kind in product(wholes.items(), KINDS[world.size]):
        state, model, optimizer = make_trained(kind, world, source.partition(",")[0], steps=1)
        step = Checkpoints(folder / source, world).load(state)
        found = join(world.gather(list_tensors(state)))
        if step == 3 and found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole):
            equal += 1
        else:
            wrong.append(f"{source} to {kind} on {world.size}")
        train(model, optimizer, 1)
    return equal, wrong


def test_saved_in_one_way_it_loads_in_every_other(tmp_path):
    wholes: dict[str, dict[str, Tensor]] = {}
    for size in KINDS:
        wholes |= on_ranks(size, save_in_each_way, tmp_path)[0]
    assert len(wholes) == 10
    for source in wholes:
        assert find_fault(tmp_path / source / "step-00000003") is None
    for size, kinds in KINDS.items():
        assert on_ranks(size, load_in_each_way, tmp_path, wholes) == [(10 * len(kinds), [])] * size


def save_twice_and_die(world: World, folder: Path, dies: int, after: int) -> None:
    """Save steps 1 and 2; a rank kills itself at one of the files that it opens, renames or removes for step 2."""
    state, model, optimizer = make_trained("fsdp", world, "adamw", steps=1)
    checkpoints = Checkpoints(folder, world)
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


@pytest.mark.parametrize("dies, after", [(2, 1), (0, 5)])
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
