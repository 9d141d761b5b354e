"""Sharding over real gloo ranks: the results of the replicated optimizer, with a share of its state on each rank."""

import copy
import io
import pickle
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muown_train.models.gpt import GPT
from muown_train.optim import SOAP, Combined, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown, param_groups
from muown_train.optim.core.orthogonalize import svd
from muown_train.optim.sharding import assign_owners, balance_costs, gather_state_dict, shard
from tests.helpers.ranks import on_ranks

SHAPES = [(4, 6), (6, 4), (12, 4), (4, 6), (1, 5), (4, 6), (4, 6), (7, 1), (3, 3)]
STEPS = 4


def one_by_one(X):
    """An orthogonalizer whose result for a matrix does not depend on the others."""
    return torch.stack([svd(x) for x in X.view(-1, *X.shape[-2:])]).view_as(X)


def matrices(dtype):
    torch.manual_seed(0)
    named = [(f"m{i}", torch.nn.Parameter(torch.randn(*shape, dtype=dtype))) for i, shape in enumerate(SHAPES)]
    named[5][1].requires_grad_(False)
    fused = [("fused", torch.nn.Parameter(torch.randn(12, 6, dtype=dtype)))]
    return [{"params": named}, {"params": fused, "blocks": (4, 4, 4)}]


def vectors(dtype):
    torch.manual_seed(1)
    named = [(f"v{i}", torch.nn.Parameter(torch.randn(size, dtype=dtype))) for i, size in enumerate([5, 3, 8])]
    return [{"params": [*named, ("scalar", torch.nn.Parameter(torch.tensor(2.0, dtype=dtype)))], "lr": 0.03}]


def everything(dtype):
    """Groups that elementwise optimizers take."""
    return [{"params": group["params"]} for group in matrices(dtype)] + vectors(dtype)


def muown(dtype=torch.float32, **options):
    return Combined(Muown(matrices(dtype), lr=0.05, **options), torch.optim.AdamW(vectors(dtype), lr=0.05))


def torch_muon():
    return torch.optim.Muon([{"params": group["params"]} for group in matrices(torch.float32)], lr=0.05)


EXACT = {  # a parameter's result does not depend on what it is computed together with: bit for bit
    "muown svd float64": lambda: muown(torch.float64, orthogonalizer="svd", weight_decay=0.1),
    "muown svd float32": lambda: muown(orthogonalizer="svd", magnitude="signum"),
    "muown one by one": lambda: muown(orthogonalizer=one_by_one),
    "torch muon": torch_muon,
    "adamw fused": lambda: torch.optim.AdamW(everything(torch.float32), lr=0.05, fused=True),
    "adamw foreach": lambda: torch.optim.AdamW(everything(torch.float32), lr=0.05, foreach=True),
    "adamw bfloat16": lambda: torch.optim.AdamW(everything(torch.bfloat16), lr=0.05),
    "sgd": lambda: torch.optim.SGD(everything(torch.float64), lr=0.05, momentum=0.9),
    "rmsprop": lambda: torch.optim.RMSprop(everything(torch.float32), lr=0.05),
    "lion": lambda: Lion(everything(torch.float32), lr=0.05),
    "soap": lambda: SOAP(everything(torch.float64), lr=0.05, precondition_frequency=2),
    "muown sign": lambda: MuownSign(matrices(torch.float64), lr=0.05, magnitude_lr=0.01),
    "two dtypes": lambda: torch.optim.SGD(everything(torch.float64) + everything(torch.float32), lr=0.1, momentum=0.9),
}
BATCHED = {  # products of matrices in batches, of other sizes than in the replica: to float32's rounding
    "muown": lambda: muown(ns_dtype="float32"),
    "muown fixed": lambda: muown(ns_dtype="float32", magnitude="fixed", weight_decay=0.1),
    "normuon": lambda: NorMuon(matrices(torch.float32), lr=0.05, ns_dtype="float32"),
    "normuown": lambda: NorMuown(matrices(torch.float32), lr=0.05, ns_dtype="float32"),
    "muon": lambda: Muon(matrices(torch.float32), lr=0.05, ns_dtype="float32", adjust_lr_fn="match_rms_adamw"),
}
CASES = EXACT | BATCHED


def parameters(optimizer):
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def train(optimizer, steps):
    """Take the steps with these numbers on clipped gradients that depend on the number alone; m3 has none at step 2."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(parameters(optimizer)):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if not p.requires_grad or (i, step) == (3, 2) else grad
        torch.nn.utils.clip_grad_norm_(parameters(optimizer), 1.0)
        before = [(p, p.grad) for p in parameters(optimizer)]
        optimizer.step()
        assert all(p.grad is grad for p, grad in before)


def deviation(one, two):
    """Return the largest difference, relative to the largest weight of the matrix."""
    pairs = zip(parameters(one), parameters(two), strict=True)
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)


def elements(optimizer):
    return sum(value.numel() for state in optimizer.state.values() for value in state.values())


def _compare(world):
    """Return for each case the deviation from the replica, both sizes of the state, the state dict and the weights."""
    found = {}
    for name, make in CASES.items():
        replica, sharded = make(), make()
        if world.rank:  # others start from rank 0's weights
            for p in parameters(sharded):
                p.data.mul_(2)
        assert shard(sharded) is sharded
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (replica, sharded)]
        for step in range(STEPS):
            for each, schedule in zip((replica, sharded), schedules, strict=True):
                train(each, [step])
                schedule.step()
        weights = [p.detach().clone() for p in parameters(sharded)]
        state = copy.deepcopy(sharded.state_dict())
        found[name] = deviation(sharded, replica), elements(sharded), elements(replica), state, weights
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def compared(request):
    """The results of `_compare` on each rank of 2 or 3."""
    return on_ranks(request.param, _compare)


@pytest.mark.parametrize("name", CASES)
def test_sharded_and_replicated_agree(compared, name):
    for found in compared:
        assert found[name][0] <= (0 if name in EXACT else 1e-6)
        for p, q in zip(found[name][4], compared[0][name][4], strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", CASES)
def test_state_is_divided_among_ranks(compared, name):
    assert sum(found[name][1] for found in compared) == compared[0][name][2]
    owned = [set(found[name][3]["state"]) for found in compared]
    assert not set.intersection(*owned)
    if compared[0][name][2] > 30:
        assert all(found[name][1] < compared[0][name][2] for found in compared)


@pytest.mark.parametrize("name", CASES)
def test_the_union_loads_into_an_unsharded_optimizer(compared, name):
    state = compared[0][name][3]
    union = state | {"state": dict(chain.from_iterable(found[name][3]["state"].items() for found in compared))}
    loaded, whole = CASES[name](), CASES[name]()
    for p, value in zip(parameters(loaded), compared[0][name][4], strict=True):
        p.data.copy_(value)
    del union["share"]
    loaded.load_state_dict(union)
    schedule = torch.optim.lr_scheduler.ExponentialLR(whole, 0.9)
    for step in range(STEPS):
        train(whole, [step])
        schedule.step()
    for each in (loaded, whole):
        train(each, [STEPS])
    assert deviation(loaded, whole) <= (0 if name in EXACT else 1e-6)


def _load(world):
    """Return the deviation after the full state dict of an unsharded optimizer is loaded into sharded ones."""
    found = {}
    for name in ("muown svd float64", "adamw fused", "muown", "torch muon", "soap", "lion"):
        whole, sharded = CASES[name](), CASES[name]()
        shard(sharded)
        train(whole, range(3))
        for p, q in zip(parameters(sharded), parameters(whole), strict=True):
            p.data.copy_(q)
        sharded.load_state_dict(copy.deepcopy(whole.state_dict()))
        assert 0 < len(sharded.state) < len(whole.state)
        sharded.load_state_dict(sharded.state_dict())  # what this rank owns is enough
        train(whole, [3, 4])
        train(sharded, [3, 4])
        found[name] = deviation(sharded, whole), elements(sharded), elements(whole)
    return found


def _closure(world):
    """Check that a closure runs once with all gradients, and that no gradient is missing after the step."""
    found = {}
    for name in ("adamw fused", "muown svd float64", "torch muon"):
        replica, sharded = CASES[name](), shard(CASES[name]())
        for optimizer in (replica, sharded):
            calls = []

            def closure(optimizer=optimizer, calls=calls):
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = sum(p.square().sum() for p in parameters(optimizer) if p.requires_grad)
                loss.backward()
                return loss

            for _ in range(2):
                assert optimizer.step(closure).item() > 0
            optimizer.zero_grad()
            optimizer.step(closure=closure)
            assert calls == [True] * 3
            assert all((p.grad is not None) == p.requires_grad for p in parameters(optimizer))
        found[name] = deviation(sharded, replica)
    return found


def message(action):
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def _refusals(world):
    sharded = shard(muown())
    new = torch.nn.Parameter(torch.ones(2, 2))
    other_rank_has_more = everything(torch.float32)[: 2 + world.rank]
    flat = torch.randn(12)
    overlapping = [torch.nn.Parameter(flat[:8]), torch.nn.Parameter(flat[6:])]
    found = {
        "twice": message(lambda: shard(sharded)),
        "part": message(lambda: shard(sharded.optimizers[0])),
        "whole": message(lambda: shard(Combined(*shard(muown()).optimizers))),
        "group": message(lambda: sharded.optimizers[0].add_param_group({"params": [new]})),
        "deepcopy": message(lambda: copy.deepcopy(sharded)),
        "pickle": message(lambda: pickle.dumps(sharded.optimizers[1])),
        "save": message(lambda: torch.save(sharded, io.BytesIO())),
        "lbfgs": message(lambda: shard(torch.optim.LBFGS([new]))),
        "differ": message(lambda: shard(torch.optim.SGD(other_rank_has_more, lr=0.1))),
        "lr": message(lambda: shard(Muown(everything(torch.float32)[:1], lr=0.1 * (1 + world.rank)))),
        "overlap": message(lambda: shard(torch.optim.SGD(overlapping, lr=0.1))),
    }
    train(sharded, [0])
    p = parameters(sharded)[0]
    p.data = p.data.clone()
    found["moved"] = message(lambda: train(sharded, [1]))
    return found


def _several(world):
    parts = _load(world), _closure(world), _refusals(world), _layout(world), _own_group(world), _order(world)
    return *parts, _gather(world)


def _gather(world):
    """Gather sharded optimizers on each rank in turn, and load the share that rank 0 alone would save."""
    found = {}
    for name in ("muown svd float64", "adamw fused", "soap", "lion"):
        replica, sharded = CASES[name](), shard(CASES[name]())
        for optimizer in (replica, sharded):
            train(optimizer, range(3))
        gathered = [gather_state_dict(sharded, to=rank) for rank in range(world.size)]
        assert [whole is not None for whole in gathered] == [rank == world.rank for rank in range(world.size)]
        share = world.gather(sharded.state_dict())[0]
        refused = message(lambda: sharded.load_state_dict(share)) if world.rank else None  # noqa: B023
        del share["share"]
        unmarked = message(lambda: sharded.load_state_dict(share)) if world.rank else None  # noqa: B023
        sharded.load_state_dict(sharded.state_dict())
        ours = name != "adamw fused"  # torch's own optimizers take what they are given
        alone = message(lambda: replica.load_state_dict(sharded.state_dict())) if ours else None  # noqa: B023
        found[name] = gathered[world.rank], replica.state_dict(), refused, unmarked, alone
    found["sgd"] = message(lambda: gather_state_dict(torch.optim.SGD(everything(torch.float32), lr=0.1)))
    return found


def _layout(world):
    """Return whether strides survive the move into flat buffers."""
    a = torch.nn.Parameter(torch.randn(6, 4).t())
    b = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    c = torch.nn.Parameter(torch.randn(2, 3).expand(4, 2, 3).clone())
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    before = [p.stride() for p in (a, b, c)]
    optimizer = shard(torch.optim.SGD([a, b, c, empty], lr=0.1))
    train(optimizer, [0])
    assert all(p.data_ptr() % 64 == 0 for p in (a, b, c))
    again = shard(torch.optim.SGD([a, b, c], lr=0.1))  # a second optimizer of the same parameters, later
    train(again, [1])
    return [p.stride() for p in (a, b, c)] == before


def _own_group(world):
    """Shard in a process group of one rank each: the optimizer is unchanged, whatever the other rank does."""
    groups = [torch.distributed.new_group([rank]) for rank in range(world.size)]
    torch.manual_seed(world.rank)
    own = torch.optim.SGD([torch.nn.Parameter(torch.randn(3))], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(p.detach().clone()) for p in parameters(own)], lr=0.1)
    shard(own, groups[world.rank])
    train(own, range(1 + world.rank))
    train(other, range(1 + world.rank))
    not_in_it = message(lambda: shard(other, groups[1 - world.rank]))
    return deviation(own, other), not_in_it


def _order(world):
    """Return how many messages are on their way before AdamW's work, after it, and after the step."""
    optimizer = shard(muown())
    adamw, seen = optimizer.optimizers[1], []

    def count(*_):
        seen.append(len(vars(optimizer)["_sharding"].pending))

    adamw.register_step_pre_hook(count)
    adamw.register_step_post_hook(count)
    train(optimizer, [0])
    count()
    return seen


@pytest.fixture(scope="module")
def several():
    """The results of `_several` on two ranks."""
    return on_ranks(2, _several)


@pytest.mark.slow
def test_a_full_state_dict_loads_into_a_sharded_optimizer(several):
    for name in several[0][0]:
        for rank in several:
            assert rank[0][name][0] <= (0 if name in EXACT else 1e-6)
        assert sum(rank[0][name][1] for rank in several) == several[0][0][name][2]


def test_gathered_on_one_rank_it_is_the_state_dict_of_the_replica(several):
    for rank in several:
        assert "not sharded" in rank[6].pop("sgd")
        for whole, expected, *_ in rank[6].values():
            assert (
                whole["param_groups"] == expected["param_groups"] and whole["state"].keys() == expected["state"].keys()
            )
            for i, state in expected["state"].items():
                assert all(torch.equal(value, whole["state"][i][key]) for key, value in state.items())


def test_the_share_of_one_rank_is_not_loaded_as_the_whole(several):
    for _, _, refused, unmarked, alone in several[1][6].values():
        assert "is the share of rank 0 of 2, and this is rank 1 of 2" in refused and "gather_state_dict" in refused
        assert "has none for the parameters that rank 1 owns" in unmarked
        if alone:
            assert "is the share of rank 1 of 2, and this optimizer is not sharded" in alone


def test_closures(several):
    assert [rank[1] for rank in several] == [{"adamw fused": 0, "muown svd float64": 0, "torch muon": 0}] * 2


@pytest.mark.parametrize(
    "case, part",
    [
        ("twice", "sharded already"),
        ("part", "sharded already"),
        ("whole", "sharded already"),
        ("group", "add them before shard"),
        ("deepcopy", "use its state_dict"),
        ("pickle", "use its state_dict"),
        ("save", "use its state_dict"),
        ("lbfgs", "LBFGS"),
        ("differ", "rank 1 has other parameters"),
        ("lr", "rank 1 has other parameters or options"),
        ("overlap", "share memory"),
        ("moved", "'m0' is no longer where shard"),
    ],
)
def test_error_messages(several, case, part):
    for rank in several:
        assert part in rank[2][case]


def test_layout_survives(several):
    assert all(rank[3] for rank in several)


def test_matrices_travel_while_adamw_works(several):
    for rank in several:
        assert rank[5] == [2, 4, 0]


def test_own_process_group(several):
    for rank in several:
        assert rank[4][0] == 0 and "not in the process_group" in rank[4][1]


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group first"):
        shard(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_no_rank_has_much_more_than_the_mean(costs, size):
    owners = balance_costs(costs, size)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
    assert len(owners) == len(costs) and sum(loads) == sum(costs)
    assert max(loads) * size <= sum(costs) + (size - 1) * max(costs, default=0)
    assert balance_costs(costs, size) == owners


def test_the_500m_model_on_16_ranks():
    with torch.device("meta"):
        model = GPT(50280, layers=22, dim=1280, heads=20, seq_len=64)
        matrix, rest = param_groups(model)
        optimizer = Combined(Muon(matrix), torch.optim.AdamW(rest))
    assigned = assign_owners(optimizer, 16)
    assert len(assigned.owners) == len(list(model.parameters()))
    d, h = 1280, 3584
    flops = {"qkv": 3 * 5 * 6 * d**3, "attention.out": 5 * 6 * d**3}
    # two Gram matrices and two products with X, and 14 products of Gram matrices
    flops |= {"gate_up": 8 * d**2 * 2 * h + 28 * d**3, "mlp.out": 8 * d**2 * h + 28 * d**3}
    loads, in_turn, count = [0] * 16, [0] * 16, 0
    for name, p in sorted(model.named_parameters(), key=lambda item: item[1].shape):
        cost = next((flops[kind] for kind in flops if f"{kind}.weight" in name), 0) + 700 * 4 * p.numel()
        loads[assigned.owners[p]] += cost
        in_turn[count % 16] += cost
        count += p.ndim == 2
    assert tuple(loads) == assigned.loads
    assert assigned.balance == max(loads) * 16 / sum(loads) < 1.03
    assert max(in_turn) * 16 / sum(in_turn) > 1.09
