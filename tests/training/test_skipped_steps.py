"""Runs whose device decides to skip a step, as on a GPU, equal those whose host decides, as on a CPU."""

import sys
from contextlib import nullcontext

import pytest
import torch

from muown_train.optim.core import skip_step
from muown_train.runs.status import Outcome
from muown_train.runtime.distributed import World
from tests.end_to_end.test_bad_numbers import ROWS, events, fitted, poisoned
from tests.end_to_end.test_failing_data import MESSAGE, failing
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, built, losses, metrics, slow_but, trained

STEPS = {0, 4, 5, 9}  # those whose gradients are NaN


def outcome_of(corpus, out, overrides, rows, on_device, world=HERE, rank=0):
    """How a run ended whose flags are read by the host, or not; its weights and its state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skip_step, "can_read_without_sync", lambda skip: not on_device)
        run = poisoned(built(corpus, out, *overrides, world=world), rows, rank)
        # most steps happen under a flag, if they are to
        flags, step = [], run.trainer.optimizer.step
        flagged = lambda: (flags.append(run.trainer.optimizer.found_inf is not None), step())  # noqa: E731
        run.trainer.optimizer.step = flagged
        outcome = fitted(run)
        assert all(flag == on_device for flag in flags)
    state = [run.trainer.optimizer.state[p] for p in run.model.parameters() if p in run.trainer.optimizer.state]
    return outcome, list(run.model.parameters()), state


def record(folder):
    """Lines and events without what depends on time."""
    timed = ("time", "system/tokens_per_second", "system/seconds_left", "data/wait_fraction")
    lines = [{key: value for key, value in line.items() if key not in timed} for line in metrics(folder)]
    return lines, events(folder)


def check_alike(corpus, tmp_path, overrides, rows):
    known, gated = (outcome_of(corpus, tmp_path / str(flag), overrides, rows, flag) for flag in (False, True))
    assert known[0] == gated[0]
    assert record(tmp_path / "False" / "run") == record(tmp_path / "True" / "run")
    torch.testing.assert_close(known[1:], gated[1:], rtol=0, atol=0)
    return gated[0]


@pytest.mark.parametrize("optim", slow_but(["muown"], ["muown", "muon", "normuon", "normuown", "lion", "adamw"]))
def test_skipped_steps(corpus, tmp_path, optim):
    rows = {k * ROWS for k in STEPS}
    assert check_alike(corpus, tmp_path, [f"optim={optim}"], rows) == Outcome("finished")
    lines = metrics(tmp_path / "True" / "run")
    assert [line["step"] for line in lines if "train/skipped" in line] == [k + 1 for k in sorted(STEPS)]


@pytest.mark.parametrize("overrides, state", [([], "finished"), (["on_bad_updates=stop"], "diverged")])
@pytest.mark.slow
def test_too_many_skipped_steps(corpus, tmp_path, overrides, state):
    outcome = check_alike(corpus, tmp_path, ["max_bad_updates=3", *overrides], {k * ROWS for k in (5, 6, 7)})
    assert outcome.state == state


@pytest.mark.slow
def test_a_run_that_was_interrupted(corpus, tmp_path):
    """A checkpoint after skipped steps holds the right state."""
    rows = {0, 3 * ROWS}
    _, whole, state = outcome_of(corpus, tmp_path / "whole", [], rows, True)

    def stopping(run):
        step = run.trainer.train_step
        run.trainer.train_step = lambda: (run.trainer.step == 4 and run.trainer.stop.request("SIGTERM"), step())[1]
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skip_step, "can_read_without_sync", lambda skip: False)
        assert fitted(stopping(poisoned(built(corpus, tmp_path), rows))) == Outcome("stopped", "SIGTERM")
    _, weights, state_again = outcome_of(corpus, tmp_path, [], rows, True)
    torch.testing.assert_close((weights, state_again), (whole, state), rtol=0, atol=0)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole" / "run")


def gated_on_two(world, corpus, out):
    known, gated = (
        outcome_of(corpus, out / str(flag), [], {k * ROWS for k in STEPS}, flag, world, rank=1)
        for flag in (False, True)
    )
    assert known[0] == gated[0]
    torch.testing.assert_close(known[1:], gated[1:], rtol=0, atol=0)
    return record(out / "False" / "run") == record(out / "True" / "run")


@pytest.mark.slow
def test_on_two_ranks(corpus, tmp_path):
    assert on_ranks(2, gated_on_two, corpus, tmp_path) == [True, True]


def failing_while_gated(world, corpus, out):
    skip_step.can_read_without_sync = lambda skip: False  # in a process of its own
    return failing(world, corpus, out, 1)


@pytest.mark.slow
def test_data_that_fail_on_one_of_two_ranks(corpus, tmp_path):
    assert on_ranks(2, failing_while_gated, corpus, tmp_path) == [MESSAGE, MESSAGE]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(8))
    trained(corpus, tmp_path), trained(corpus, tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole" / "run"), abs=1e-4)


def test_no_step_asks_the_device_for_a_number(corpus, tmp_path, monkeypatch):
    """The device "meta" has none to give."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *of_p: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # which knows no such device
    run = built(corpus, tmp_path, "batch_tokens=128", world=World(0, 1, torch.device("meta")))
    run.trainer.autocast = nullcontext
    for _ in range(3):
        run.trainer.step_metrics.add(run.trainer.train_step())
    with pytest.raises(NotImplementedError, match="meta"):
        run.trainer.collect()
    run.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optim", ["muown", "muon", "normuon", "normuown", "lion", "adamw"])
def test_no_step_waits_for_the_gpu(corpus, tmp_path, optim):
    run = built(corpus, tmp_path, f"optim={optim}", world=World(0, 1, torch.device("cuda", 0)))
    run.trainer.train_step(), run.trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.close()
