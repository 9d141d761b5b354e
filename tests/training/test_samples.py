"""`sample_every`: a run writes texts while it trains, and trains as it would have without."""

import random

import numpy as np
import pytest
import torch

from muown_train.config.compose import load_config
from muown_train.runs.metrics import read_metrics
from muown_train.runs.status import Outcome
from muown_train.training import run as run_module
from muown_train.training.run import LONGEST_SAMPLE, generate_sample
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, built, metrics, train_until_killed, trained
from tests.training.test_trainer import weights

SAMPLES = ("sample_every=4", "sample_tokens=8")
KEYS = ("step", "tokens", "train/loss", "train/grad_norm", "train/lr", "data/hash", "valid/loss")


def list_samples(folder) -> list[tuple[int, str]]:
    return [(line["step"], line["sample"]) for line in metrics(folder) if "sample" in line]


def list_random_states() -> list[object]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.fixture(scope="module")
def sampled(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("sampled"), *SAMPLES)


def test_training_is_as_without_samples(corpus, tmp_path, sampled):
    plain = trained(corpus, tmp_path)
    assert list_samples(plain.folder) == []
    assert [step for step, _ in list_samples(sampled.folder)] == [4, 8, 12]
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(sampled), strict=True))
    for key in KEYS:
        assert [line.get(key) for line in metrics(plain.folder)] == [line.get(key) for line in metrics(sampled.folder)]


def test_a_sample_is_that_of_the_end_and_changes_no_state(sampled):
    before = list_random_states()
    assert sampled.write_sample() == {"sample": generate_sample(sampled)}
    assert list_samples(sampled.folder)[-1] == (12, generate_sample(sampled))
    assert list_random_states() == before and sampled.model.training


def test_after_a_kill_the_samples_are_those_of_a_run_without(corpus, tmp_path, sampled):
    run = built(corpus, tmp_path, *SAMPLES)
    run.resume()
    train_until_killed(run, 6)
    resumed = trained(corpus, tmp_path, *SAMPLES)
    assert list_samples(resumed.folder) == list_samples(sampled.folder)


def test_a_stop_where_one_is_due_leaves_it_to_the_next_start(corpus, tmp_path, sampled):
    run = built(corpus, tmp_path, *SAMPLES)
    step = run.trainer.train_step

    def stop_in_step_8():
        if run.trainer.step == 7:
            run.trainer.stop.request("SIGUSR1")
        return step()

    run.trainer.train_step = stop_in_step_8
    run.resume()
    assert run.train() == Outcome("stopped", "SIGUSR1")
    run.close()
    assert [step for step, _ in list_samples(run.folder)] == [4]
    assert list_samples(trained(corpus, tmp_path, *SAMPLES).folder) == list_samples(sampled.folder)


def train_on(world, corpus, out, stop_in):
    run = built(corpus, out, *SAMPLES, "eval_every=12", "micro_batch=1", world=world)
    step = run.trainer.train_step

    def stop():
        if run.trainer.step == stop_in - 2:  # all ranks learn of it one step later
            run.trainer.stop.request("SIGUSR1")
        return step()

    run.trainer.train_step = stop if stop_in else step
    run.resume()
    outcome = run.train()
    run.close()
    return outcome.state, run.trainer.step


@pytest.mark.slow
def test_two_ranks_write_what_one_writes_also_where_one_is_owed(corpus, tmp_path):
    train_on(HERE, corpus, tmp_path / "one", 0)
    assert on_ranks(2, train_on, corpus, tmp_path / "two", 8) == [("stopped", 8)] * 2
    assert [step for step, _ in list_samples(tmp_path / "two" / "run")] == [4]
    assert on_ranks(2, train_on, corpus, tmp_path / "two", 0) == [("finished", 12)] * 2
    one, two = (list_samples(tmp_path / name / "run") for name in ("one", "two"))
    assert [step for step, _ in two] == [4, 8, 12] == [step for step, _ in one]


def test_one_that_cannot_be_written_ends_no_run(corpus, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("the model's logits are not finite: its weights are of no use")

    monkeypatch.setattr(run_module, "generate", refuse)
    run = trained(corpus, tmp_path, *SAMPLES)
    assert run.trainer.step == 12 and run.model.training and list_samples(run.folder) == []
    assert "there is no sample after step 4: the model's logits are not finite" in capsys.readouterr().err


def test_a_long_one_is_cut_so_that_its_line_can_be_read(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "generate_sample", lambda run: "\U0001f600" * 10**6)
    run = trained(corpus, tmp_path, *SAMPLES, "tokens=1024")
    assert len(read_metrics(run.folder / "metrics.jsonl")[-1]["sample"]) == LONGEST_SAMPLE


@pytest.mark.parametrize(
    "words, message",
    [
        (["sample_every=0"], "sample_every=0 must be a whole number of at least 1"),
        (["sample_every=5", "sample_tokens=0"], "sample_every=5 writes samples of sample_tokens=0: give it 1 or more"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, message):
    with pytest.raises(ValueError, match=message):
        load_config(words)
