"""Checkpoints of DTensors: every rank writes its rows, and every number of ranks reads them, sharded or not."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muown_train.runs.averaging import average_weights
from muown_train.runs.checkpoint import Checkpoints, assign_writers
from muown_train.runs.checkpoint_files import find_fault
from muown_train.runs.checkpoint_reader import open_files
from muown_train.runs.state import ModelState, OptimizerState, Part
from muown_train.runtime.distributed import World
from tests.helpers.fake_ranks import (
    CPU,
    Make,
    Way,
    fake_rank,
    join,
    list_tensors,
    make_state,
    save_together,
)

WAYS = [
    *(Way(size) for size in (1, 2)),
    *(Way(size, (size,)) for size in (1, 2, 3, 4)),
    *(Way(2, (2, 1)), Way(4, (2, 2)), Way(3, (1, 3))),
]
SHAPES = [(7, 4), (1, 3), (5, 2, 3), (4,)]
MAKE: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def save(folder: Path, way: Way, shapes: list[tuple[int, ...]], make: Make) -> dict[str, torch.Tensor]:
    """Save a state after a step; return its tensors, whole."""
    return join(save_together(folder, way.size, lambda rank: make_state(way, shapes, make, seed=1)))


def load(checkpoint: Path, way: Way, shapes: list[tuple[int, ...]], make: Make) -> dict[str, torch.Tensor]:
    """Load a checkpoint into a model and an optimizer that have other values; return their tensors, whole."""
    held = []
    for rank in range(way.size):
        with fake_rank(rank, way.size):
            state = make_state(way, shapes, make, seed=2)
            before = {part: tensor.shape for part, tensor in list_tensors(state).items()}
            Checkpoints(checkpoint.parent, World(rank, way.size, CPU)).load(state, other=checkpoint)
            held.append(list_tensors(state))
            assert {part: tensor.shape for part, tensor in held[-1].items()} == before
    return join(held)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize(
    "source, target", [(Way(2), Way(3, (3,))), (Way(3, (3,)), Way(4, (2, 2))), (Way(4, (2, 2)), Way(2))]
)
def test_saved_by_some_ranks_it_loads_on_others(tmp_path, source, target):
    expected = save(tmp_path, source, SHAPES, MAKE["adamw"])
    assert_equal(load(tmp_path / "step-00000001", target, SHAPES, MAKE["adamw"]), expected)


def test_every_reader_gets_whole_tensors(tmp_path):
    expected = save(tmp_path, Way(3, (3,)), SHAPES, MAKE["adamw"])
    checkpoint = tmp_path / "step-00000001"
    assert find_fault(checkpoint) is None
    opened = open_files(checkpoint)
    assert_equal({key: stored[...] for key, stored in opened.tensors.items()}, expected)
    assert_equal(
        opened.load_weights(), {key[6:]: tensor for key, tensor in expected.items() if key.startswith("model/")}
    )
    state = opened.load_optimizer_state(("exp_avg",))
    assert torch.equal(state["p0"]["exp_avg"], expected["optimizer/p0/exp_avg"]) and len(state) == len(SHAPES)
    average = average_weights([opened, opened], [0.5, 0.5])
    assert torch.equal(average["p3"], expected["model/p3"])
    for key, stored in opened.tensors.items():
        assert stored.shape == expected[key].shape
        for first, stop in combinations(range(stored.shape[0] + 1) if stored.shape else (), 2):
            assert torch.equal(stored[first:stop], expected[key][first:stop])


def test_what_lies_where(tmp_path):
    save(tmp_path, Way(4, (2, 2)), [(5, 2), (1, 3)], MAKE["momentum"])
    index = json.loads((tmp_path / "step-00000001" / "index.json").read_text())
    assert index["format"] == 2
    rests = [json.loads(path.read_text()) for path in sorted((tmp_path / "step-00000001").glob("rank-*.json"))]
    rows = [(key, *place) for rest in rests for key, place in rest.get("rows", {}).items()]
    # each replica of five rows has three on its first rank; whoever has the one row of the other matrix has all of it
    wanted = [(key, first, 5) for key in ("model/p0", "optimizer/p0/momentum_buffer") for first in (0, 3)]
    assert sorted(rows) == wanted
    assert sum("rows" in rest for rest in rests) > 2  # replicas share the work


def test_whole_tensors_alone_have_the_format_of_earlier_versions(tmp_path):
    save(tmp_path / "replicas", Way(2), SHAPES, MAKE["adamw"])
    save(tmp_path / "one", Way(1, (1,)), SHAPES, MAKE["adamw"])
    for name in ("replicas", "one"):
        folder = tmp_path / name / "step-00000001"
        assert json.loads((folder / "index.json").read_text())["format"] == 1
        assert not any("rows" in json.loads(path.read_text()) for path in folder.glob("rank-*.json"))


def test_rows_of_replicas_are_dealt_out():
    rows = [{Part("w", (first, 8)): 100, Part("b"): 10} for first in (0, 4)]
    writers = assign_writers([*rows, *rows])  # ranks 2 and 3 have what ranks 0 and 1 have
    assert len(writers) == 3
    for part, rank in writers.items():
        assert part in rows[rank % 2]
    assert len({rank for part, rank in writers.items() if part.rows}) == 2


def test_state_that_is_not_by_rows_is_left_whole():
    """Nothing is known of state whose first dimension is another than the parameter's."""
    with fake_rank(1, 2):
        state = make_state(Way(2, (2,)), [(6, 2)], MAKE["adamw"], seed=1)["optimizer"]
        assert isinstance(state, OptimizerState)
        saved = {"p0": {"exp_avg": torch.ones(6, 2), "other": torch.ones(5), "step": torch.tensor(3.0), "count": 4}}
        state.load_state_dict(saved)
        (loaded,) = state.optimizer.state.values()
        assert loaded["exp_avg"].shape == (6, 2) and loaded["exp_avg"].to_local().shape == (3, 2)
        assert loaded["other"].shape == (5,) and not hasattr(loaded["other"], "device_mesh")
        assert loaded["step"] == 3 and loaded["count"] == 4


def test_columns_over_ranks_are_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    class Columns:
        def state_dict(self):
            return {"w": DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(1)])}

    with fake_rank(0, 2), pytest.raises(ValueError, match="model/w: a DTensor must be sharded by rows"):
        Checkpoints(tmp_path, World(0, 2, CPU)).save(1, {"model": Columns()})
    assert not any(tmp_path.iterdir())


def test_weights_that_a_forward_pass_left_whole_are_saved_by_rows():
    """FSDP2 puts its own parameters back before a state dict is made, which is not what is saved here."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 2))

        def forward(self, x):
            return x @ self.w.t()

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_rank(1, 2):
        model = fully_shard(Layer(), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters())
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert not hasattr(next(model.parameters()), "device_mesh")
        assert ModelState(model).state_dict()["w"].to_local().shape == (2, 2)
        assert set(OptimizerState(optimizer, model).names) == set(optimizer.param_groups[0]["params"])


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    shapes=st.lists(shapes, min_size=1, max_size=4),
    source=st.sampled_from(WAYS),
    target=st.sampled_from(WAYS),
    optimizer=st.sampled_from(sorted(MAKE)),
)
def test_any_shapes_on_any_ranks(tmp_path_factory, shapes, source, target, optimizer):
    folder = tmp_path_factory.mktemp("any")
    expected = save(folder, source, shapes, MAKE[optimizer])
    assert find_fault(folder / "step-00000001") is None
    assert_equal(load(folder / "step-00000001", target, shapes, MAKE[optimizer]), expected)
