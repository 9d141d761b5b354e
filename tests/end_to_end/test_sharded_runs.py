"""Whole runs with a sharded optimizer: the same losses, and resumed on any number of ranks, sharded or not."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, trained

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
        train(world, corpus, out / "replicated", "tokens=3072", "shard_optimizer=false"),
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
        assert one | other == of_file["replicated", "rank-00000"]


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


def test_the_setting_must_be_true_or_false(corpus, tmp_path):
    with pytest.raises(ValueError, match="shard_optimizer='maybe' must be true or false"):
        built(corpus, tmp_path, "shard_optimizer=maybe")
