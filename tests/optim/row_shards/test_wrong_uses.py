"""What cannot work with DTensors is one sentence on every rank, before anything moves, and nobody waits."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muown_train.optim import SOAP, Lion, Muon, Muown
from muown_train.optim.row_shards.placement import get_local
from tests.helpers.ranks import on_ranks
from tests.optim.row_shards.cases import make_mesh


def make_parameter(mesh, *placements, shape=(8, 6)):
    torch.manual_seed(0)
    return nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None))


def use_columns(world):
    Muown([("w", make_parameter(make_mesh(world.size), Shard(1)))])


def use_two_sharded_axes(world):
    mesh = init_device_mesh("cpu", (2, world.size // 2))
    Muon([("w", make_parameter(mesh, Shard(0), Shard(0)))])


def use_tensor_parallel(world):
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    Muown(list(model.named_parameters()))


def use_soap(world):
    SOAP([("w", make_parameter(make_mesh(world.size), Shard(0)))])


def use_transposed(world):
    Muown([{"params": [("w", make_parameter(make_mesh(world.size), Shard(0)))], "transposed": True}])


def use_odd_experts(world):
    p = make_parameter(make_mesh(world.size), Shard(0), shape=(world.size + 1, 4, 6))
    Muown([{"params": [("w", p)], "layout": "experts"}])


def use_other_shapes(world):
    Muown([("w", make_parameter(make_mesh(world.size), Shard(0), shape=(8, 6 + (world.rank == 1))))])


def use_other_options(world):
    Muown([("w", make_parameter(make_mesh(world.size), Shard(0)))], lr=0.1 * (1 + world.rank))


def use_other_groups(world):
    p, q = (make_parameter(make_mesh(world.size), Shard(0)) for _ in range(2))
    groups = [{"params": [("p", p)]}, {"params": [("q", q)]}]
    optimizer = Muown(groups[: 1 + (world.rank == 0)], lr=0.1)
    p.grad = p.detach().clone()
    optimizer.step()


def use_gradients_of_one_rank(world):
    params = [make_parameter(make_mesh(world.size), Shard(0)) for _ in range(2)]
    optimizer = Muown([("p", params[0]), ("q", params[1])], lr=0.1)
    for step in range(2):
        params[0].grad = params[0].detach().clone()
        if step == 1 and world.rank == 1:
            params[1].grad = params[1].detach().clone()
        before = get_local(params[0].detach()).clone()
        try:
            optimizer.step()
        except ValueError:
            assert torch.equal(get_local(params[0].detach()), before)
            raise


def use_zero_rows_of_one_rank(world):
    p = make_parameter(make_mesh(world.size), Shard(0))
    if world.rank == 1:
        get_local(p.detach())[0] = 0
    Muown([("w", p)])


def use_another_lr_later(world):
    p = make_parameter(make_mesh(world.size), Shard(0))
    optimizer = Muown([("w", p)], lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + world.rank)
    p.grad = p.detach().clone()
    optimizer.step()


def use_a_function_that_fails(world):
    p = make_parameter(make_mesh(world.size), Shard(0))
    before = get_local(p.detach()).clone()
    optimizer = Muown([("w", p)], lr=0.1, orthogonalizer=lambda X: X[:, :1])
    p.grad = p.detach().clone()
    try:
        optimizer.step()
    finally:
        assert torch.equal(get_local(p.detach()), before)


WRONG = {
    use_columns: (2, r"^parameter 'w': a DTensor must be sharded by rows.*Shard\(dim=1\)"),
    use_two_sharded_axes: (4, "^parameter 'w': the rows of a DTensor must be sharded over one axis"),
    use_tensor_parallel: (4, r"^parameter '[01].weight': a DTensor must be sharded by rows"),
    use_soap: (2, "^parameter 'w' is a DTensor, which SOAP does not support"),
    use_transposed: (2, "^parameter 'w': a DTensor must not be transposed"),
    use_odd_experts: (2, "^parameter 'w': a DTensor's experts must divide among the 2 ranks, got 3"),
    use_other_shapes: (2, r"^the ranks differ .*shape \(8, 6\).* on rank 0, .*shape \(8, 7\).* on rank 1"),
    use_other_options: (2, "^the ranks differ .*lr=0.1 in group 0 on rank 0, lr=0.2 in group 0 on rank 1"),
    use_other_groups: (2, "^the ranks differ .*'q'.* on rank 0, parameter 'p', number 0, with a gradient and no state"),
    use_another_lr_later: (2, "^the ranks differ .*lr=0.1 in group 0 on rank 0, lr=0.2 in group 0 on rank 1"),
    use_a_function_that_fails: (2, r"^(the step failed on rank [01]: ValueError: )?the orthogonalizer returned shape"),
    use_gradients_of_one_rank: (
        2,
        "^the ranks differ .*'q'.* with no gradient on rank 0, parameter 'q', number 1, with a gradient and no state",
    ),
    use_zero_rows_of_one_rank: (2, "^parameter 'w': 1 of 8 rows are zero and have no direction"),
}


def collect_messages(world, uses):
    """Return what each wrong use says on this rank."""
    messages = []
    for use in uses:
        try:
            use(world)
            messages.append("nothing was wrong")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4])
def test_wrong_uses_are_one_sentence_on_every_rank(size):
    uses = [use for use, (ranks, _) in WRONG.items() if ranks == size]
    for messages in on_ranks(size, collect_messages, uses):
        for use, message in zip(uses, messages, strict=True):
            assert re.search(WRONG[use][1], message), (use.__name__, message)
            assert "\n" not in message


def step_on_parts_of_the_world(world):
    """Step on meshes of some ranks, after each rank has joined another number of groups."""
    for size in (1, 2, 3, 4):
        torch.distributed.new_group(range(size))
    reached = []
    for size in (2, 3):
        mesh = DeviceMesh("cpu", list(range(size)))
        if world.rank < size:
            p = make_parameter(mesh, Shard(0))
            optimizer = Muown([("w", p)], lr=0.1)
            p.grad = p.detach().clone()
            optimizer.step()
            reached.append(size)
    return reached


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_mesh_may_be_a_part_of_the_world():
    assert on_ranks(4, step_on_parts_of_the_world) == [[2, 3], [2, 3], [3], []]


def take_elementwise_steps(world):
    mesh = make_mesh(world.size)
    whole = nn.Parameter(torch.arange(48.0).reshape(8, 6))
    p = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(1)], src_data_rank=None))
    replicated = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Replicate()], src_data_rank=None))
    optimizers = [Lion([each], lr=0.1, weight_decay=0.1) for each in (whole, p, replicated)]
    for step in range(3):
        whole.grad = torch.sin(whole.detach() + step)
        p.grad = distribute_tensor(whole.grad, mesh, [Shard(1)], src_data_rank=None)
        replicated.grad = distribute_tensor(whole.grad, mesh, [Replicate()], src_data_rank=None)
        for optimizer in optimizers:
            optimizer.found_inf = torch.tensor(float(step == 1))
            optimizer.step()
    return all(torch.equal(each.detach().full_tensor(), whole) for each in (p, replicated))


def test_lion_takes_dtensors_of_any_placement():
    assert all(on_ranks(2, take_elementwise_steps))
