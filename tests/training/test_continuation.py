"""Decay from a checkpoint: bit for bit the end of a run that was planned so, and a run of its own."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from muown_train.config.compose import load_config
from muown_train.config.run_name import default_run_name
from muown_train.runs.saved_run import open_run, write_run
from muown_train.runtime.distributed import World
from muown_train.training.build import build_run
from muown_train.training.continuation import continue_from_checkpoint
from muown_train.training.run import Run
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, losses, metrics, trained

FROM = "schedule=decay_from"
STABLE = ("schedule=constant", "schedule.warmup=0", "keep_checkpoints=9")


def continuing(corpus: Path, out: Path, source: Path, *overrides: str, world: World = HERE) -> Run:
    given = [
        "name=decay",
        FROM,
        f"checkpoint={source}",
        f"out={out}",
        f"cache={corpus}/cache",
        "sample_tokens=0",
        *overrides,
    ]
    config, source_checkpoint = continue_from_checkpoint(load_config(given), given)
    return build_run(config, world, source_checkpoint)


def decayed(corpus: Path, out: Path, source: Path, *overrides: str, world: World = HERE) -> Run:
    run = continuing(corpus, out, source, *overrides, world=world)
    if not run.resume():
        run.train()
    run.close()
    return run


@pytest.fixture(scope="module")
def stable(corpus, tmp_path_factory) -> Path:
    """Checkpoints after 4, 8 and 12 updates of 256 tokens."""
    return trained(corpus, tmp_path_factory.mktemp("stable"), *STABLE).folder


@pytest.fixture(scope="module")
def planned(corpus, tmp_path_factory) -> Run:
    """The same run, which cools down in updates 9 to 12."""
    out = tmp_path_factory.mktemp("planned")
    return trained(corpus, out, "schedule.warmup=0", f"schedule.cooldown={4 / 12}")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def numbers(folder: Path) -> list[tuple]:
    """Of each update all that does not depend on the clock."""
    keys = ("step", "tokens", "train/loss", "train/lr", "train/grad_norm", "data/hash")
    return [tuple(line[key] for key in keys) for line in metrics(folder) if "train/loss" in line]


def test_it_equals_the_end_of_a_run_that_was_planned_so(corpus, tmp_path, stable, planned):
    before = snapshot(stable)
    run = decayed(corpus, tmp_path, stable / "checkpoints" / "step-00000008", "tokens=1024")
    assert numbers(run.folder) == numbers(planned.folder)[8:]
    assert [line["step"] for line in metrics(run.folder)] == [8, 9, 10, 11, 12]
    assert metrics(run.folder)[0]["valid/loss"] > metrics(run.folder)[-1]["valid/loss"]
    assert metrics(run.folder)[-1]["valid/loss"] == metrics(planned.folder)[-1]["valid/loss"]
    for (name, ours), theirs in zip(run.model.named_parameters(), planned.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert snapshot(stable) == before
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["origin"] == {"checkpoint": str(stable / "checkpoints" / "step-00000008"), "step": 8}
    saved = open_run(run.folder)
    assert saved.step == 12 and saved.config.model == open_run(stable).config.model


def test_a_folder_means_its_newest_checkpoint_of_then_and_is_not_needed_again(corpus, tmp_path, planned):
    source = trained(corpus, tmp_path, *STABLE, "name=source", "tokens=2048").folder
    run = continuing(corpus, tmp_path, source, "tokens=1024", "log_every=1", "save_every=2")
    assert run.resume() is None
    run.trainer.begin()
    for _ in range(3):  # and cut off: updates 9 to 11, of which 10 is saved
        run.trainer.step_metrics.add(run.trainer.train_step())
        run.trainer.handle_boundary(None)
    run.trainer.checkpoints.settle(wait=True)
    run.close()
    shutil.rmtree(source)
    run = decayed(corpus, tmp_path, source, "tokens=1024", "log_every=1", "save_every=2")
    assert numbers(run.folder) == numbers(planned.folder)[8:]
    assert json.loads((run.folder / "manifest.json").read_text())["origin"]["step"] == 8
    rolled_back = (run.folder / "metrics.rolled_back.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rolled_back] == [11]


def on_this_rank(world: World, corpus: Path, out: Path, source: Path) -> list[float]:
    return losses(decayed(corpus, out, source, "tokens=1024", "micro_batch=1", world=world).folder)


@pytest.mark.slow
def test_on_two_ranks(corpus, tmp_path, stable, planned):
    source = stable / "checkpoints" / "step-00000008"
    assert on_ranks(2, on_this_rank, corpus, tmp_path, source)[0] == pytest.approx(losses(planned.folder)[8:], abs=1e-4)


@pytest.mark.parametrize("step, level", [(8, 1.0), (12, 1 / 5)])
def test_it_falls_from_where_the_rate_was(corpus, tmp_path, stable, planned, step, level):
    source = planned.folder if step == 12 else stable
    run = decayed(corpus, tmp_path, source / "checkpoints" / f"step-{step:08d}", "tokens=768")
    rates = [line["train/lr"] / 4e-3 for line in metrics(run.folder) if "train/lr" in line]
    assert rates == pytest.approx([level * left / 4 for left in (3, 2, 1)])


def test_from_a_run_whose_budget_was_per_parameter(corpus, tmp_path):
    source = trained(corpus, tmp_path, *STABLE, "name=source", "tokens=null", "tokens_per_parameter=0.02").folder
    run = decayed(corpus, tmp_path, source, "tokens_per_parameter=0.01")
    steps = open_run(source).step
    assert run.trainer.settings.steps == steps + round(0.01 * run.metadata["parameters"] / 256) > steps


def test_a_decay_may_be_decayed(corpus, tmp_path, stable):
    first = decayed(corpus, tmp_path / "a", stable, "tokens=1024", "save_every=2", "keep_checkpoints=9")
    again = decayed(corpus, tmp_path / "b", first.folder / "checkpoints" / "step-00000014", "tokens=512")
    # after two of four updates the multiplier is 3/5
    rates = [line["train/lr"] / 4e-3 for line in metrics(again.folder) if "train/lr" in line]
    assert rates == pytest.approx([3 / 5 * 2 / 3, 3 / 5 / 3])


def test_settings_that_do_not_define_a_run_are_the_command_lines(corpus, tmp_path, stable):
    words = ["tokens=512", "model.activation_checkpointing=1", "micro_batch=4", "grad_clip=0.5", "keep_best=true"]
    run = continuing(corpus, tmp_path, stable, *words)
    run.close()
    config = run.config
    given = (config.micro_batch, config.grad_clip, config.keep_best, config.model["activation_checkpointing"])
    assert given == (4, 0.5, True, 1)
    assert (config.precision, config.eval_every, config.seq_len, config.model["dim"]) == ("float32", 5, 32, 32)


@pytest.mark.parametrize(
    "words, message",
    [
        (["tokens=512", "model.layers=3"], "model.layers cannot be given with checkpoint="),
        (["tokens=512", "optim=muon"], "optim cannot be given with"),
        (["tokens=512", "optim/rest=lion"], "optim/rest cannot be given with"),
        (["tokens=512", "optim.lr=1"], "optim.lr cannot be given with"),
        (["tokens=512", "seed=3"], "seed cannot be given with"),
        (["tokens=512", "precision=bfloat16"], "precision cannot be given with"),
        ([], "needs tokens=…"),
        (["tokens=512", "schedule=wsd"], "is for schedule=decay_from"),
        (["tokens=10"], "less than one step of batch_tokens=256"),
    ],
)
def test_what_cannot_be_said_with_it(corpus, tmp_path, stable, words, message):
    with pytest.raises(ValueError, match=message):
        continuing(corpus, tmp_path, stable, *words)
    assert not list(tmp_path.iterdir())


def test_without_a_checkpoint_it_is_nothing(corpus, tmp_path):
    with pytest.raises(ValueError, match="schedule=decay_from needs checkpoint="):
        trained(corpus, tmp_path, FROM)


def test_a_checkpoint_of_weights_alone_and_a_folder_that_is_none(corpus, tmp_path, stable):
    saved = open_run(stable)
    write_run(tmp_path / "average", saved.load_weights(), saved.config.to_dict(), 12, saved.data, None, {})
    with pytest.raises(ValueError, match="step-00000012 holds only weights"):
        continuing(corpus, tmp_path, tmp_path / "average", "tokens=512")
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        continuing(corpus, tmp_path, tmp_path / "nowhere", "tokens=512")


def test_a_folder_holds_one_run(corpus, tmp_path, stable):
    decayed(corpus, tmp_path, stable / "checkpoints" / "step-00000008", "tokens=512")
    with pytest.raises(ValueError, match=r"decay holds a run with checkpoint=.*step-00000008, this one has .*000004"):
        continuing(corpus, tmp_path, stable / "checkpoints" / "step-00000004", "tokens=512")
    with pytest.raises(ValueError, match=r"holds a run with checkpoint=.*step-00000008, this one has checkpoint=None"):
        trained(corpus, tmp_path, "name=decay")
    with pytest.raises(ValueError, match=r"holds a run with checkpoint=None"):
        continuing(corpus, stable.parent, stable, f"name={stable.name}", "tokens=512")


def test_on_other_data_than_the_checkpoint(corpus, tmp_path):
    texts = tmp_path / "texts"
    shutil.copytree(corpus, texts, ignore=shutil.ignore_patterns("cache"))
    source = trained(texts, tmp_path, *STABLE, "name=source", "tokens=1024").folder
    for path in texts.glob("*.txt"):
        path.write_text(path.read_text().replace("e", "a"))
    with pytest.raises(ValueError, match="holds a run on other data"):
        continuing(texts, tmp_path, source, "tokens=512")


def test_its_name_tells_the_source_and_the_budget():
    def name(checkpoint: str, *more: str) -> str:
        overrides = [FROM, f"checkpoint={checkpoint}", "tokens=2e5", *more]
        return default_run_name({"model": "tiny", "optim": "muown"}, overrides, 0)

    assert name("runs/stable") == name("/other/stable/") == "stable-schedule=decay_from-tokens=200000"
    assert name("runs/stable/checkpoints/step-00000100") == "stable-step=100-schedule=decay_from-tokens=200000"
    assert name("runs/tiny-muown-seed=0", "out=x") == "tiny-muown-seed=0-schedule=decay_from-tokens=200000"
    assert len(name("runs/" + 200 * "x")) < 150


@pytest.mark.slow
def test_killed_and_given_again(corpus, tmp_path, stable):
    words = [FROM, f"checkpoint={stable}", "tokens=12800", "log_every=1", "save_every=1", "sample_tokens=0"]
    command = [sys.executable, "-m", "muown_train", *words, f"cache={corpus}/cache"]
    whole = subprocess.run([*command, f"out={tmp_path}/whole", "name=run"], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen([*command, f"out={tmp_path}/cut", "name=run"], stdout=subprocess.DEVNULL)
    file = tmp_path / "cut" / "run" / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and len(file.read_bytes().splitlines()) > 20):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert subprocess.run([*command, f"out={tmp_path}/cut", "name=run"], capture_output=True).returncode == 0
    assert len(numbers(tmp_path / "cut" / "run")) == 50
    assert numbers(tmp_path / "cut" / "run") == numbers(tmp_path / "whole" / "run")
