"""Checkpoints: complete or absent, by parameter name, for any number of ranks, never unpickled."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muown_train.checkpoint import (
    Checkpoints,
    ModelState,
    OptimizerState,
    flatten,
    unflatten,
)
from muown_train.distributed import World
from muown_train.optim import Combined, Muown, param_groups
from tests.ranks import on_ranks

HERE = World(0, 1, torch.device("cpu"))


class Box:
    """A Stateful of anything."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


leaves = st.one_of(st.integers(), st.text(), st.none(), st.booleans(), st.lists(st.integers()), st.just({}))
keys = st.text(min_size=1).filter(lambda key: "/" not in key)


@given(st.dictionaries(keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, min_size=1))))
def test_flatten_and_back(state):
    assert unflatten(flatten(state)) == state


def some_state(seed: int) -> dict:
    g = torch.Generator().manual_seed(seed)
    buffer = torch.randn(100, generator=g)
    return {
        "tensors": Box({"a": torch.randn(3, 4, generator=g), "b": {"half": torch.randn(5, generator=g).bfloat16()}}),
        "views of one buffer": Box({"x": buffer[:50], "y": buffer[50:].view(5, 10).t()}),
        "rest": Box({"step": torch.tensor(3.0), "rows": seed, "nested": {"list": [1, 2], "none": None}}),
    }


def assert_same(found, expected):
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def loaded(folder: Path, like: dict) -> tuple[int | None, dict]:
    boxes = {name: Box({}) for name in like}
    step = Checkpoints(folder, HERE).load(boxes)
    return step, {name: box.state for name, box in boxes.items()}


def test_round_trip_keeps_types_bits_and_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", HERE, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, some_state(step))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-00000020", "step-00000030"]
    step, state = loaded(tmp_path / "c", some_state(30))
    assert step == 30
    assert_same(state, {name: box.state for name, box in some_state(30).items()})


def test_nothing_there(tmp_path):
    assert Checkpoints(tmp_path / "no", HERE).load({"x": Box({})}) is None


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.json", "index.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_kept_and_skipped(tmp_path, file, damage):
    said = []
    checkpoints = Checkpoints(tmp_path, HERE, warn=said.append)
    for step in (1, 2):
        checkpoints.save(step, some_state(step))
    path = tmp_path / "step-00000002" / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    boxes = {name: Box({}) for name in some_state(1)}
    assert checkpoints.load(boxes) == 1
    assert_same({n: b.state for n, b in boxes.items()}, {n: b.state for n, b in some_state(1).items()})
    assert "step-00000002" in said[0] and (tmp_path / "damaged-step-00000002").exists()
    checkpoints.save(2, some_state(5))  # its place is free again
    assert loaded(tmp_path, some_state(5))[0] == 2


def test_one_that_was_never_renamed_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    checkpoints.save(1, some_state(1))
    (tmp_path / "step-00000001").rename(tmp_path / "partial-step-00000002")
    assert loaded(tmp_path, {})[0] is None
    checkpoints.save(3, some_state(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def test_an_index_cannot_point_outside(tmp_path):
    said = []
    checkpoints = Checkpoints(tmp_path / "run", HERE, warn=said.append)
    checkpoints.save(1, some_state(1))
    (tmp_path / "secret.json").write_text("{}")
    path = tmp_path / "run" / "step-00000001" / "index.json"
    index = json.loads(path.read_text())
    index["files"]["../../secret.json"] = {"bytes": 2, "sha256": ""}
    path.write_text(json.dumps(index))
    for _ in range(2):  # and no run starts from nothing in a folder whose checkpoints were lost
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be used"):
            checkpoints.load({})
    assert "secret" in said[0]


def test_a_checkpoint_of_another_version_is_an_error_and_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    for step in (1, 2):
        checkpoints.save(step, some_state(step))
    path = tmp_path / "step-00000002" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        checkpoints.load({})
    assert path.exists()


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    checkpoints = Checkpoints(tmp_path / "run", HERE, warn=lambda text: None)
    checkpoints.save(1, some_state(1))
    folder = tmp_path / "run" / "step-00000001"
    for name in ("rank-00000.safetensors", "rank-00000.json"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        index = json.loads((folder / "index.json").read_text())
        from muown_train.checkpoint import _seal

        index["files"][name] = _seal(folder / name)
        (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(Exception):  # noqa: B017
        checkpoints.load({})
    assert not (tmp_path / "exploded").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot write a checkpoint"):
        Checkpoints(tmp_path / "file" / "c", HERE).save(1, some_state(1))


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    return model


def optimizer_of(model: nn.Module) -> Combined:
    matrices, rest = param_groups(model)
    return Combined(Muown(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01))


def train(model, optimizer, steps: int) -> None:
    for i in range(steps):
        model(torch.arange(7)).square().sum().mul(1 + i).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_model_and_optimizer_go_on_as_if_nothing_had_happened(tmp_path):
    model = tied_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    Checkpoints(tmp_path, HERE).save(3, {"m": ModelState(model), "o": OptimizerState(optimizer, model)})
    other = tied_model()
    train(other, optimizer_of(other), 1)  # anything but the same weights
    fresh = optimizer_of(other)
    fresh.param_groups[0]["lr"] = 0.5
    assert Checkpoints(tmp_path, HERE).load({"m": ModelState(other), "o": OptimizerState(fresh, other)}) == 3
    assert fresh.param_groups[0]["lr"] == 0.5  # settings are the configuration's
    fresh.param_groups[0]["lr"] = 0.01
    assert other[2].weight is other[0].weight
    train(model, optimizer, 2)
    train(other, fresh, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "other, part",
    [
        (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5)), "1.weight has shape"),
        (nn.Sequential(nn.Embedding(7, 4)), "only in the checkpoint"),
        (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)), "missing from the checkpoint"),
    ],
)
def test_another_model_is_an_error(tmp_path, other, part):
    Checkpoints(tmp_path, HERE).save(1, {"m": ModelState(tied_model())})
    with pytest.raises(ValueError, match=part):
        Checkpoints(tmp_path, HERE).load({"m": ModelState(other)})


def _save_own(world: World, folder: Path) -> None:
    own = {"shared": torch.arange(4.0), "own": {str(world.rank): torch.full((2,), world.rank)}}
    Checkpoints(folder, world).save(7, {"x": Box(own | {"cursor": {str(world.rank): [world.rank]}})})


def _load_all(world: World, folder: Path) -> tuple:
    box = Box({})
    step = Checkpoints(folder, world).load({"x": box})
    return step, sorted(box.state["own"]), box.state["cursor"], box.state["shared"].tolist()


def _fail_on_one(world: World, folder: Path) -> str:
    def broken():
        raise OSError("no space left")

    try:
        Checkpoints(folder, world)._attempt(broken if world.rank == 1 else lambda: None)
    except OSError as error:
        return str(error)
    return "went on"


def test_the_union_of_three_ranks_loads_on_two(tmp_path):
    on_ranks(3, _save_own, tmp_path)
    expected = (7, ["0", "1", "2"], {"0": [0], "1": [1], "2": [2]}, [0.0, 1.0, 2.0, 3.0])
    assert on_ranks(2, _load_all, tmp_path) == [expected] * 2
    assert all("no space left" in text for text in on_ranks(2, _fail_on_one, tmp_path))
