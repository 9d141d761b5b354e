"""The main job in small: optimizers, resume after any kill, ranks, micro-batches."""

import math
from pathlib import Path

import pytest
import torch

from muown_train.optim import Muown
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, metrics, slow_but, train_until_killed, trained


def weights(run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


OPTIMIZERS = {
    "muown": 0.01,
    "muon": 0.01,
    "normuon": 0.01,
    "normuown": 0.01,
    "soap": 0.01,
    "lion": 0.002,
    "adamw": 0.01,
}


def test_muowns_invariant_holds_at_the_end(corpus, tmp_path):
    run = trained(corpus, tmp_path, "optim.lr=0.01")
    muown = run.trainer.optimizer.optimizers[0]
    assert isinstance(muown, Muown)
    for group in muown.param_groups:
        for p in group["params"]:
            magnitude = muown.state[p]["magnitude"]
            torch.testing.assert_close(p.detach().norm(dim=1), magnitude.abs(), rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """Losses and final weights of a run of 12 steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted")
    run = trained(corpus, out)
    return metrics(out / "run"), weights(run)


@pytest.mark.parametrize("killed_at", slow_but([0, 3, 8, 11], range(12)))
def test_killed_at_any_step_it_goes_on_bit_for_bit(corpus, tmp_path, uninterrupted, killed_at):
    run = built(corpus, tmp_path)
    train_until_killed(run, killed_at)
    resumed = trained(corpus, tmp_path)
    expected_lines, expected_weights = uninterrupted
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), expected_weights, strict=True))
    lines = metrics(tmp_path / "run")
    for key in ("step", "tokens", "train/loss", "train/grad_norm", "train/lr", "data/hash", "valid/loss"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in expected_lines], key
    saved, logged = (max(range(0, killed_at + 1, every)) for every in (4, 3))
    if saved == 0 or logged > saved:
        assert (tmp_path / "run" / "metrics.rolled_back.jsonl").exists()


@pytest.mark.parametrize("optim, lr", slow_but([("muown", 0.01)], OPTIMIZERS.items(), several=True))
def test_each_optimizer_learns_and_goes_on_bit_for_bit_after_a_kill(corpus, tmp_path, optim, lr):
    settings = (f"optim={optim}", f"optim.lr={lr}", "tokens=5120")
    if optim == "soap":  # refinements of its eigenvectors before and after the checkpoint at 8
        settings += ("optim.precondition_frequency=3",)
    whole = trained(corpus, tmp_path / "whole", *settings)
    lines = metrics(tmp_path / "whole" / "run")
    assert [line["step"] for line in lines] == list(range(21))
    valid = [line["valid/loss"] for line in lines if "valid/loss" in line]
    assert valid[0] == pytest.approx(math.log(4096), rel=0.02) and valid[-1] < 0.75 * valid[0]
    run = built(corpus, tmp_path / "killed", *settings)
    train_until_killed(run, 10)
    resumed = trained(corpus, tmp_path / "killed", *settings)
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")


def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(corpus, tmp_path, uninterrupted, capsys):
    trained(corpus, tmp_path)
    newest = tmp_path / "run" / "checkpoints" / "step-00000012"
    (newest / "rank-00000.safetensors").write_bytes(b"cut")
    resumed = trained(corpus, tmp_path)
    assert "step-00000012 is damaged" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), uninterrupted[1], strict=True))
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(13))


@pytest.mark.slow
def test_micro_batches_do_not_matter(corpus, tmp_path, uninterrupted):
    expected = [line["train/loss"] for line in uninterrupted[0] if "train/loss" in line]
    for micro_batch in (1, 4, 8):
        trained(corpus, tmp_path / str(micro_batch), f"micro_batch={micro_batch}")
        assert losses(tmp_path / str(micro_batch) / "run") == pytest.approx(expected, abs=1e-3)


def _train(world: World, corpus: Path, out: Path, *overrides: str) -> list[float]:
    run = trained(corpus, out, *overrides, world=world)
    return [float(p.detach().double().sum()) for p in run.model.parameters()]


def test_two_ranks_give_the_losses_of_one_and_the_same_weights_on_both(corpus, tmp_path):
    long = ("tokens=5120", "save_every=7")
    trained(corpus, tmp_path / "one", *long)
    first, second = on_ranks(2, _train, corpus, tmp_path / "two", *long)
    assert first == second
    one, two = metrics(tmp_path / "one" / "run"), metrics(tmp_path / "two" / "run")
    assert len(one) == len(two) == 21
    for a, b in zip(one[1:], two[1:], strict=True):
        assert a["data/hash"] == b["data/hash"] and a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-3)
    assert one[-1]["valid/loss"] == pytest.approx(two[-1]["valid/loss"], abs=1e-3)


@pytest.mark.slow
def test_begun_on_two_ranks_it_goes_on_on_one(corpus, tmp_path, uninterrupted):
    # half of the budget at the full run's schedule cannot be had by `tokens`, so the lr is constant
    constant = ("schedule=constant", "schedule.warmup=0.0")
    on_ranks(2, _train, corpus, tmp_path / "a", *constant, "tokens=1536")
    trained(corpus, tmp_path / "a", *constant)
    trained(corpus, tmp_path / "b", *constant)
    assert losses(tmp_path / "a" / "run") == pytest.approx(losses(tmp_path / "b" / "run"), abs=1e-3)


def test_another_lr_or_budget_takes_effect_on_resume(corpus, tmp_path):
    trained(corpus, tmp_path, "tokens=1536")
    trained(corpus, tmp_path, "tokens=3072", "optim.lr=0.001", "schedule=constant", "schedule.warmup=0")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    assert {line["train/lr"] for line in lines[7:]} == {0.001}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a finished run of 4 steps, which no test may change."""
    out = tmp_path_factory.mktemp("finished")
    trained(corpus, out, "tokens=1024")
    return out


@pytest.mark.parametrize(
    "change, part",
    [
        ("model.layers=3", "model.layers=2"),
        ("seq_len=64", "seq_len=32"),
        ("seed=1", "seed=0"),
        ("optim=adamw", "optim._target_=muown_train.optim.Muown"),
        ("optim=muon", "optim._target_=muown_train.optim.Muown"),
    ],
)
def test_another_model_or_data_on_resume_is_an_error(corpus, finished, change, part):
    before = record(finished)
    with pytest.raises(ValueError, match=part):
        trained(corpus, finished, change, "tokens=2048")
    assert record(finished) == before


def record(out: Path) -> list[bytes]:
    return [(out / "run" / name).read_bytes() for name in ("config.yaml", "manifest.json", "metrics.jsonl")]


def test_other_texts_under_the_same_name_are_an_error(corpus, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in corpus.glob("*.txt"):
        (texts / path.name).write_text(path.read_text())
    trained(texts, tmp_path, "tokens=1024")
    before = record(tmp_path)
    (texts / "007.txt").write_text("Something else entirely. " * 40)
    with pytest.raises(ValueError, match="holds a run on other data"):
        trained(texts, tmp_path, "tokens=2048")
    assert record(tmp_path) == before


def test_the_record_of_a_finished_run_stays_as_it_was(corpus, finished):
    before = record(finished)
    trained(corpus, finished, "tokens=1024", "optim.lr=0.5")
    assert record(finished) == before


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(corpus, tmp_path):
    run = built(corpus, tmp_path)
    model = run.model
    bad = {5}
    run.trainer.replica = lambda x, y: model(x, y) * (math.nan if run.trainer.step in bad else 1.0)
    before = {}
    step = run.trainer.optimizer.step
    run.trainer.optimizer.step = lambda: (before.setdefault(run.trainer.step, weights(run)), step())
    run.trainer.fit()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line.get("train/skipped")] == [6]
    assert 5 not in before and all(p.isfinite().all() for p in run.model.parameters())
    assert lines[6]["train/loss"] == "nan" and math.isfinite(lines[-1]["valid/loss"])


def test_loss_is_the_mean_over_tokens_and_lr_follows_the_schedule(corpus, tmp_path):
    run = built(corpus, tmp_path, "optim.lr=0.5", "optim.rest.lr=0.25")
    rows = run.data.train.take(range(8))
    tokens = torch.from_numpy(rows).long()
    with torch.no_grad():
        expected = run.model(tokens[:, :-1], tokens[:, 1:]).item() / 256
    record = run.trainer.train_step()
    assert record.loss.item() == pytest.approx(expected, rel=1e-5)
    assert [group["lr"] for group in run.trainer.optimizer.param_groups] == [0.5, 0.5, 0.25, 0.25]
