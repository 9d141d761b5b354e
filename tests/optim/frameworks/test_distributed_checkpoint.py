"""torch.distributed.checkpoint: a state comes back exactly, onto a fresh model and optimizer too."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from muown_train.optim import SOAP, Combined, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown, param_groups

from .models import build_data, build_model, check_equal_models

MATRIX = {
    "muown": lambda groups: Muown(groups, lr=0.02, weight_decay=0.01),
    "muon": lambda groups: Muon(groups, lr=0.02),
    "torch muon": lambda groups: torch.optim.Muon(_without_roles(groups), lr=0.02),
    "normuon": lambda groups: NorMuon(groups, lr=0.02),
    "normuown": lambda groups: NorMuown(groups, lr=0.02),
    "sign": lambda groups: MuownSign(groups, lr=0.02, magnitude_lr=0.01),
    "soap": lambda groups: SOAP(groups, lr=0.01, precondition_frequency=2),
    "lion": lambda groups: Lion(groups, lr=0.001),
}
REST = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "lion": lambda groups: Lion(groups, lr=0.001),
}


def _without_roles(groups):
    return [{"params": group["params"]} for group in groups]


def build(matrix, rest, seed=0):
    model = build_model(seed)
    matrices, others = param_groups(model)
    return model, Combined(MATRIX[matrix](matrices), REST[rest](others))


def train(model, optimizer, steps):
    inputs, labels = build_data()
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs, labels)["loss"].backward()
        optimizer.step()
    optimizer.zero_grad()


def check_equal_state(one, two):
    assert len(one.state) == len(two.state) > 0
    for first, second in zip(one.param_groups, two.param_groups, strict=True):
        for p, q in zip(first["params"], second["params"], strict=True):
            assert one.state[p].keys() == two.state[q].keys()
            for key, value in one.state[p].items():
                other = two.state[q][key]
                assert torch.equal(value, other) and value.dtype == other.dtype, key


@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("matrix", MATRIX)
def test_round_trip_onto_a_fresh_optimizer(matrix, rest, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build(matrix, rest)
    train(model, optimizer, 3)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    fresh, loaded = build(matrix, rest, seed=1)
    set_state_dict(fresh, loaded, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    check_equal_models(model, fresh)
    check_equal_state(optimizer, loaded)
    train(model, optimizer, 2)
    train(fresh, loaded, 2)
    check_equal_models(model, fresh)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "nested"])
def test_round_trip_through_a_file(flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build("muown", "adamw")
    train(model, optimizer, 5)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path)
    fresh, loaded = build("muown", "adamw", seed=1)
    before = copy.deepcopy(fresh)
    weights, state = get_state_dict(fresh, loaded, options=options)
    check_equal_models(before, fresh)  # creating the state moves nothing
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path)
    set_state_dict(fresh, loaded, model_state_dict=weights, optim_state_dict=state, options=options)
    check_equal_models(model, fresh)
    check_equal_state(optimizer, loaded)
    train(model, optimizer, 1)
    train(fresh, loaded, 1)
    check_equal_models(model, fresh)


@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "nested"])
def test_groups_of_another_order_and_added_groups(flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def build_in_turn(turn, seed):
        model = build_model(seed)
        matrices, rest = param_groups(model)
        pairs = matrices[0]["params"]
        optimizer = Combined(Muown([matrices[0] | {"params": [pairs[turn]]}], lr=0.02), torch.optim.AdamW(rest))
        for pair in pairs:
            if pair is not pairs[turn]:
                optimizer.add_param_group({"params": [pair], "role": "matrix"})
        return model, optimizer

    model, optimizer = build_in_turn(0, seed=0)
    train(model, optimizer, 3)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    fresh, loaded = build_in_turn(1, seed=1)
    set_state_dict(fresh, loaded, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    train(model, optimizer, 2)
    train(fresh, loaded, 2)
    check_equal_models(model, fresh)


@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "nested"])
@pytest.mark.parametrize("build_part", [lambda: torch.nn.LayerNorm(8), lambda: torch.nn.Linear(8, 8, bias=False)])
def test_a_model_without_matrices_or_without_others(build_part, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def build_and_train(steps):
        torch.manual_seed(0)
        model = build_part()
        matrices, rest = param_groups(model)
        optimizer = Combined(Muown(matrices, lr=0.02), torch.optim.AdamW(rest))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).pow(3).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = build_and_train(3)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    fresh, loaded = build_and_train(0)
    set_state_dict(fresh, loaded, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    check_equal_models(model, fresh)
    check_equal_state(optimizer, loaded)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.9 cannot load the state of a plain SGD, strict or not")
def test_a_part_without_state_needs_strict_false():
    """torch refuses a nested state that lacks a parameter, as plain SGD's are, and says what to do."""

    def build_with_sgd(seed):
        model = build_model(seed)
        matrices, rest = param_groups(model)
        return model, Combined(Muown(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.1))

    model, optimizer = build_with_sgd(0)
    train(model, optimizer, 3)
    states = copy.deepcopy(get_state_dict(model, optimizer))
    fresh, loaded = build_with_sgd(1)
    both = {"model_state_dict": states[0], "optim_state_dict": states[1]}
    with pytest.raises(RuntimeError, match="strict=False"):
        set_state_dict(fresh, loaded, **both)
    set_state_dict(fresh, loaded, **both, options=StateDictOptions(strict=False))
    train(model, optimizer, 2)
    train(fresh, loaded, 2)
    check_equal_models(model, fresh)
