"""Runs whose ranks hold rows of weights: resumed on other numbers of ranks, and read by everything that reads runs."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from muown_train.analysis.checkpoints import read_magnitudes
from muown_train.runs.averaging import average_weights, open_checkpoints
from muown_train.runs.checkpoint_files import find_fault
from muown_train.runs.checkpoint_reader import open_checkpoint
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import losses, trained

pytestmark = pytest.mark.slow
# the lr is constant since the budget, and so the schedule, changes from part to part
COMMON = ("micro_batch=1", "batch_tokens=384", "schedule=constant", "schedule.warmup=0", "optim.lr=0.01")
COMMON = (*COMMON, "eval_every=100", "save_every=100", "keep_checkpoints=9")
# how the run is trained up to each step: replicas with a sharded optimizer, rows over ranks, both, one process
PARTS = [(4, 2, "ddp"), (8, 3, "fsdp"), (12, 4, "hsdp"), (16, 1, "ddp"), (20, 3, "fsdp")]


def train(world: World, corpus: Path, out: Path, *words: str) -> dict[str, Tensor]:
    """Train a run, two ranks of which are a node; return its weights, whole."""
    os.environ["GROUP_RANK"] = str(world.rank // 2)
    run = trained(corpus, out, *COMMON, *words, world=world)
    return {
        name: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in run.model.named_parameters()
    }


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """The folder of a run that one process trained, of one that many did, and the weights of the latter by step."""
    out, weights = tmp_path_factory.mktemp("rows"), {}
    (out / "many").mkdir()
    trained(corpus, out / "one", *COMMON, f"tokens={384 * PARTS[-1][0]}")
    for step, size, parallel in PARTS:
        words = (f"tokens={384 * step}", f"parallel={parallel}")
        weights[step] = on_ranks(size, train, corpus, out / "many", *words)[0]
    return out, weights


def test_its_losses_are_those_of_one_process(runs):
    out, _ = runs
    found = losses(out / "many" / "run")
    assert len(found) == 20 and found == pytest.approx(losses(out / "one" / "run"), abs=1e-3)


def test_every_checkpoint_holds_the_weights_that_the_ranks_had(runs):
    out, weights = runs
    for step, size, parallel in PARTS:
        saved = open_run(out / "many" / "run", step)
        assert find_fault(saved.checkpoint) is None
        index = json.loads((saved.checkpoint / "index.json").read_text())
        assert index["format"] == (1 if parallel == "ddp" else 2) and len(index["files"]) == 2 * size
        found = saved.load_checked_weights()
        assert found.keys() == weights[step].keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights[step].items())


def test_its_readers_see_whole_tensors(runs, tmp_path):
    out, weights = runs
    run, step = out / "many" / "run", 12
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    average = average_weights(open_checkpoints(run, [8, step]), [0.5, 0.5])
    for name, weight in weights[step].items():
        assert torch.equal(average[name], ((weights[8][name].double() + weight.double()) / 2).float())
    export_run(open_run(run, step), tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["model.layers.1.mlp.down_proj.weight"], weights[step]["blocks.1.mlp.out.weight"])
    for name, magnitudes in read_magnitudes(open_checkpoint(checkpoint)).items():
        torch.testing.assert_close(magnitudes.g.abs(), weights[step][name].norm(dim=1))
    model = open_run(run, step).load_model()
    assert all(torch.equal(p, weights[step][name]) for name, p in model.named_parameters())


def test_other_runs_begin_from_its_weights(runs, corpus, tmp_path):
    out, weights = runs
    source = out / "many" / "run" / "checkpoints" / "step-00000012"
    words = ("name=begun", "tokens=384", "optim.lr=1e-9", "parallel=fsdp", f"init_from={source}")
    for found in on_ranks(3, train, corpus, tmp_path, *words):
        for name, weight in weights[12].items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5)
