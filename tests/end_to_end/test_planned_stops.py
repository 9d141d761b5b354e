"""A planned stop loses nothing: a checkpoint is saved, and the same command ends where it would have ended."""

import math
import os
import signal
import sys
import time

import pytest
import torch

from muown_train.cli import summary
from muown_train.cli.train import train
from muown_train.config.compose import load_config
from muown_train.runs.status import Outcome, RepeatedFailure, count_start, forget_starts, lock_folder, read_status
from tests.cli.test_main import small
from tests.helpers.ranks import on_ranks, start_command
from tests.helpers.runs import built, find_probes, metrics, slow_but, trained, wait_until
from tests.training.test_trainer import weights

KEYS = ("step", "tokens", "train/loss", "train/grad_norm", "train/lr", "data/hash", "valid/loss", "valid/perplexity")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    run = trained(corpus, tmp_path_factory.mktemp("whole"))
    return metrics(run.folder), weights(run)


def stopped(run, after):
    """Train a run that is asked to stop during this step."""
    step = run.trainer.train_step

    def stopping():
        if run.trainer.step == after - 1:
            run.trainer.stop.request("SIGUSR1")
        return step()

    run.trainer.train_step = stopping
    run.resume()
    outcome = run.train()
    run.close()
    return outcome


@pytest.mark.parametrize("after", slow_but([5, 12], range(1, 13)))
def test_nothing_is_lost_or_done_twice(corpus, tmp_path, uninterrupted, after):
    run = built(corpus, tmp_path)
    expected = Outcome("stopped", "SIGUSR1")  # after the last step the evaluation is still owed
    assert stopped(run, after) == expected
    assert read_status(run.folder) | {"time": 0} == {
        "state": expected.state,
        "reason": expected.reason,
        "step": after,
        "steps": 12,
        "time": 0,
    }
    resumed = trained(corpus, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), uninterrupted[1], strict=True))
    for key in KEYS:
        assert [line.get(key) for line in metrics(run.folder)] == [line.get(key) for line in uninterrupted[0]], key


def stopped_on(world, corpus, out):
    run = built(corpus, out, world=world)
    if world.rank == 1:
        return stopped(run, 5)
    run.resume()
    outcome = run.train()
    run.close()
    return outcome, run.trainer.step


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_update(corpus, tmp_path, uninterrupted):
    first, second = on_ranks(2, stopped_on, corpus, tmp_path)
    assert first[0] == second == Outcome("stopped", "SIGUSR1")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1] == f"step-{first[1]:08d}"
    trained(corpus, tmp_path)
    assert [line["data/hash"] for line in metrics(tmp_path / "run")[1:]] == [
        line["data/hash"] for line in uninterrupted[0][1:]
    ]


def stop_in_a_measurement(run, step, call):
    """Train a run that is asked to stop at this call of `check` after this step, counted from 0."""
    stop, calls = run.trainer.stop, []
    check = stop.check

    def ask():
        if run.trainer.step == step:
            calls.append(step)
            if len(calls) == call + 1:
                stop.request("SIGTERM")
        check()

    stop.check = ask
    if probes := find_probes(run.trainer):
        for probe in probes.probes.values():
            probe.context.check_stop = ask
    run.resume()
    outcome = run.train()
    run.close()
    return outcome, len(calls)


@pytest.mark.parametrize(
    "step, call", slow_but([(5, 1)], [(0, 0), (0, 3), (5, 1), (10, 0), (12, 0), (12, 3)], several=True)
)
def test_a_stop_ends_an_evaluation_and_the_resume_owes_it(corpus, tmp_path, uninterrupted, step, call):
    run = built(corpus, tmp_path)
    outcome, calls = stop_in_a_measurement(run, step, call)
    assert outcome == Outcome("stopped", "SIGTERM") and calls == call + 1
    assert read_status(run.folder)["step"] == step and run.model.training
    if step:
        assert metrics(run.folder)[-1]["step"] == step and "valid/loss" not in metrics(run.folder)[-1]
    resumed = trained(corpus, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), uninterrupted[1], strict=True))
    for key in KEYS:
        assert [line.get(key) for line in metrics(run.folder)] == [line.get(key) for line in uninterrupted[0]], key
    assert read_status(run.folder)["state"] == "finished"
    assert built(corpus, tmp_path).resume() == Outcome("finished")


@pytest.mark.slow
@pytest.mark.parametrize("probe, step, call", [("spectral", 6, 1), ("effective_rank", 6, 1), ("spectral", 12, 5)])
def test_a_stop_ends_a_probe_and_the_resume_owes_it(corpus, tmp_path, probe, step, call):
    run = built(corpus, tmp_path, f"probes={probe}", "probe_every=6", "eval_every=12")
    outcome, calls = stop_in_a_measurement(run, step, call)
    assert outcome == Outcome("stopped", "SIGTERM") and calls == call + 1
    assert "probe/seconds" not in metrics(run.folder)[-1] and ("valid/loss" in metrics(run.folder)[-1]) == (step == 12)
    resumed = trained(corpus, tmp_path, f"probes={probe}", "probe_every=6", "eval_every=12")
    assert [line["step"] for line in metrics(resumed.folder) if "probe/seconds" in line] == [0, 6, 12]
    assert [line["step"] for line in metrics(resumed.folder)] == list(range(13))


def test_a_stop_ends_the_sample_of_a_run_that_has_ended(corpus, tmp_path, monkeypatch, capsys):
    run = trained(corpus, tmp_path, "tokens=256", "sample_tokens=5")
    monkeypatch.setattr(summary, "plot_losses", lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        monkeypatch.setattr(summary, "generate_sample", lambda run, number=number: signal.raise_signal(number))
        capsys.readouterr()
        before = signal.signal(number, lambda *_: pytest.fail("the sample goes on"))
        try:
            summary.report_end(run, Outcome("finished"), already=False)
        finally:
            signal.signal(number, before)
        said = capsys.readouterr()
        assert said.err == f"no sample: {number.name}\n" and "--- sample" not in said.out
        assert f"{run.folder}: " in said.out  # the summary goes on after it


def stopped_in_an_evaluation(world, corpus, out):
    run = built(corpus, out, world=world)
    run.trainer.stop.request = run.trainer.stop.request if world.rank else lambda reason: None
    return stop_in_a_measurement(run, 5, 0)


@pytest.mark.slow
def test_a_stop_of_one_rank_ends_the_evaluation_of_both(corpus, tmp_path):
    assert on_ranks(2, stopped_in_an_evaluation, corpus, tmp_path) == [(Outcome("stopped", "SIGTERM"), 2)] * 2
    resumed = trained(corpus, tmp_path)
    assert [line["step"] for line in metrics(resumed.folder) if "valid/loss" in line] == [0, 5, 10, 12]


def signalled(arguments, number, folder, flags=()):
    """Signal a process that trains a long run in its middle: its exit status, and what it said on both streams."""
    out, said = folder / "out.txt", folder / "said.txt"
    out.touch(), said.touch()
    process = start_command([*flags, *arguments, "tokens=512000", "log_every=1000"], out, said)
    wait_until(lambda: "step    0/2000" in out.read_text() or process.exitcode is not None)
    time.sleep(0.3)
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode, out.read_text(), said.read_text()


@pytest.mark.parametrize(
    "number", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
)
def test_signals(corpus, tmp_path, uninterrupted, number):  # which has filled the cache: nothing is said of that
    arguments = small(corpus, tmp_path / "runs", "name=run", "eval_every=1000", "save_every=1000")
    status, out, said = signalled(arguments, number, tmp_path)
    assert status == (0 if number == signal.SIGUSR1 else -number), said
    assert said.startswith(f"{number.name}: stopping after this step and saving")
    run = tmp_path / "runs" / "run"
    step = read_status(run)["step"]
    assert 0 < step < 2000 and f"stopped after step {step:,} ({number.name}), saved" in out
    assert metrics(run)[-1]["step"] == step
    assert (run / "checkpoints" / f"step-{step:08d}").exists()


@pytest.mark.slow
def test_a_stop_ends_a_multirun_too(corpus, tmp_path):
    arguments = small(corpus, tmp_path / "runs", "seed=1,2")
    status, out, _ = signalled(arguments, signal.SIGTERM, tmp_path, flags=["--multirun"])
    assert status == -signal.SIGTERM and "saved" in out and out.count("parameters,") <= 1
    assert len([path for path in (tmp_path / "runs").iterdir() if (path / "checkpoints").exists()]) == 1


def test_an_evaluation_that_is_owed_after_a_stop_may_follow_a_loss_that_is_no_number(corpus, tmp_path):
    run = built(corpus, tmp_path)
    run.model.register_forward_hook(lambda module, inputs, loss: loss * (math.nan if run.trainer.step == 4 else 1))
    assert stopped(run, 5) == Outcome("stopped", "SIGUSR1")
    lines = metrics(trained(corpus, tmp_path).folder)
    assert (lines[5]["train/loss"], lines[5]["train/skipped"]) == ("nan", True) and lines[5]["valid/loss"] > 0
    assert [line["step"] for line in lines] == list(range(13))


def test_a_time_limit(corpus, tmp_path):
    started = time.monotonic()
    run = built(corpus, tmp_path, "tokens=5120000", "time_limit=0.03")
    run.resume()
    assert run.train() == Outcome("stopped", "time limit")
    run.close()
    assert 1.5 < time.monotonic() - started < 15


def started_often(folder, *found):
    """Starts of a run whose newest checkpoint is of these steps, or which has none; or a planned end."""
    for step in found:
        if step in ("stopped", "finished"):
            forget_starts(folder)
            continue
        if step is not None:
            (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        count_start(folder, 3)


@pytest.mark.parametrize(
    "found, since",
    [
        ([5, 5, 5], "a checkpoint later than that of step 5"),
        ([5, 7, 7, 7], "a checkpoint later than that of step 7"),
        ([None, None, 5, 5, 5], "a checkpoint later than that of step 5"),
        ([5, 5, "stopped", 5, 5, 5], "a checkpoint later than that of step 5"),
        ([5, 5, "finished", 5, 5, 5], "a checkpoint later than that of step 5"),
        ([None, None, None], "any checkpoint"),
        ([None, "stopped", None, None, None], "any checkpoint"),
    ],
)
def test_gives_up_after_three_failures_without_a_new_checkpoint(tmp_path, found, since, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    started_often(tmp_path, *found)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')  # how far a start came does not matter
    with pytest.raises(RepeatedFailure, match=f"3 starts in a row failed without {since};"):
        started_often(tmp_path, found[-1])
    started_often(tmp_path, *found[-1:] * 3)  # by somebody who has read this: three starts may fail again
    with pytest.raises(RepeatedFailure):
        started_often(tmp_path, found[-1])
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    started_often(tmp_path, *found[-1:] * 3)  # submitted again


def test_status_that_cannot_be_read_is_none(tmp_path):
    (tmp_path / "status.json").write_text("[")
    assert read_status(tmp_path) == {}


def test_a_start_that_a_crash_cut_off_is_left_out(tmp_path):
    started_often(tmp_path, 5, 5)
    path = tmp_path / "starts.jsonl"
    path.write_text(path.read_text()[:-9])
    started_often(tmp_path, 5, 5)
    with pytest.raises(RepeatedFailure):
        started_often(tmp_path, 5)


def failing_early(kind, monkeypatch):
    """Make every start fail before the first step, in this way."""
    if kind == "the port":
        monkeypatch.setattr(
            "muown_train.runtime.distributed.join_world", lambda: (_ for _ in ()).throw(OSError("address in use"))
        )
    elif kind == "memory":
        monkeypatch.setattr(
            "muown_train.training.build.build_initial_model", lambda *_, **__: (_ for _ in ()).throw(MemoryError())
        )
    elif kind == "the data":
        monkeypatch.setattr(
            "muown_train.training.build.build_data", lambda *_: (_ for _ in ()).throw(ConnectionError("no hub"))
        )
    else:
        monkeypatch.setitem(sys.modules, "muown_train.training.build", None)  # its import fails


@pytest.mark.parametrize("kind", slow_but(["the port"], ["the port", "memory", "the data", "an import"]))
def test_failures_before_the_first_step_count(corpus, tmp_path, monkeypatch, kind):
    words = [*small(corpus, tmp_path, "name=run"), "give_up_after=3"]
    with monkeypatch.context() as patch:
        failing_early(kind, patch)
        for start in range(4):
            with pytest.raises((SystemExit, Exception)) as caught:
                train(load_config(words), words)
            assert isinstance(caught.value, RepeatedFailure) == (start == 3), caught.value
    train(load_config(words), words)  # by somebody who has read this, and mended it
    assert read_status(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_a_start_that_the_lock_refuses_does_not_count(corpus, tmp_path):
    words = [*small(corpus, tmp_path, "name=run"), "give_up_after=3"]
    lock = lock_folder(tmp_path / "run")
    for _ in range(5):
        with pytest.raises(ValueError, match="trained by another process"):
            train(load_config(words), words)
    assert not (tmp_path / "run" / "starts.jsonl").exists()
    lock.release()
    train(load_config(words), words)
