"""DTensors with what surrounds an optimizer: distributed checkpoints, state dicts, clipping, schedulers, Combined."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from muown_train.models.gpt import GPT
from muown_train.optim import Combined, Lion, Muown, param_groups
from muown_train.optim.muown import list_row_norms
from muown_train.optim.row_shards.placement import get_local
from tests.helpers.ranks import on_ranks
from tests.optim.row_shards.cases import (
    build,
    make_matrices,
    make_mesh,
    measure_difference,
    set_gradients,
    shard_model,
    take_step,
)


def train(mesh, steps):
    """Return a model and its shards with their optimizers, after some steps of both."""
    model, sharded = make_matrices(), shard_model(make_matrices(), mesh)
    optimizers = [build(Muown, each, ns_dtype="float32") for each in (model, sharded)]
    for step in range(steps):
        go_on(model, sharded, optimizers, step)
    return model, sharded, optimizers


def go_on(model, sharded, optimizers, step):
    set_gradients(model, sharded, step)
    for optimizer in optimizers:
        take_step(optimizer, step)


# --- distributed checkpoints


def save_with_dcp(world, folder, hsdp, flat):
    _, sharded, (_, optimizer) = train(make_mesh(world.size, hsdp), 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"optimizer": get_optimizer_state_dict(sharded, optimizer, options=options), "model": sharded.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def load_with_dcp(world, folder, hsdp, flat):
    mesh = make_mesh(world.size, hsdp)
    model, _, optimizers = train(mesh, 3)
    other = shard_model(make_matrices(), mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    optimizer = build(Muown, other, ns_dtype="float32")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"optimizer": get_optimizer_state_dict(other, optimizer, options=options), "model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, optimizer, state["optimizer"], options=options)
    differences = [measure_difference(model, optimizers[0], other, optimizer)]
    for step in (3, 4):
        go_on(model, other, [optimizers[0], optimizer], step)
    return [*differences, measure_difference(model, optimizers[0], other, optimizer)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "flat"),
    [((3, False), (2, False), False), ((4, True), (3, False), True), ((2, False), (4, True), True)],
)
def test_a_distributed_checkpoint_goes_on_with_another_number_of_ranks(tmp_path, saved, loaded, flat):
    on_ranks(saved[0], save_with_dcp, tmp_path, saved[1], flat)
    for differences in on_ranks(loaded[0], load_with_dcp, tmp_path, loaded[1], flat):
        assert differences == [0.0, 0.0]


# --- state dicts


def exchange_state_dicts(world):
    model, sharded, (plain, optimizer) = train(make_mesh(world.size), 3)
    whole = copy.deepcopy(plain.state_dict())
    shards = {
        i: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        for i, state in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict(whole)  # whole tensors into shards
    assert measure_difference(model, plain, sharded, optimizer) == 0
    plain.load_state_dict(optimizer.state_dict())  # and shards into whole tensors
    assert measure_difference(model, plain, sharded, optimizer) == 0
    assert all(
        torch.equal(value, whole["state"][i][key]) for i, state in shards.items() for key, value in state.items()
    )
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    go_on(model, sharded, [plain, optimizer], 3)
    return measure_difference(model, plain, sharded, optimizer)


def test_state_dicts_load_whole_tensors_into_shards_and_back():
    assert on_ranks(2, exchange_state_dicts) == [0.0, 0.0]


# --- a training loop


def train_language_model(world):
    """Train with clipping, a scheduler and several optimizers; return the losses of one process and of shards."""
    mesh = make_mesh(world.size)
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = GPT(vocab_size=50, layers=2, dim=16, heads=2, seq_len=8, mlp_hidden=24)
        if is_sharded:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        matrices, rest = param_groups(model)
        optimizer = Combined(
            Muown(matrices, lr=0.02, ns_dtype="float32"), torch.optim.AdamW(rest[:1], lr=0.01), Lion(rest[1:])
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        torch.manual_seed(1)
        own = []
        for step in range(6):
            tokens = torch.randint(50, (4, 9))
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 32
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            if step == 3:  # a bad step, of which every rank knows
                optimizer.found_inf = torch.ones(())
            optimizer.step()
            optimizer.found_inf = None
            optimizer.zero_grad()
            scheduler.step()
            own.append((loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
        losses.append(own)
    return losses


def test_a_training_loop_has_the_losses_of_one_process():
    for plain, sharded in on_ranks(2, train_language_model):
        assert plain[0] != plain[-1]
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(plain), rtol=1e-5, atol=1e-5)


def move_the_model(world):
    """Convert a sharded model after its optimizer is made, and make one right after an evaluation."""
    model = shard_model(make_matrices(), make_mesh(world.size))
    optimizer = Combined(build(Muown, model))
    model.double()
    before = [get_local(p.detach()).clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    moved = [not torch.equal(get_local(p.detach()), old) for p, old in zip(model.parameters(), before, strict=True)]
    other = shard_model(GPT(vocab_size=50, layers=1, dim=16, heads=2, seq_len=8, mlp_hidden=24), make_mesh(world.size))
    with torch.no_grad():
        other(torch.zeros(1, 8, dtype=torch.int64))
    groups = [*param_groups(other)[0], *param_groups(other)[1]]
    return all(moved) and all(isinstance(p, DTensor) for group in groups for _, p in group["params"])


def test_a_model_may_be_converted_and_may_have_been_evaluated():
    assert all(on_ranks(2, move_the_model))


def change_weights(world):
    """Freeze a parameter, reset the state of another, and shorten rows, as users do."""
    model, sharded, optimizers = train(make_mesh(world.size), 2)
    for each, optimizer in zip((model, sharded), optimizers, strict=True):
        with torch.no_grad():
            each.up.weight.mul_(0.5)
        optimizer.refresh_row_norms()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p is each.up.weight:
                    g = get_local(optimizer.state[p]["magnitude"]).abs()
                    torch.testing.assert_close(g, list_row_norms(p.detach(), group))
        optimizer.state.pop(each.down.weight)
    for step in (2, 3):
        set_gradients(model, sharded, step)
        for each, optimizer in zip((model, sharded), optimizers, strict=True):
            each.square.weight.grad = None
            take_step(optimizer, step)
    return measure_difference(model, optimizers[0], sharded, optimizers[1])


def test_frozen_reset_and_changed_parameters_move_as_in_one_process():
    assert on_ranks(2, change_weights) == [0.0, 0.0]
