"""Checkpoints: complete or absent, by parameter name, for any number of ranks, never unpickled."""

import errno
import hashlib
import io
import os
import pickle
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from muown_train.optim import Combined, Muown, param_groups, shard
from muown_train.runs.checkpoint import Checkpoints, assign_writers
from muown_train.runs.checkpoint_files import decode_index
from muown_train.runs.checkpoint_reader import StoredTensor, read_newest_metadata
from muown_train.runs.state import ModelState, OptimizerState, flatten, unflatten
from muown_train.runtime.distributed import World
from tests.helpers.checkpoints import rewrite_index
from tests.helpers.ranks import on_ranks

HERE = World(0, 1, torch.device("cpu"))


class Box:
    """A Stateful of anything."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = unflatten({key: read(value) for key, value in flatten(state).items()})


def read(value: Any) -> Any:
    """What a leaf of a state that is loaded stands for."""
    return value[...] if isinstance(value, StoredTensor) else value


leaves = st.one_of(st.integers(), st.none(), st.lists(st.integers(), max_size=2), st.just({}))
keys = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=3)


@given(
    st.dictionaries(keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, min_size=1), max_leaves=9))
)
def test_flatten_and_back(state):
    assert unflatten(flatten(state)) == state


def test_a_rank_that_holds_nothing_takes_nothing_from_the_others():
    flat = [{"optimizer/w/momentum": 1}, {"optimizer": {}}]
    for first, second in (flat, flat[::-1]):
        assert unflatten(first | second) == {"optimizer": {"w": {"momentum": 1}}}


sizes_of_ranks = st.lists(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=1), st.just(None)), min_size=1, max_size=4
)


@given(sizes_of_ranks, st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 1000)))
def test_one_holder_writes_each_value_and_all_write_about_as_much(held, sizes):
    held = [{key: sizes.get(key) for key in of_rank} for of_rank in held]
    shared = {f"weight {i}": 100 * (i % 5) for i in range(9)}
    held = [of_rank | shared for of_rank in held]
    writers = assign_writers(held)
    assert set(writers) == set().union(*held)
    for key, rank in writers.items():
        assert key in held[rank]
        if held[rank][key] is None:  # counters and the like, of which the main rank's say whether a run can go on
            assert not any(key in of_rank for of_rank in held[:rank])
    loads = [sum(size or 0 for key, size in of_rank.items() if writers[key] == i) for i, of_rank in enumerate(held)]
    own = [
        sum(size or 0 for key, size in of_rank.items() if sum(key in other for other in held) == 1) for of_rank in held
    ]
    largest = max(size or 0 for of_rank in held for size in of_rank.values())
    assert max(loads) <= max([*own, sum(loads) / len(held)]) + largest


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
        checkpoints.save(step, some_state(step), wait=True)
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
        checkpoints.save(step, some_state(step), wait=True)
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
    checkpoints.save(2, some_state(5), wait=True)  # its place is free again
    assert loaded(tmp_path, some_state(5))[0] == 2


def test_one_that_was_never_renamed_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    checkpoints.save(1, some_state(1), wait=True)
    (tmp_path / "step-00000001").rename(tmp_path / "partial-step-00000002")
    assert loaded(tmp_path, {})[0] is None
    checkpoints.save(3, some_state(3), wait=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def test_an_index_cannot_point_outside(tmp_path):
    said = []
    checkpoints = Checkpoints(tmp_path / "run", HERE, warn=said.append)
    checkpoints.save(1, some_state(1), wait=True)
    (tmp_path / "secret.json").write_text("{}")
    path = tmp_path / "run" / "step-00000001" / "index.json"
    rewrite_index(path, lambda index: index["files"].update({"../../secret.json": {"bytes": 2, "sha256": ""}}))
    for _ in range(2):  # and no run starts from nothing in a folder whose checkpoints were lost
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be used"):
            checkpoints.load({})
    assert "secret" in said[0]


def test_a_checkpoint_of_another_version_is_an_error_and_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    for step in (1, 2):
        checkpoints.save(step, some_state(step), wait=True)
    path = tmp_path / "step-00000002" / "index.json"
    rewrite_index(path, lambda index: index.update(format=3))
    with pytest.raises(ValueError, match="it has format 3, this version of the program reads 1 and 2"):
        checkpoints.load({})
    assert path.exists()


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    checkpoints = Checkpoints(tmp_path / "run", HERE, warn=lambda text: None)
    checkpoints.save(1, some_state(1), wait=True)
    folder = tmp_path / "run" / "step-00000001"
    for name in ("rank-00000.safetensors", "rank-00000.json"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        data = (folder / name).read_bytes()
        file = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        rewrite_index(folder / "index.json", lambda index, file=file: index["files"].update(file))
    with pytest.raises(Exception):  # noqa: B017
        checkpoints.load({})
    assert not (tmp_path / "exploded").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot write a checkpoint"):
        Checkpoints(tmp_path / "file" / "c", HERE).save(1, some_state(1), wait=True)


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
    Checkpoints(tmp_path, HERE).save(3, {"m": ModelState(model), "o": OptimizerState(optimizer, model)}, wait=True)
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
    Checkpoints(tmp_path, HERE).save(1, {"m": ModelState(tied_model())}, wait=True)
    with pytest.raises(ValueError, match=part):
        Checkpoints(tmp_path, HERE).load({"m": ModelState(other)})


# --- several ranks: four processes started once, of which parts take the role of fewer --------------------------------


@dataclass(frozen=True)
class Part(World):
    """The first ranks of a larger world."""

    group: Any = None

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def trained_state(part: Part, sharded: bool, steps: int) -> tuple[nn.Module, Combined]:
    model = tied_model()
    optimizer = optimizer_of(model)
    if sharded:
        shard(optimizer, part.group)
    train(model, optimizer, steps)
    return model, optimizer


def union(part: Part, model: nn.Module, optimizer: Combined) -> dict[str, list]:
    """All that the ranks hold, as lists; where several have a value they agree."""
    found: dict[str, list] = {}
    state = {"m": ModelState(model).state_dict(), "o": OptimizerState(optimizer, model).state_dict()}
    tensors = {key: value.tolist() for key, value in flatten(state).items() if isinstance(value, torch.Tensor)}
    for of_rank in part.gather(tensors):
        assert all(found.get(key, value) == value for key, value in of_rank.items())
        found |= of_rank
    return found


def save_here(part: Part, folder: Path, sharded: bool) -> dict[str, list]:
    model, optimizer = trained_state(part, sharded, steps=3)
    state = {"m": ModelState(model), "o": OptimizerState(optimizer, model), "rank": Box({str(part.rank): [part.rank]})}
    Checkpoints(folder, part).save(3, state, wait=True)
    return union(part, model, optimizer)


def load_here(part: Part, folder: Path, sharded: bool) -> tuple:
    model, optimizer = trained_state(part, sharded, steps=1)
    box = Box({})
    step = Checkpoints(folder, part).load({"m": ModelState(model), "o": OptimizerState(optimizer, model), "rank": box})
    return step, union(part, model, optimizer), box.state


def fail_on_one(part: Part, folder: Path) -> list:
    """Rank 1 cannot write more than some bytes of the second checkpoint."""
    checkpoints = Checkpoints(folder, part)
    state = {"x": Box({str(part.rank): torch.ones(1000)})}
    checkpoints.save(1, state, wait=True)
    if part.rank == 1:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    checkpoints.save(2, state)
    if part.rank == 1:
        checkpoints._writer.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    try:
        checkpoints.settle(wait=True)
        raised = None
    except OSError as error:
        raised = str(error)
    settled, newest = checkpoints.settle(), checkpoints.open_newest().step
    return [raised, settled, sorted(path.name for path in folder.iterdir()), newest]


def everything(world: World, folder: Path) -> dict:
    saved, loaded, failed = {}, {}, None
    parts = {n: Part(world.rank, n, world.device, group=dist.new_group(range(n))) for n in (1, 2, 4)}
    kinds = [(1, False), (2, False), (2, True), (4, True)]
    for n, sharded in kinds:
        if world.rank < n:
            saved[n, sharded] = save_here(parts[n], folder / f"{n}{sharded}", sharded)
    for n, sharded in kinds:
        dist.barrier()
        for source in kinds if world.rank < n else ():
            loaded[source, (n, sharded)] = load_here(parts[n], folder / f"{source[0]}{source[1]}", sharded)
    if world.rank < 2:
        failed = fail_on_one(parts[2], folder / "failed")
    return {"saved": saved, "loaded": loaded, "failed": failed}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(4, everything, folder)


@pytest.mark.slow
def test_saved_on_1_2_4_ranks_it_loads_on_1_2_4_sharded_or_replicated(ranks):
    _, found = ranks
    seen = 0
    for of_rank in found:
        for (source, _), (step, state, numbers) in of_rank["loaded"].items():
            assert step == 3
            assert state == found[0]["saved"][source]
            assert numbers == {str(rank): [rank] for rank in range(source[0])}
            seen += 1
    assert seen == 4 * (1 + 2 + 2 + 4)


@pytest.mark.slow
def test_each_owner_writes_its_own_part(ranks):
    folder, _ = ranks
    keys = [set(load_file(path)) for path in sorted((folder / "4True" / "step-00000003").glob("*.safetensors"))]
    assert len(keys) == 4 and sum(map(len, keys)) == len(set().union(*keys))
    assert sum(any(key.startswith("o/") for key in part) for part in keys) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4True", "2False"])
def test_several_ranks_write_weights_that_all_hold(ranks, name):
    files = (ranks[0] / name / "step-00000003").glob("*.safetensors")
    assert sum(any(key.startswith("m/") for key in load_file(path)) for path in files) > 1


@pytest.mark.slow
def test_one_rank_that_cannot_write_is_an_error_on_all(ranks):
    _, found = ranks
    for raised, settled, names, newest in [of_rank["failed"] for of_rank in found[:2]]:
        assert "cannot write a checkpoint to" in raised and "File too large" in raised
        assert settled and names == ["step-00000001"] and newest == 1


def test_no_flipped_bit_of_an_index_goes_unnoticed(tmp_path):
    metadata = {"config": {"seed": 3, "model": {"dim": 32}}}
    Checkpoints(tmp_path, HERE, metadata=metadata).save(55, some_state(1), loss=2.5, wait=True)
    content = (tmp_path / "step-00000055" / "index.json").read_bytes()
    assert decode_index(content)["step"] == 55
    unnoticed = 0
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            try:
                decode_index(bytes(flipped))
                unnoticed += 1
            except ValueError:
                pass
    assert len(content) > 300 and unnoticed == 0


@pytest.mark.parametrize("way", ["the folder is renamed", "a digit of the step", "the seed", "the format"])
def test_a_checkpoint_whose_index_was_changed_is_set_aside(tmp_path, way):
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, HERE, warn=said.append, metadata={"config": {"seed": 3}})
    for step in (4, 55):
        checkpoints.save(step, some_state(step), wait=True)
    newest = tmp_path / "step-00000055"
    if way == "the folder is renamed":
        newest.rename(tmp_path / "step-99999999")
    else:
        old, new = {
            "a digit of the step": (b'"step": 55', b'"step": 15'),
            "the seed": (b'"seed": 3', b'"seed": 7'),
            "the format": (b'"format": 1', b'"format": 3'),
        }[way]
        text = (newest / "index.json").read_bytes()
        assert text.count(old) == 1
        (newest / "index.json").write_bytes(text.replace(old, new))
    assert read_newest_metadata(tmp_path) == {"config": {"seed": 3}}
    assert checkpoints.load({name: Box({}) for name in some_state(4)}) == 4 and "is damaged" in said[0]
    assert len(list(tmp_path.glob("damaged-step-*"))) == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES, errno.ENFILE])
@pytest.mark.parametrize("name", ["index.json", "rank-00000.json", "rank-00000.safetensors", "the folder"])
def test_a_file_that_cannot_be_read_now_is_not_damage(tmp_path, monkeypatch, number, name):
    checkpoints = Checkpoints(tmp_path, HERE)
    for step in (1, 2):
        checkpoints.save(step, some_state(step), wait=True)
    before = sorted(tmp_path.rglob("*"))

    def refuse(real):
        def access(path, *args, **kwargs):
            wanted = tmp_path if name == "the folder" else tmp_path / "step-00000002" / name
            if not isinstance(path, int) and Path(path) == wanted:
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        return access

    with monkeypatch.context() as patched:
        for module, function in ((io, "open"), (os, "listdir"), (os, "scandir")):
            patched.setattr(module, function, refuse(getattr(module, function)))
        with pytest.raises(OSError) as caught:
            checkpoints.load({})
        assert caught.value.errno == number
    assert sorted(tmp_path.rglob("*")) == before
    assert loaded(tmp_path, some_state(2))[0] == 2


def test_a_file_where_the_folder_should_be_is_found_before_anything_is_saved(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="must be the folder of the checkpoints, and is a file"):
        Checkpoints(tmp_path / "checkpoints", HERE).load({})
    with pytest.raises(ValueError, match="and is a file"):
        read_newest_metadata(tmp_path / "checkpoints")
