"""Runs that start from weights: of a run, of a checkpoint, of an export with a vocabulary cut or padded again."""

import json
import math
import shutil

import pytest
import torch

from muown_train.config.compose import load_config
from muown_train.config.run_name import default_run_name
from muown_train.models.language_model import build_model
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run, write_run
from muown_train.runs.state import ModelState
from muown_train.training.warm_start import read_initial_weights
from tests.helpers.runs import built, metrics, trained


@pytest.fixture(scope="module")
def source(corpus, tmp_path_factory):
    run = trained(corpus, tmp_path_factory.mktemp("source"), "name=source")
    export_run(open_run(run.folder), run.folder / "hf")
    return run


def first_and_last_loss(run) -> tuple[float, float]:
    evaluated = [line["valid/loss"] for line in metrics(run.folder) if "valid/loss" in line]
    return evaluated[0], evaluated[-1]


def test_it_begins_where_the_other_ended(corpus, tmp_path, source):
    run = trained(corpus, tmp_path, f"init_from={source.folder}", "optim.lr=0.001")
    first, last = first_and_last_loss(run)
    assert first == first_and_last_loss(source)[1]
    assert last < first
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["init_from"] == {"path": str(source.folder), "step": 12, "padded": 0}


def test_row_norms_of_the_optimizer_are_those_of_the_weights(corpus, tmp_path, source):
    run = built(corpus, tmp_path, f"init_from={source.folder}")
    weights, muown = dict(run.model.named_parameters()), run.trainer.optimizer.optimizers[0]
    name = "blocks.1.mlp.out.weight"
    assert torch.equal(weights[name], open_run(source.folder).load_weights()[name])
    norms = weights[name].detach().norm(dim=1)
    run.trainer.train_step()
    torch.testing.assert_close(muown.state[weights[name]]["magnitude_floor"], 1e-12 * norms)
    run.close()


def test_a_checkpoint_and_an_earlier_one(corpus, tmp_path, source):
    checkpoint = source.folder / "checkpoints" / "step-00000008"
    run = built(corpus, tmp_path, f"init_from={checkpoint}")
    assert run.metadata["init_from"]["step"] == 8
    weights = open_run(checkpoint).load_weights()
    assert all(torch.equal(p, weights[name]) for name, p in run.model.named_parameters())
    run.close()


def test_rows_of_the_vocabulary_that_were_cut_come_back(corpus, tmp_path, source):
    run = built(corpus, tmp_path, f"init_from={source.folder}/hf")
    size = source.data.tokenizer.size
    padded = 4096 - size
    assert padded > 1000 and run.metadata["init_from"] == {"path": f"{source.folder}/hf", "step": 12, "padded": padded}
    weight = run.model.embedding.weight
    torch.testing.assert_close(weight[size:], weight[:size].mean(0).expand(padded, -1))
    ids = torch.randint(size, (4, 33))
    with torch.no_grad():
        logits, before = run.model(ids[:, :-1]), source.model(ids[:, :-1])
    assert torch.equal(logits[..., :size], before[..., :size])
    real, all_rows = logits[..., :size].logsumexp(-1), logits.logsumexp(-1)
    assert (all_rows - real).max() <= math.log(1 + padded / size) + 1e-5
    run.close()


@pytest.mark.parametrize("model", ["track3", "speedrun", "small"])
def test_rows_that_are_missing_are_added_to_all_that_has_a_row_for_each_token(tmp_path, model):
    """Weights of each architecture, for a vocabulary of 300 that becomes one of 333."""
    heads = "model.head_dim=16" if model == "speedrun" else "model.heads=2"
    words = [f"model={model}", "model.dim=32", "model.layers=1", "seq_len=32", heads]

    def made(size: int):
        config = load_config([*words, f"model.vocab_size={size}"])
        return config.to_dict(), build_model(config.model, config.seq_len)

    (config, few), (resolved, more) = made(300), made(333)
    with torch.no_grad():
        for p in few.parameters():  # not zeros, which would hide a mistake
            p.add_(torch.randn_like(p) * 0.1)
    start = read_initial_weights(str(write(tmp_path, "few", few, config)))
    start.load_into(more, resolved["model"])
    assert start.metadata["padded"] == 33
    ids = torch.randint(300, (2, 32))
    with torch.no_grad():
        logits = more(ids)
        torch.testing.assert_close(logits[..., :300], few(ids))
    assert logits[..., 300:].abs().max() < logits[..., :300].abs().max()
    with pytest.raises(ValueError, match=r"does not fit: \S+ has shape \(333"):
        read_initial_weights(str(write(tmp_path, "more", more, resolved))).load_into(few, config["model"])


def write(folder, name, model, config):
    write_run(folder / name, ModelState(model).state_dict(), config, 1, {}, None, {})
    return folder / name


@pytest.mark.slow
def test_it_goes_on_without_its_source(corpus, tmp_path, source):
    moved = shutil.copytree(source.folder, tmp_path / "moved")
    words = (f"init_from={moved}", "schedule=constant")
    whole = trained(corpus, tmp_path / "whole", *words)
    trained(corpus, tmp_path / "cut", *words, "tokens=1536")  # 6 steps
    shutil.rmtree(moved)
    again = trained(corpus, tmp_path / "cut", *words)
    assert again.metadata["init_from"]["step"] == 12
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.model.named_parameters())


def test_it_does_not_go_on_from_other_weights(corpus, tmp_path, source):
    trained(corpus, tmp_path, f"init_from={source.folder}")
    with pytest.raises(ValueError, match=r"holds a run with init_from=.*source, this one has init_from=None"):
        built(corpus, tmp_path)
    with pytest.raises(ValueError, match=r"holds a run with init_from=.*source, this one has init_from=.*/hf"):
        built(corpus, tmp_path, f"init_from={source.folder}/hf")


def test_it_is_in_the_name():
    choices = {"model": "tiny", "optim": "muown"}
    names = {default_run_name(choices, words, 0) for words in ([], ["init_from=runs/a"], ["init_from=runs/b"])}
    assert len(names) == 3


@pytest.mark.parametrize(
    "words, says",
    [
        (["model.heads=4"], "init_from=.* has heads=2, this run has model.heads=4"),
        (["+model.rope_base=10000"], "has rope_base=500000.0, this run has model.rope_base=10000"),
        (["model.dim=64"], "has dim=32, this run has model.dim=64"),
        (
            ["+model.mlp_hidden=100"],
            "does not fit: blocks.0.mlp.gate_up.weight has shape .*512, 32.* in the",
        ),
        (["model.vocab_size=300"], "does not fit: embedding.weight has shape .*4096, 32"),
    ],
)
def test_another_model_is_said_before_data_are_read(source, tmp_path, words, says):
    with pytest.raises(ValueError, match=says):
        built(tmp_path / "nothing", tmp_path, f"init_from={source.folder}", *words)


def test_another_tokenizer_is_said(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for i in range(30):
        (other / f"{i}.txt").write_text(f"Quite another text, number {i}. " * 40)
    with pytest.raises(ValueError, match=r"was trained with another tokenizer than that of the data, bpe-4096"):
        built(other, tmp_path, f"init_from={source.folder}")
    words = (f"init_from={source.folder}/hf", f"data.tokenizer={source.folder}/hf/tokenizer.json")
    built(other, tmp_path, *words).close()


@pytest.mark.parametrize("what", ["nothing", "empty", "damaged"])
def test_what_is_no_source_is_said(corpus, source, tmp_path, what):
    folder = tmp_path / what
    says = {"nothing": "there is no folder", "empty": "has no checkpoint", "damaged": "is damaged"}[what]
    if what == "empty":
        folder.mkdir()
    if what == "damaged":
        saved = open_run(source.folder)
        write_run(folder, saved.load_weights(), saved.config.to_dict(), 1, saved.data, None, {})
        file = next(folder.glob("checkpoints/*/rank*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"init_from=.*{what}: .*{says}"):
        built(corpus, tmp_path, f"init_from={folder}")
    assert not (tmp_path / "run").exists()


def test_a_wrong_value_is_said(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"init_from=0\.5 must be the folder of a run or of a checkpoint, or null"):
        built(corpus, tmp_path, "init_from=0.5")
