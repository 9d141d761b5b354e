"""Whole runs with a sharded optimizer: the same losses, and resumed on any number of ranks, sharded or not."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.multiprocessing import ProcessExitedException

from muown_train.optim.sharding import ALIGNMENT
from muown_train.runs import checkpoint_files
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, make_config, trained, wait_until

# how far losses of one number of ranks may be from those of another: gradients are rounded otherwise, which turns
# SOAP's eigenvectors of averages that lack rank
OPTIMS = {"muown": 1e-3, "adamw": 1e-3, "soap": 0.1}
# batches of 1, 2 and 3 ranks; the lr is constant since the budget, and so the schedule, changes from part to part
CONSTANT = ("batch_tokens=384", "schedule=constant", "schedule.warmup=0", "optim.lr=0.01", "eval_every=100")


def train(world: World, corpus: Path, out: Path, *overrides: str) -> list[tuple[list[float], int]]:
    """For each optimizer the weights' sums and the elements of the state on this rank."""
    found = []
    for optim in OPTIMS:
        run = trained(corpus, out / optim, f"optim={optim}", *CONSTANT, *overrides, world=world)
        state = run.trainer.optimizer.state.values()
        elements = sum(value.numel() for values in state for value in values.values())
        found.append(([float(p.detach().double().sum()) for p in run.model.parameters()], elements))
    return found


def two_ranks(world: World, corpus: Path, out: Path) -> list:
    """A replicated run of 8 steps, a sharded one, and 4 sharded steps of one to be resumed."""
    return [
        train(world, corpus, out / "replicated", "tokens=3072", "shard_optimizer=none"),
        train(world, corpus, out / "sharded", "tokens=3072"),
        train(world, corpus, out / "resumed", "tokens=1536"),
    ]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """The folder of runs, and what the two ranks found."""
    out = tmp_path_factory.mktemp("sharded")
    return out, on_ranks(2, two_ranks, corpus, out)


@pytest.mark.slow
def test_sharded_training_is_replicated_training(runs):
    out, (first, second) = runs
    for i, optim in enumerate(OPTIMS):
        assert len(losses(out / "sharded" / optim / "run")) == 8
        expected = losses(out / "replicated" / optim / "run")
        assert losses(out / "sharded" / optim / "run") == pytest.approx(expected, abs=1e-4)
        (_, whole), (_, whole_too) = first[0][i], second[0][i]
        (weights, share), (weights_too, share_too) = first[1][i], second[1][i]
        assert weights == weights_too
        assert whole == whole_too == share + share_too and 0 < share < whole


@pytest.mark.slow
def test_the_union_of_what_ranks_wrote_is_all_the_state(runs):
    out, _ = runs
    for optim in OPTIMS:
        of_file = {}
        for kind in ("sharded", "replicated"):
            folder = out / kind / optim / "run" / "checkpoints" / "step-00000008"
            for path in folder.glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    of_file[kind, path.stem] = {key for key in file.keys() if key.startswith("optimizer/")}  # noqa: SIM118
        one, other = of_file["sharded", "rank-00000"], of_file["sharded", "rank-00001"]
        assert one and other and not one & other
        # every rank of a replicated run holds all, and they deal out what they write
        assert one | other == of_file["replicated", "rank-00000"] | of_file["replicated", "rank-00001"]


@pytest.mark.long
def test_begun_on_two_ranks_it_goes_on_on_three_and_then_on_one(corpus, tmp_path, runs):
    out, _ = runs
    here = World(0, 1, torch.device("cpu"))
    on_ranks(3, train, corpus, out / "resumed", "tokens=3072")
    train(here, corpus, out / "resumed", "tokens=4608")
    train(here, corpus, tmp_path, "tokens=4608")
    for optim, tolerance in OPTIMS.items():
        found = losses(out / "resumed" / optim / "run")
        assert len(found) == 12
        assert found == pytest.approx(losses(tmp_path / optim / "run"), abs=tolerance)


@pytest.mark.slow
def test_begun_on_one_rank_it_goes_on_on_two(corpus, tmp_path, runs):
    train(World(0, 1, torch.device("cpu")), corpus, tmp_path, "tokens=1536")
    on_ranks(2, train, corpus, tmp_path, "tokens=3072")
    for optim, tolerance in OPTIMS.items():
        expected = losses(runs[0] / "sharded" / optim / "run")
        assert losses(tmp_path / optim / "run") == pytest.approx(expected, abs=tolerance)


ON_FOUR = ("optim=muown", *CONSTANT, "micro_batch=1")
EVERYONE = (0, 1, 2, 3)
# the scope, the node of each of four ranks, and the ranks that get what each rank sends; none where it sends nothing
SCOPES = {
    "nothing shared": ("none", (0, 0, 1, 1), [None] * 4),
    "all ranks": ("all", (0, 0, 1, 1), [EVERYONE] * 4),
    "two nodes of two": ("node", (0, 0, 1, 1), [(0, 1), (0, 1), (2, 3), (2, 3)]),
    "one node": ("node", (0, 0, 0, 0), [EVERYONE] * 4),
    "nodes of three and one": ("node", (0, 0, 0, 1), [EVERYONE] * 4),
    "nodes of one rank": ("node", (0, 1, 2, 3), [None] * 4),
}


def train_in_scopes(world: World, corpus: Path, out: Path) -> dict[str, tuple]:
    """For each scope the bytes of the weights, of all messages with the ranks that get them, weights and state."""
    found = {}
    for name, (scope, nodes, _) in SCOPES.items():
        os.environ["GROUP_RANK"] = str(nodes[world.rank])
        sent: list[tuple[int, tuple[int, ...]]] = []

        def broadcast(tensor, group=None, sent=sent, original=dist.broadcast, **kwargs):
            sent.append((tensor.nbytes, tuple(dist.get_process_group_ranks(group or dist.group.WORLD))))
            return original(tensor, group=group, **kwargs)

        run = built(corpus, out / name, *ON_FOUR, "tokens=3072", f"shard_optimizer={scope}", world=world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "broadcast", broadcast)
            run.trainer.fit()
        run.close()
        padded = sum(-(-p.nbytes // ALIGNMENT) * ALIGNMENT for p in run.model.parameters())
        weights = [float(p.detach().double().sum()) for p in run.model.parameters()]
        elements = sum(v.numel() for state in run.trainer.optimizer.state.values() for v in state.values())
        found[name] = (padded, sent, weights, elements)
    return found


@pytest.mark.slow
def test_each_rank_gets_all_weights_once_a_step_from_the_ranks_of_its_node_alone(corpus, tmp_path):
    found = on_ranks(4, train_in_scopes, corpus, tmp_path)
    expected = losses(tmp_path / "nothing shared" / "run")
    assert len(expected) == 8
    for name, (_, _, receivers) in SCOPES.items():
        assert losses(tmp_path / name / "run") == pytest.approx(expected, abs=1e-4)
        assert len({str(of_rank[name][2]) for of_rank in found}) == 1  # the weights of all ranks are the same
        for of_rank, ranks in zip(found, receivers, strict=True):
            size, sent, _, elements = of_rank[name]
            assert {to for _, to in sent} == ({ranks} if ranks else set())
            assert sum(nbytes for nbytes, _ in sent) == (8 * size if ranks else 0)
            assert (elements < of_rank["nothing shared"][3]) == bool(ranks)


def die_while_saving(world: World, corpus: Path, out: Path) -> None:
    """Train on four ranks until some have written their part of the second checkpoint, and end as a kill does."""
    write = checkpoint_files.write_rank

    def write_rank(folder: Path, rank: int, *rest):
        if folder.name == "partial-step-00000008" and rank == 2:
            time.sleep(1000)
        return write(folder, rank, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "write_rank", write_rank)
        run = built(corpus, out, *ON_FOUR, "tokens=6144", "save_every=4", world=world)
        while run.trainer.step < 8:
            run.trainer.step_metrics.add(run.trainer.train_step())
            if run.trainer.step % 4 == 0:
                run.trainer.handle_boundary(None)
                run.trainer.checkpoints.settle(wait=run.trainer.step == 4)
        wait_until(lambda: len(list((out / "run/checkpoints/partial-step-00000008").glob("*.safetensors"))) >= 3)
        os._exit(9)


@pytest.mark.slow
def test_a_kill_while_four_ranks_save_loses_nothing_that_three_go_on_from(corpus, tmp_path):
    with pytest.raises(ProcessExitedException):
        on_ranks(4, die_while_saving, corpus, tmp_path / "killed")
    kept = tmp_path / "killed/run/checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["partial-step-00000008", "step-00000004"]
    assert len(list((kept / "step-00000004").glob("*.safetensors"))) == 4
    on_ranks(3, train_on, corpus, tmp_path / "killed")
    train_on(World(0, 1, torch.device("cpu")), corpus, tmp_path / "whole")
    expected = losses(tmp_path / "whole" / "run")
    assert len(expected) == 16
    assert losses(tmp_path / "killed" / "run") == pytest.approx(expected, abs=OPTIMS["muown"])


def train_on(world: World, corpus: Path, out: Path) -> None:
    """Train the run that `die_while_saving` began to its end."""
    trained(corpus, out, *ON_FOUR, "tokens=6144", "save_every=4", world=world)


def test_the_setting_names_who_shares_the_work(corpus, tmp_path):
    with pytest.raises(ValueError, match="shard_optimizer='maybe' must be node, all or none"):
        built(corpus, tmp_path, "shard_optimizer=maybe")
    for earlier, today in (("true", "node"), ("false", "none")):
        assert make_config(corpus, tmp_path, f"shard_optimizer={earlier}").shard_optimizer == today
