"""Every architecture besides our GPT: 50 steps on a CPU, a kill, the rest, and a reader of the run."""

import math

import pytest
import torch

from muown_train.config.compose import load_config
from muown_train.runs.saved_run import open_run
from muown_train.training.build import build_run
from muown_train.training.run import Run
from tests.helpers.runs import HERE, SMALL, losses, metrics, train_until_killed

SETTING = [setting for setting in SMALL if not setting.startswith("model.")]
SMALL_MODELS = {
    "qwen2": (
        "model=qwen2_0_5b",
        "model.dim=32",
        "model.heads=4",
        "model.mlp_hidden=64",
        "optim.lr=0.01",
    ),
    "speedrun_muon": ("experiment=speedrun_muon", "model.dim=32", "model.head_dim=16", "optim.lr=0.01"),
    "speedrun_muown": ("experiment=speedrun_muown", "model.dim=32", "model.head_dim=16", "optim.lr=0.01"),
}


def made(corpus, out, name: str) -> Run:
    if name.startswith("qwen2"):
        pytest.importorskip("transformers")
    places = (f"data.train={corpus}/*.txt", f"out={out}", f"cache={corpus}/cache")
    sizes = ("model.layers=2", "model.vocab_size=4096", "compile=false", "tokens=12800")
    return build_run(load_config(["name=run", *SETTING, *SMALL_MODELS[name], *sizes, *places]), HERE)


def trained(corpus, out, name: str) -> Run:
    run = made(corpus, out, name)
    assert run.resume() is None
    run.train()
    run.close()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_fifty_steps_with_and_without_a_kill(corpus, tmp_path, name):
    whole = trained(corpus, tmp_path / "whole", name)
    lines = metrics(whole.folder)
    valid = [line["valid/loss"] for line in lines if "valid/loss" in line]
    assert lines[-1]["step"] == 50
    assert valid[0] == pytest.approx(math.log(4096), rel=0.05) and valid[-1] < 0.75 * valid[0]

    run = made(corpus, tmp_path / "killed", name)
    train_until_killed(run, 30)
    resumed = trained(corpus, tmp_path / "killed", name)
    assert losses(resumed.folder) == losses(whole.folder)
    pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(open_run(whole.folder).load_model()(ids), whole.model.eval()(ids))
