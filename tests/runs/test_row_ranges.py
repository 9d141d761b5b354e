"""Files of a checkpoint that hold rows of tensors: they make whole tensors, or a sentence says what is wrong."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from muown_train.config.stored_files import Layout, join_rows
from muown_train.runs.checkpoint import HostCopy
from muown_train.runs.checkpoint_files import OtherFormatError, find_fault, publish, write_rank
from muown_train.runs.checkpoint_reader import open_files
from tests.helpers.hostile import vary_tree, write_in_checkpoint

Rank = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # tensors, and the entry `rows`


def write(folder: Path, *ranks: Rank, form: int = 2) -> Path:
    """Write a checkpoint of the tensors and rows of each rank."""
    partial, final, index = folder / "partial", folder / "step-00000001", {}
    partial.mkdir()
    for rank, (tensors, rows) in enumerate(ranks):
        rest = json.dumps({"rows": rows} if rows else {}).encode()
        index |= write_rank(partial, rank, *HostCopy(torch.device("cpu")).take(tensors), rest)
    publish(partial, final, {"format": form, "step": 1, "valid_loss": None, "about": {}, "files": index})
    return final


W = torch.arange(12.0).view(6, 2)
GOOD: list[Rank] = [
    ({"model/w": W[4:]}, {"model/w": [4, 6]}),
    ({"model/w": W[:1], "model/b": torch.ones(3)}, {"model/w": [0, 6]}),
    ({"model/w": W[1:4]}, {"model/w": [1, 6]}),
]


def test_rows_make_the_whole_in_any_order_of_files(tmp_path):
    checkpoint = write(tmp_path, *GOOD)
    assert find_fault(checkpoint) is None
    weights = open_files(checkpoint).load_weights()
    assert torch.equal(weights["w"], W) and torch.equal(weights["b"], torch.ones(3))


@pytest.mark.parametrize(
    "rank, changed, says",
    [
        (0, ({}, {}), "rows 4 to 5 of 'model/w' are missing"),
        (1, ({"model/b": torch.ones(3)}, {}), "rows 0 to 0 of 'model/w' are missing"),
        (2, ({"model/w": W[1:3]}, {"model/w": [1, 6]}), "rows 3 to 3 of 'model/w' are missing"),
        (2, ({"model/w": W[0:4]}, {"model/w": [0, 6]}), "row 0 of 'model/w' is in two files"),
        (2, ({"model/w": W[1:5]}, {"model/w": [1, 6]}), "row 4 of 'model/w' is in two files"),
        (0, ({"model/w": W[2:]}, {"model/w": [4, 6]}), "'model/w' has rows up to 7, and is said to have 6"),
        (
            0,
            ({"model/w": W[4:]}, {"model/w": [4, 9]}),
            r"shape \[6, 2\] in rank-00001, and .*shape \[9, 2\]",
        ),
        (0, ({"model/w": W[4:].double()}, {"model/w": [4, 6]}), "dtype F32 and shape .*, and dtype F64 and shape"),
        (0, ({"model/w": W[4:, :1]}, {"model/w": [4, 6]}), r"shape \[6, 2\] in rank-00001, and .*shape \[6, 1\]"),
        (0, ({"model/w": W[4:].view(2, 1, 2)}, {"model/w": [4, 6]}), r"shape \[6, 1, 2\] in rank-00000"),
        (0, ({"model/w": W[4:]}, {}), r"shape \[2, 2\] in rank-00000"),
        (0, ({"model/w": W}, {}), "row 0 of 'model/w' is in two files"),
        (0, ({"model/w": W[4:], "model/b": torch.ones(3)}, {"model/w": [4, 6]}), "row 0 of 'model/b' is in two files"),
        (0, ({"model/w": W[4:], "x": torch.tensor(1.0)}, {"model/w": [4, 6], "x": [0, 1]}), "'x', which is a scalar"),
        (0, ({"model/w": W[4:]}, {"model/w": [4, 6], "model/v": [0, 1]}), "rows of 'model/v', and has no such tensor"),
        (0, ({"model/w": W[4:]}, {"model/w": [4, 6, 1]}), "it has rows.model/w=.* must be a list of 2 items"),
        (0, ({"model/w": W[4:]}, {"model/w": [-2, 6]}), r"it has rows.model/w=\[-2, 6\], which must be"),
        (0, ({"model/w": W[4:]}, {"model/w": [4, 2**63]}), "it has rows.model/w=.* less than 2"),
        (0, ({"model/w": W[4:]}, {"model/w": [4.0, 6]}), r"it has rows.model/w=\[4.0, 6\], which must be"),
        (0, ({"model/w": W[4:]}, {"x\n": "y"}), "it has rows.x\n='y', which must be"),
        (0, ({"model/w": W[4:]}, [["model/w", 4, 6]]), "it holds a list, not an object"),
        (0, ({"model/w": torch.empty(2**20, 0)}, {"model/w": [4, 2**62]}), r"shape \[4611686018427387904, 0\]"),
    ],
)
def test_rows_that_make_no_whole_are_damage(tmp_path, rank, changed, says):
    ranks = [*GOOD]
    ranks[rank] = changed
    checkpoint = write(tmp_path, *ranks)
    fault = str(find_fault(checkpoint))
    assert re.search(says, fault), fault
    with pytest.raises(ValueError, match=r"cannot be read: .* cannot be used: "):
        open_files(checkpoint)


def test_scalars_in_two_files_are_damage(tmp_path):
    one = {"optimizer/w/step": torch.tensor(1.0)}
    assert "row 0 of 'optimizer/w/step' is in two files" in str(find_fault(write(tmp_path, (one, {}), (one, {}))))


def test_a_weight_that_is_no_tensor_is_damage(tmp_path):
    checkpoint = write(tmp_path, ({}, {}), form=1)
    write_in_checkpoint(checkpoint / "rank-00000.json", b'{"model/w": 5}')
    assert "it has model/w=5, which must be in a safetensors file" in str(find_fault(checkpoint))


def test_the_name_of_the_entry_is_free_where_files_hold_no_rows(tmp_path):
    checkpoint = write(tmp_path, ({"model/w": W}, {"model/w": [4, 6]}), form=1)
    assert find_fault(checkpoint) is None
    assert torch.equal(open_files(checkpoint).tensors["model/w"][...], W)


def test_no_entry_of_a_stranger_ends_in_a_traceback(tmp_path):
    checkpoint, draw, whole = write(tmp_path, *GOOD), random.Random(0), 0
    file = checkpoint / "rank-00001.json"
    content = json.loads(file.read_text())
    for _, varied in vary_tree(content, draw, 60):
        write_in_checkpoint(file, varied)
        try:
            fault = find_fault(checkpoint)
        except OtherFormatError as error:
            fault = str(error)
        if fault is None:
            whole += 1
            assert torch.equal(open_files(checkpoint).load_weights()["w"], W)
        else:
            assert len(fault) < 500 and fault.startswith(("rank-00001.json cannot be used", "its state cannot be used"))
    assert whole < 20


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, tuple[list[int], list[tuple[int, int, str]]]], int]:
    """Shapes of tensors, and of each the parts into which files divide it."""
    count = draw(st.integers(1, 4))
    tensors = {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        shape = draw(st.lists(st.integers(1, 6), max_size=3))
        borders = sorted(draw(st.sets(st.integers(1, max(shape[0] - 1, 1)), max_size=count - 1))) if shape else []
        borders = [border for border in borders if border < shape[0]]
        files = draw(st.permutations([f"rank-{i}" for i in range(count)]))
        edges = [0, *borders, shape[0] if shape else 1]
        tensors[name] = shape, [(a, b, file) for a, b, file in zip(edges, edges[1:], files, strict=False)]
    return tensors, count


def describe(tensors: Mapping[str, Any], count: int) -> tuple[dict[str, dict], dict[str, dict]]:
    """What the files of a checkpoint say of their tensors."""
    held: dict[str, dict] = {f"rank-{i}": {} for i in range(count)}
    rows: dict[str, dict] = {f"rank-{i}": {} for i in range(count)}
    for name, (shape, parts) in tensors.items():
        for first, stop, file in parts:
            held[file][name] = ("F32", [stop - first, *shape[1:]] if shape else [])
            if len(parts) > 1:
                rows[file][name] = [first, shape[0]]
    return held, rows


@given(cut_tensors())
def test_any_parts_are_joined(cut):
    tensors, count = cut
    assert join_rows(*describe(tensors, count)) == {
        name: Layout("F32", shape, parts) for name, (shape, parts) in tensors.items()
    }


def list_changes(tensors: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Of each part another first row or another end, by its tensor, number and place."""
    for name, (_, parts) in tensors.items():
        for number in range(len(parts) if len(parts) > 1 else 0):
            yield from ((name, number, place) for place in (0, 1))


@given(cut_tensors(), st.data(), st.sampled_from([-1, 1, 2]))
def test_any_other_border_is_refused(cut, data, by):
    tensors, count = cut
    changes = list(list_changes(tensors))
    assume(changes)
    name, number, place = data.draw(st.sampled_from(changes))
    shape, parts = tensors[name]
    part = list(parts[number])
    part[place] += by
    assume(0 <= part[0] < part[1])
    changed = {**tensors, name: (shape, [*parts[:number], tuple(part), *parts[number + 1 :]])}
    with pytest.raises(ValueError, match=f"'{name}' (is|are|has) "):
        join_rows(*describe(changed, count))


@settings(max_examples=30)
@given(cut_tensors(), st.data())
def test_any_rows_of_files_are_read(tmp_path_factory, cut, data):
    tensors, count = cut
    torch.manual_seed(0)
    wholes = {name: torch.randn(shape).bfloat16() for name, (shape, _) in tensors.items()}
    held, rows = describe(tensors, count)
    ranks: list[Rank] = []
    for file, names in held.items():
        firsts = {name: rows[file].get(name, [0])[0] for name in names}
        own = {
            name: wholes[name][firsts[name] : firsts[name] + shape[0]] if shape else wholes[name]
            for name, (_, shape) in names.items()
        }
        ranks.append((own, rows[file]))
    checkpoint = write(tmp_path_factory.mktemp("rows"), *ranks)
    assert find_fault(checkpoint) is None
    for name, stored in open_files(checkpoint).tensors.items():
        assert torch.equal(stored[...], wholes[name]) and stored.shape == wholes[name].shape
        if stored.shape:
            row = st.integers(0, stored.shape[0])
            first, stop = sorted((data.draw(row), data.draw(row)))
            assert torch.equal(stored[first:stop], wholes[name][first:stop])
