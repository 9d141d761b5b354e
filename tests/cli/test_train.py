"""From a command to a step: the command line is parsed once, and few frames lie between `main` and `train_step`."""

import os
import signal
import subprocess
import sys
import time

import pytest

from muown_train.cli import main as entry
from muown_train.cli.train import choose_stop_status
from muown_train.config import compose, schema
from muown_train.training.trainer import Trainer
from tests.cli.test_main import COMMAND, call, small
from tests.helpers.runs import wait_until


def test_at_most_eight_frames_lead_from_main_to_a_step(corpus, tmp_path, monkeypatch):
    frames: list[str] = []
    train_step = Trainer.train_step

    def watch(trainer: Trainer):
        frame = sys._getframe().f_back  # of whoever called train_step
        frames[:] = ["train_step"]
        while frame is not None:
            frames.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")
            if frame.f_code is entry.main.__code__:
                break
            frame = frame.f_back
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", watch)
    assert call(monkeypatch, *small(corpus, tmp_path, "name=frames", "tokens=256"))[0] is None
    assert frames[-1] == "muown_train.cli.main.main" and len(frames) <= 8, frames


def test_the_command_line_is_composed_and_checked_once(corpus, tmp_path, monkeypatch):
    counts = {"composed": 0, "checked": 0}
    hydra_compose, check = compose.compose, schema.RunConfig.__post_init__

    def count_compose(*args, **options):
        counts["composed"] += 1
        return hydra_compose(*args, **options)

    def count_check(config):
        counts["checked"] += 1
        check(config)

    compose._compose_with_hydra.cache_clear()  # another test may have composed the same
    monkeypatch.setattr(compose, "compose", count_compose)
    monkeypatch.setattr(schema.RunConfig, "__post_init__", count_check)
    assert call(monkeypatch, *small(corpus, tmp_path, "name=once", "tokens=256"))[0] is None
    assert counts == {"composed": 1, "checked": 1}


def test_earlier_names_of_keys_are_taken_with_a_sentence(corpus, tmp_path, monkeypatch):
    words = small(corpus, tmp_path, "name=renamed", "tokens=256", "check_every=7", "model.checkpointed=1")
    status, said = call(monkeypatch, *words)
    assert status is None
    assert "check_every is called replica_check_every now" in said
    assert "model.checkpointed is called model.activation_checkpointing now" in said
    stored = (tmp_path / "renamed" / "config.yaml").read_text()
    assert "replica_check_every: 7" in stored and "activation_checkpointing: 1" in stored


@pytest.mark.parametrize(
    "reason, alone, in_slurm, as_rank",
    [
        ("SIGINT", 130, 130, 0),
        ("SIGTERM", 143, 0, 0),
        ("SIGHUP", 129, 0, 0),
        ("SIGUSR1", 0, 0, 0),
        ("time limit", 0, 0, 0),
    ],
)
def test_the_status_of_a_stop_is_the_signal_unless_a_launcher_decides(monkeypatch, reason, alone, in_slurm, as_rank):
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert choose_stop_status(reason) == alone
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert choose_stop_status(reason) == in_slurm
    monkeypatch.setenv("RANK", "0")
    assert choose_stop_status(reason) == as_rank


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["training", "starting"])
def test_ctrl_c_ends_a_loop_of_a_shell_and_the_run_is_saved(corpus, tmp_path, moment):
    words = small(corpus, tmp_path / "runs", "name='s${seed}'", "tokens=512000", "eval_every=1000", "log_every=1000")
    loop = 'for s in 1 2 3; do "$@" seed=$s; done; echo went on'
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", loop, "bash", *COMMAND, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to the shell and to what it has started
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        wait_until(lambda: moment == "starting" or "step    0/2000" in log.read_text())
        if moment == "starting":
            time.sleep(1)  # it is importing
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT, log.read_text()
    said = log.read_text()
    assert "went on" not in said and not (tmp_path / "runs" / "s2").exists()
    if moment == "training":
        assert "(SIGINT), saved: the same command goes on" in said and list(
            (tmp_path / "runs/s1/checkpoints").iterdir()
        )
