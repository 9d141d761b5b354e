"""Which ranks hold a model together, and what is said of it."""

import pytest
import torch

from muown_train.models.parallel import find_copies
from muown_train.runs import manifest
from muown_train.runtime.distributed import World
from muown_train.runtime.replica_check import find_divergent_ranks, hash_tensor
from muown_train.training.divergence import find_infinite_weight
from tests.helpers.runs import built


class PlayedWorld(World):
    """A rank among others that are only played: `answers` is what the ranks give when objects are gathered."""

    answers: list

    def gather(self, value):
        return self.answers


def play(*answers: object) -> PlayedWorld:
    world = PlayedWorld(0, len(answers), torch.device("cpu"))
    object.__setattr__(world, "answers", list(answers))
    return world


@pytest.mark.parametrize(
    ("parallel", "nodes", "copies"),
    [
        ("ddp", "aabb", None),
        ("fsdp", "a", None),
        ("hsdp", "a", None),
        ("fsdp", "aabb", [[0, 1, 2, 3]]),
        ("hsdp", "aaa", [[0, 1, 2]]),
        ("hsdp", "aabb", [[0, 1], [2, 3]]),
        ("hsdp", "abab", [[0, 2], [1, 3]]),
        ("hsdp", "abc", [[0], [1], [2]]),
    ],
)
def test_ranks_that_hold_a_copy_together(parallel, nodes, copies):
    assert find_copies(parallel, play(*nodes)) == copies


def test_nodes_of_unequal_size_are_a_sentence():
    message = "parallel=hsdp needs as many ranks on each node, and the 2 nodes have 2, 1: "
    with pytest.raises(ValueError, match=message):
        find_copies("hsdp", play("a", "a", "b"))


def test_a_wrong_kind_is_a_sentence(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"parallel='fsdp2' must be ddp, fsdp or hsdp \(did you mean fsdp\?\)"):
        built(corpus, tmp_path, "parallel=fsdp2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_on_one_rank_it_is_plain_training(corpus, tmp_path, parallel):
    run = built(corpus, tmp_path, f"parallel={parallel}")
    run.close()
    assert run.trainer.replica is run.model and not run.trainer.parallel.is_sharded
    assert run.metadata["parallel"] == {"kind": "ddp"}


def hashes(*values: float) -> list[int]:
    return [int(hash_tensor(torch.tensor([value]))) for value in values]


@pytest.mark.parametrize(
    ("values", "copies", "said"),
    [
        ((1, 2, 1, 2), [[0, 1], [2, 3]], None),
        ((1, 2, 1, 3), [[0, 1], [2, 3]], "the weights of w on rank 3 are not those of rank 1"),
        ((1, 1, 2, 2), [[0, 2], [1, 3]], None),
        ((1, 2, 3, 4), [[0, 1, 2, 3]], None),
        ((1, 1, 5, 1), [[0], [1], [2], [3]], "the weights of w on rank 2 are not those of rank 0"),
    ],
)
def test_only_ranks_with_the_same_rows_are_compared(values, copies, said):
    world = play(*(hashes(value) for value in values))
    assert find_divergent_ranks([("w", torch.ones(1))], world, copies) == said


def test_an_infinity_on_another_rank_is_seen_by_all():
    class Others(World):
        """The other rank has one odd number in its rows of the second parameter."""

        def sum(self, values):
            return values + torch.tensor([0, 1])

    model = torch.nn.Linear(2, 2)
    assert find_infinite_weight(model, 7, World(0, 1, torch.device("cpu"))) is None
    assert (
        find_infinite_weight(model, 7, Others(0, 2, torch.device("cpu"))) == "bias holds NaN or infinity after step 7"
    )


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        (
            {"kind": "fsdp", "copies": 1, "parts": 8, "rounds": []},
            "  fsdp: the model is spread over 8 ranks, whatever shard_optimizer is",
        ),
        (
            {"kind": "hsdp", "copies": 2, "parts": 4, "rounds": ["this", "that"]},
            "  hsdp: 2 copies of the model are each spread over 4 ranks, whatever shard_optimizer is; unlike ddp it "
            "rounds to bfloat16 this and that",
        ),
    ],
)
def test_the_head_of_the_output_names_it(tmp_path, capsys, parallel, line):
    settings = {"steps": 1, "batch_tokens": 1, "autocast": False}
    head = {"parameters": 1, "ranks": 8, "device": "X", "device_type": "cpu", "attention": None, "network": None}
    head |= {"settings": settings, "data": {}, "init_from": None, "groups": [], "parallel": parallel}
    manifest.show(head, tmp_path)
    assert capsys.readouterr().out.splitlines()[3] == line
