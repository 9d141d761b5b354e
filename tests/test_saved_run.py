"""Runs read by others: any checkpoint, written by any number of ranks, without touching the run."""

import json
from pathlib import Path

import pytest
import torch

from muown_train.distributed import World
from muown_train.saved_run import open_run, write_run
from tests.ranks import on_ranks
from tests.runs import trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs"), "compile=false")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_model_is_what_was_trained(run):
    before = snapshot(run.folder)
    saved = open_run(run.folder)
    assert saved.step == 12
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(saved.model()(ids), run.model.eval()(ids))
    tokenizer = saved.tokenizer()
    assert tokenizer.fingerprint == run.data.tokenizer.fingerprint
    assert tokenizer.decode(tokenizer.encode_batch(["The kaban"])[0]) == "The kaban"
    assert snapshot(run.folder) == before


def test_a_step_or_a_checkpoint_can_be_chosen(run):
    earlier = open_run(run.folder, step=8)
    assert earlier.step == 8
    assert open_run(earlier.checkpoint).step == 8
    assert open_run(earlier.checkpoint).folder == run.folder
    with pytest.raises(ValueError, match=r"no checkpoint of step 5; there are 12, 8"):
        open_run(run.folder, step=5)


def train_on_this_rank(world: World, corpus: Path, out: Path) -> dict[str, torch.Tensor]:
    model = trained(corpus, out, "micro_batch=1", world=world).model
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_of_two_ranks(corpus, tmp_path):
    weights = on_ranks(2, train_on_this_rank, corpus, tmp_path)[0]
    loaded = dict(open_run(tmp_path / "run").model().named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_damaged_checkpoint_is_passed_over_and_left(corpus, tmp_path):
    run = trained(corpus, tmp_path)
    newest = open_run(run.folder).checkpoint
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert open_run(run.folder).step == 8
    with pytest.raises(ValueError, match=r"step-00000012 is damaged: rank-00000.safetensors has \d+ bytes"):
        open_run(run.folder, step=12)
    assert newest.exists()


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nothing"):
        open_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no checkpoint"):
        open_run(tmp_path)


def test_a_strangers_configuration_runs_no_code(run, tmp_path):
    saved = open_run(run.folder)
    config = {**saved.config, "model": {"_target_": "os.system", "command": "true"}, "trust": ["os.system"]}
    write_run(tmp_path / "theirs", saved.weights(), config, 1, saved.data, None, {})
    with pytest.raises(ValueError, match=r"model._target_='os.system' is not among"):
        open_run(tmp_path / "theirs").model()


def test_what_is_written_is_read(run, tmp_path):
    saved = open_run(run.folder)
    doubled = {name: 2 * weight for name, weight in saved.weights().items()}
    folder = tmp_path / "doubled"
    write_run(folder, doubled, saved.config, saved.step, saved.data, saved.tokenizer().raw, {"made": "here"})
    again = open_run(folder)
    assert again.step == saved.step
    assert all(torch.equal(weight, doubled[name]) for name, weight in again.weights().items())
    assert again.tokenizer().fingerprint == saved.tokenizer().fingerprint
    assert json.loads((folder / "manifest.json").read_text()) == {"made": "here"}
    with pytest.raises(ValueError, match="doubled exists"):
        write_run(folder, doubled, saved.config, 1, saved.data, None, {})
