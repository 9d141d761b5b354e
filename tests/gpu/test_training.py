"""Runs on a GPU: no step waits for it, runs resume bit for bit, checkpoints hold the weights, memory is as planned."""

import subprocess

import pytest
import torch

from muown_train.runs.checkpoint_reader import open_checkpoint
from muown_train.runtime.benchmark import measure_peak_memory
from muown_train.runtime.distributed import World
from muown_train.training.plan import make_plan
from tests.helpers.paths import COMMAND, ROOT
from tests.helpers.runs import SMALL, built, losses, metrics, train_until_killed, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim=muown"],
        ["optim=muown", "precision=bfloat16", "compile=true"],
        ["optim=muown", "precision=bfloat16", "model.activation_checkpointing=2"],
        ["optim=muon", "precision=bfloat16"],
        ["optim=normuown", "precision=bfloat16"],
        ["optim=adamw", "precision=bfloat16"],
        ["optim=lion"],
    ],
    ids=" ".join,
)
def test_a_step_does_not_wait_for_the_device(overrides, corpus, tmp_path, world, forbid_sync):
    torch._dynamo.reset()
    run = built(corpus, tmp_path, *overrides, world=world)
    trainer = run.trainer
    for _ in range(2):  # the first step of an optimizer waits once, and compiles
        trainer.train_step()
    with forbid_sync():
        records = [trainer.train_step() for _ in range(3)]
    assert all(record.loss.isfinite() and record.grad_norm.isfinite() for record in records)
    run.close()


def test_batches_are_pinned(corpus, tmp_path, world):
    run = built(corpus, tmp_path, world=world)
    assert next(run.trainer.loader).tokens.is_pinned() == (world.device.type == "cuda")
    run.close()


@pytest.mark.parametrize(
    "overrides", [["optim=muown"], ["optim=muown", "precision=bfloat16"], ["optim=soap"], ["optim=adamw"]], ids=" ".join
)
def test_a_run_that_resumes_equals_one_that_does_not(overrides, corpus, tmp_path, world):
    whole = trained(corpus, tmp_path / "whole", *overrides, world=world)
    train_until_killed(built(corpus, tmp_path / "killed", *overrides, world=world), 7)
    resumed = trained(corpus, tmp_path / "killed", *overrides, world=world)
    assert losses(resumed.folder) == losses(whole.folder)
    assert metrics(resumed.folder)[-1]["valid/loss"] == metrics(whole.folder)[-1]["valid/loss"]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_losses_are_those_of_the_cpu(corpus, tmp_path, world):
    on_cpu = trained(corpus, tmp_path / "cpu", world=World(0, 1, torch.device("cpu")))
    on_device = trained(corpus, tmp_path / "device", world=world)
    assert losses(on_device.folder) == pytest.approx(losses(on_cpu.folder), abs=1e-3)


def test_a_checkpoint_holds_the_state_when_it_was_saved(corpus, tmp_path, world):
    """The copy is made in the background, while the next steps already change the weights."""
    run = built(corpus, tmp_path, "optim=muown", world=world)
    trainer = run.trainer
    trainer.train_step()
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    names = {p: name for name, p in run.model.named_parameters()}
    momenta = {names[p]: s["momentum_buffer"].clone() for p, s in trainer.optimizer.state.items() if "row_norm" in s}
    trainer.checkpoints.save(trainer.step, trainer.list_stateful())
    trainer.train_step(), trainer.train_step()
    trainer.checkpoints.settle(wait=True)
    opened = open_checkpoint(run.folder)
    saved, state = opened.load_weights(), opened.load_optimizer_state(["momentum_buffer"])
    assert saved.keys() == weights.keys() and len(momenta) == 8
    assert all(torch.equal(saved[name], weights[name].cpu()) for name in weights)
    assert all(torch.equal(state[name]["momentum_buffer"], momenta[name].cpu()) for name in momenta)
    run.close()


MEDIUM = ["model.dim=512", "model.layers=4", "model.heads=8", "seq_len=512", "batch_tokens=8192", "micro_batch=8"]


@pytest.mark.parametrize("optim", ["muown", "muon", "adamw"])
def test_memory_is_as_planned(optim, corpus, tmp_path, world):
    if world.device.type == "cpu":
        pytest.skip("the plan is for a GPU")
    words = [*MEDIUM, f"optim={optim}", "precision=bfloat16", "tokens=1e6"]
    run = built(corpus, tmp_path, *words, world=world)
    for _ in range(2):
        run.trainer.train_step()
    measured = measure_peak_memory(run.trainer.train_step, world.device)
    plan = make_plan(["data=random", *words], "H200", 1).memory
    assert measured == pytest.approx(plan.peak - plan.weights - plan.state, rel=0.1)
    state = [t for s in run.trainer.optimizer.state.values() for t in s.values() if t.ndim]
    assert sum(t.nbytes for t in state) == pytest.approx(plan.state, rel=0.02)
    run.close()


def test_probes_measure(corpus, tmp_path, world):
    words = ["probes=[spectral,effective_rank,attention_logits]", "probe_every=6", "precision=bfloat16"]
    line = metrics(trained(corpus, tmp_path, *words, world=world).folder)[-1]
    assert all(any(key.startswith(name) for key in line) for name in ("spectral/", "effective_rank/", "attention_"))


def test_the_command_trains_and_writes(corpus, tmp_path, device):
    words = [*(word for word in SMALL if "sample" not in word), "sample_tokens=5", f"data.train={corpus}/*.txt"]
    words += [f"out={tmp_path}", f"cache={corpus}/cache", "name=run", "compile=true", "precision=bfloat16"]
    done = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "--- sample ---" in done.stdout
    if device.type == "cuda":
        assert torch.cuda.get_device_name(device) in done.stdout
