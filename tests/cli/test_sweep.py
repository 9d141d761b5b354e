"""Sweeps with --multirun: all jobs are judged first, a failure ends only its own job, and a table comes at the end."""

import math
import re
import sys
import textwrap

import pytest

from muown_train.cli import sweep
from muown_train.cli.process import run_quietly
from muown_train.cli.train import main
from muown_train.runs.status import Outcome, lock_folder, read_status, write_status
from muown_train.training.trainer import Trainer
from tests.cli.test_main import call, small
from tests.helpers.ranks import start_process
from tests.helpers.runs import metrics


def sweep_words(corpus, out, *overrides):
    return ["--multirun", *small(corpus, out, "tokens=1536", *overrides)]


def without(words, *keys):
    return [word for word in words if word.partition("=")[0] not in keys]


def list_runs(out):
    return sorted(path.parent.name for path in out.glob("*/metrics.jsonl"))


def test_a_job_that_fails_does_not_end_the_sweep(corpus, tmp_path, monkeypatch, capsys):
    words = sweep_words(corpus, tmp_path, "name='dim-${model.dim}'", "model.dim=32,33,16")
    words.remove("model.dim=32")
    status, said = call(monkeypatch, *words)
    out = capsys.readouterr().out
    assert status == 1 and list_runs(tmp_path) == ["dim-16", "dim-32"], said
    reason = "model.dim=33 does not split into model.heads=2 heads of even size"
    assert f"error: job 2: {reason}\n" in said and "Traceback" not in said
    starts = re.findall(r"^job .*: model.dim=\d+$", out, re.MULTILINE)
    assert starts == [f"job {i + 1} of 3: model.dim={dim}" for i, dim in enumerate((32, 33, 16))]
    losses = {
        dim: min(line["valid/loss"] for line in metrics(tmp_path / f"dim-{dim}") if "valid/loss" in line)
        for dim in (16, 32)
    }
    table = out[out.rindex("job  best") :].splitlines()
    assert [line.split() for line in table[1:4]] == [
        ["1", f"{losses[32]:.4f}", "done", "model.dim=32"],
        ["2", "—", "failed", "model.dim=33"],
        ["3", f"{losses[16]:.4f}", "done", "model.dim=16"],
    ]
    assert table[4] == f"job 2: {reason}"
    assert losses[32] < losses[16]
    assert table[5] == f"best: model.dim=32, validation loss {losses[32]:.4f}, in {tmp_path}/dim-32"
    assert table[6:] == [f"compare them: muown-train compare {tmp_path}/dim-32 {tmp_path}/dim-16"]
    assert call(monkeypatch, *table[6].split()[3:])[0] in (None, 0)


@pytest.mark.slow
def test_a_failure_in_training_ends_one_job_with_a_traceback_without_secrets(corpus, tmp_path, monkeypatch, capsys):
    step = Trainer.train_step

    def fail_once(trainer):
        if trainer.world.rank == 0 and trainer.step == 2 and not failed:
            failed.append(trainer)
            raise ValueError("cannot read hf_abcdefghijklmnopqrstuvwxyz")
        return step(trainer)

    failed: list[Trainer] = []
    monkeypatch.setattr(Trainer, "train_step", fail_once)
    status, said = call(monkeypatch, *sweep_words(corpus, tmp_path, "seed=0,1", "name='s${seed}'"))
    out = capsys.readouterr().out
    assert status == 1 and "Traceback" in said and "hf_abc" not in said + out
    assert "error: job 1: training failed after step 2" in said
    assert "  failed  seed=0" in out and "  done    seed=1" in out and "compare them" not in out
    assert read_status(tmp_path / "s0")["state"] == "failed" and read_status(tmp_path / "s1")["state"] == "finished"


@pytest.mark.slow
def test_runs_that_another_process_trains_are_left_to_it(corpus, tmp_path, monkeypatch, capsys):
    lock = lock_folder(tmp_path / "s0")
    try:
        status, said = call(monkeypatch, *sweep_words(corpus, tmp_path, "seed=0,1", "name='s${seed}'"))
    finally:
        lock.release()
    out = capsys.readouterr().out
    assert status is None and "s0 is being trained by another process" in said
    assert list_runs(tmp_path) == ["s1"] and "another process trains it  seed=0" in out


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (["seed=0,1", "precision=float32,bf16"], ["job 2 of 4 (seed=0 precision=bf16): precision='bf16'", "bfloat16?"]),
        (["seed=0,1", "eval_every=5,0"], ["job 2 of 4 (seed=0 eval_every=0): eval_every=0"]),
        (["seed=0,-1"], ["job 2 of 2 (seed=-1): seed=-1"]),
        (["log_every=3,4"], ["job 2 of 2 (log_every=4)", "as job 1 does", "no part of a name by default"]),
        (["seed=0,1", "name=x"], ["job 2 of 2 (seed=1)", "/x, as job 1 does: give name='…-${KEY}'"]),
        (["optim=muown,muonn"], ["there is no optim=muonn"]),
        (["seed=0,1", "epochs=3"], ["there is no key epochs; here it is tokens="]),
        (["seed=interval(0,1)"], ["seed=interval(0,1) is no list of values"]),
    ],
)
def test_all_jobs_are_judged_before_the_first_one_starts(corpus, tmp_path, monkeypatch, capfd, overrides, parts):
    given = [word.partition("=")[0] for word in overrides]
    status, said = call(monkeypatch, *without(sweep_words(corpus, tmp_path), *given), *overrides)
    assert status == 2 and said.startswith("error: ") and len(said.splitlines()) == 1, said
    assert all(part in said for part in parts), said
    assert "Traceback" not in capfd.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_jobs_are_judged_by_the_files_that_they_are_made_of(corpus, tmp_path, monkeypatch):
    """A folder of --config-dir may replace an option."""
    (tmp_path / "configs" / "schedule").mkdir(parents=True)
    mine = "_target_: muown_train.training.schedule.wsd\n_partial_: true\nwarmup: 0.5\ncooldown: 0.5\n"
    (tmp_path / "configs" / "schedule" / "mine.yaml").write_text(mine)
    words = sweep_words(corpus, tmp_path / "runs", "schedule=mine", "seed=0,1", "name='s${seed}'")
    assert call(monkeypatch, "--config-dir", str(tmp_path / "configs"), *words)[0] is None
    assert list_runs(tmp_path / "runs") == ["s0", "s1"]


def test_secrets_are_hidden_in_a_sweep(corpus, tmp_path, monkeypatch, capsys):
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    words = sweep_words(corpus, tmp_path, f"+model.secret={secret},{secret}b", "name='s-${seed}'")
    status, said = call(monkeypatch, *words)
    assert status in (1, 2) and secret not in said + capsys.readouterr().out


def test_the_table_says_why_runs_ended(tmp_path):
    jobs = []
    for i, (state, reason) in enumerate(
        [("finished", ""), ("diverged", "loss 9"), ("failed", "disk full"), (None, "")]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        if state:
            write_status(folder, Outcome(state, reason), 1, 1)
            (folder / "metrics.jsonl").write_text(
                f'{{"step": 1, "valid/loss": {3 - i}}}\n{{"step": 2, "valid/loss": "nan"}}\n'
            )
        jobs.append(sweep.Job(f"seed={i}", folder))
    lines = sweep.format_jobs(jobs)
    assert [line.split() for line in lines[1:5]] == [
        ["1", "3.0000", "done", "seed=0"],
        ["2", "2.0000", "diverged", "seed=1"],
        ["3", "1.0000", "failed", "seed=2"],
        ["4", "—", "failed", "seed=3"],
    ]
    assert lines[5:] == [
        "job 2: loss 9",
        "job 3: disk full",
        f"best: seed=0, validation loss 3.0000, in {tmp_path}/0",
    ]


MINIMAL_SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class MinimalSweeper(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        plain = [word for word in arguments if not word.startswith("model.dim=")]
        for i, dim in enumerate((16, 33, 32)):
            (result,) = self.launcher.launch([[*plain, f"model.dim={dim}"]], initial_job_idx=i)
            try:
                print("objective", dim, repr(float(result.return_value)), flush=True)
            except ValueError as error:
                print("objective", dim, error, flush=True)


ConfigStore.instance().store(
    group="hydra/sweeper", name="minimal", node={"_target_": "hydra_plugins.minimal.MinimalSweeper"}, provider="minimal"
)
"""


def run_with_plugin(folder, *words):
    sys.path.insert(0, folder)
    sys.argv = ["muown-train", *words]
    sys.exit(run_quietly(lambda: main(words)))  # type: ignore[func-returns-value]


@pytest.mark.slow
def test_another_sweeper_gets_the_lowest_validation_loss_of_each_job(corpus, tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "minimal.py").write_text(textwrap.dedent(MINIMAL_SWEEPER))
    words = without(small(corpus, tmp_path / "runs", "tokens=1536", "name='dim-${model.dim}'"), "model.dim")
    log = tmp_path / "log"
    process = start_process(
        run_with_plugin,
        (str(tmp_path), "--multirun", "hydra/sweeper=minimal", *words, "model.dim=interval(16,64)"),
        log,
    )
    process.join(120)
    said = log.read_text()
    assert process.exitcode == 0, said  # what a failure means is for that sweeper to decide
    objectives = dict(re.findall(r"^objective (\d+) (.*)$", said, re.MULTILINE))
    for dim in (16, 32):
        lines = metrics(tmp_path / "runs" / f"dim-{dim}")
        assert float(objectives[str(dim)]) == min(line["valid/loss"] for line in lines if "valid/loss" in line)
    assert "does not split" in objectives["33"]
    assert re.findall(r"^job .*: model.dim.*$", said, re.MULTILINE) == [
        f"job {i + 1}: model.dim={d}" for i, d in enumerate((16, 33, 32))
    ]


def test_the_best_loss_of_a_run_without_numbers_is_infinite(tmp_path):
    assert sweep.find_best_loss(tmp_path) == math.inf
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "valid/loss": "nan"}\n{"step": 1, "train/loss": 2}\n')
    assert sweep.find_best_loss(tmp_path) == math.inf
