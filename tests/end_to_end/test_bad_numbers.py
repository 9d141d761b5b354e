"""Gradients that are no numbers, losses that run away, weights that part: never silent, on all ranks alike."""

import errno
import json
import math

import pytest
import torch

from muown_train.runs.status import Outcome, read_status
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, metrics, trained

ROWS = 8  # of one step of the runs of tests/helpers/runs.py


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The losses of a run of 12 steps, and the hashes of the batches of one of 16, that nothing disturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    trained(corpus, out, f"tokens={256 * 16}", "name=longer")
    hashes = [line["data/hash"] for line in metrics(out / "longer") if "data/hash" in line]
    return losses(trained(corpus, out).folder), hashes


def poisoned(run, rows, rank=0):
    """Make the loss of batches that begin at these rows NaN on one rank."""

    def poison(module, inputs, loss):
        first = run.trainer.loader.next_row - ROWS
        return loss * math.nan if first in rows and run.trainer.world.rank == rank and module.training else loss

    run.model.register_forward_hook(poison)
    return run


def fitted(run):
    try:
        before = run.resume()
        return before or run.train()
    finally:
        run.close()


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def poisoned_on_rank_1(world, corpus, out):
    run = poisoned(built(corpus, out, world=world), {4 * ROWS}, rank=1)
    weights = []
    step = run.trainer.train_step

    def watched():
        record = step()
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        return record

    run.trainer.train_step = watched
    assert fitted(run) == Outcome("finished")
    return weights


@pytest.mark.slow
def test_both_ranks_skip_the_step_that_one_of_them_cannot_make(corpus, tmp_path):
    of_ranks = on_ranks(2, poisoned_on_rank_1, corpus, tmp_path)
    for a, b in zip(*of_ranks, strict=True):
        assert torch.equal(a, b)
    for i in range(1, 12):
        assert torch.equal(of_ranks[0][i], of_ranks[0][i - 1]) == (i == 4), i
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "train/skipped" in line] == [5]
    (event,) = events(tmp_path / "run")
    assert (event["kind"], event["step"], event["ranks"]) == ("skipped update", 5, [1])
    assert event["data/hash"] == lines[5]["data/hash"] and event["rows"] == [4 * ROWS, 5 * ROWS]


BAD = {k * ROWS for k in (5, 6, 7)}  # steps 6 to 8; checkpoints at 4 and 8, log boundaries every 3


def check_rolled_back(folder, hashes):
    """Check that the steps were done without the bad batches."""
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(13))
    assert [line["data/hash"] for line in lines[1:]] == hashes[:5] + hashes[8:15]
    assert all(isinstance(line["train/loss"], float) and "train/skipped" not in line for line in lines[1:])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rolls_back_past_the_bad_rows(corpus, tmp_path, undisturbed, ranks):
    if ranks == 1:
        run = poisoned(built(corpus, tmp_path, "max_bad_updates=3"), BAD)
        assert fitted(run) == Outcome("finished")
    else:
        on_ranks(2, rolled_back_on_two, corpus, tmp_path)
    check_rolled_back(tmp_path / "run", undisturbed[1])
    skipped, rollback = events(tmp_path / "run")[:3], events(tmp_path / "run")[3]
    assert [event["step"] for event in skipped] == [6, 7, 8]
    assert (rollback["kind"], rollback["to"], len(rollback["rows"])) == ("rollback", 4, 3)


def rolled_back_on_two(world, corpus, out):
    run = poisoned(built(corpus, out, "max_bad_updates=3", world=world), BAD, rank=1)
    assert fitted(run) == Outcome("finished")


@pytest.mark.parametrize("stopped_at", [5, 9])
def test_a_stop_after_a_rollback_loses_neither_it_nor_the_skipped_rows(corpus, tmp_path, undisturbed, stopped_at):
    run = poisoned(built(corpus, tmp_path, "max_bad_updates=3"), BAD)
    step = run.trainer.train_step

    def stopping():
        if run.trainer.monitor.rollbacks and run.trainer.step == stopped_at - 1:
            run.trainer.stop.request("SIGTERM")
        return step()

    run.trainer.train_step = stopping
    assert fitted(run) == Outcome("stopped", "SIGTERM")
    assert fitted(poisoned(built(corpus, tmp_path, "max_bad_updates=3"), BAD)) == Outcome("finished")
    check_rolled_back(tmp_path / "run", undisturbed[1])


def test_two_bad_stretches_between_two_checkpoints(corpus, tmp_path, undisturbed):
    """Going back for the second, the first is not forgotten; no checkpoint is made in the middle of one."""
    rows = {k * ROWS for k in (1, 2, 7, 8)}  # steps 2 and 3, and then 6 and 7
    run = poisoned(built(corpus, tmp_path, "max_bad_updates=2", "save_every=1", "log_every=1"), rows)
    save, saved = run.trainer.checkpoints.save, []
    run.trainer.checkpoints.save = lambda step, *rest: (saved.append(step), save(step, *rest)) if step != 4 else None
    assert fitted(run) == Outcome("finished")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    hashes = undisturbed[1]
    assert [line["data/hash"] for line in lines[1:]] == [hashes[k] for k in range(16) if k * ROWS not in rows]
    assert [event["to"] for event in events(tmp_path / "run") if event["kind"] == "rollback"] == [1, 5]
    assert saved == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    "overrides, rows, part",
    [
        (["on_bad_updates=stop"], BAD, "not finite in 3 steps in a row, up to step 8"),
        (["max_rollbacks=0"], BAD, "after 0 rollbacks"),
        ([], {k * ROWS for k in range(100)}, "no checkpoint to go back to"),
        (["save_every=1"], {k * ROWS for k in range(2, 100)}, "after 3 rollbacks"),
    ],
)
def test_what_cannot_be_mended_has_diverged(corpus, tmp_path, overrides, rows, part):
    outcome = fitted(poisoned(built(corpus, tmp_path, "max_bad_updates=3", *overrides), rows))
    assert outcome.state == "diverged" and part in outcome.reason
    status = read_status(tmp_path / "run")
    assert status["state"] == "diverged" and status["reason"] == outcome.reason
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert fitted(built(corpus, tmp_path, "max_bad_updates=3", *overrides)) == outcome  # a result: nothing is trained
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def spoil(run, step, times):
    """Make a weight infinite after this step, so many times: no gradient was, so nothing was skipped."""
    train_step, left = run.trainer.train_step, [None] * times

    def spoiling():
        record = train_step()
        if run.trainer.step == step and left:
            left.pop()
            next(run.model.parameters()).data[0, 0] = math.inf
        return record

    run.trainer.train_step = spoiling
    return run


@pytest.mark.parametrize("step", [4, 8, 12])
def test_infinite_weights_are_never_saved(corpus, tmp_path, undisturbed, step):
    """The run goes back and does the steps again; at its end too."""
    outcome = fitted(spoil(built(corpus, tmp_path), step, 1))
    if step == 4:  # there is nothing to go back to
        assert outcome.state == "diverged" and "embedding.weight holds NaN or infinity after step 4" in outcome.reason
        assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
        return
    assert outcome == Outcome("finished") and losses(tmp_path / "run") == undisturbed[0]
    assert [event["to"] for event in events(tmp_path / "run")] == [step - 4]
    for p in built(corpus, tmp_path).model.parameters():
        assert p.isfinite().all()


def test_a_rollback_that_fails_again_goes_further_back(corpus, tmp_path, undisturbed, capsys):
    run = spoil(built(corpus, tmp_path, "save_every=2", "keep_checkpoints=5"), 8, 2)
    assert fitted(run) == Outcome("finished") and losses(tmp_path / "run") == undisturbed[0]
    assert [event["to"] for event in events(tmp_path / "run")] == [6, 4]
    assert "step-00000006 is left out (training from it has failed twice): set aside" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["damaged-step-00000006", *(f"step-{step:08d}" for step in (4, 6, 8, 10, 12))]


def test_a_loss_that_runs_away(corpus, tmp_path, undisturbed):
    """The mean over a log interval counts, after the step that is given."""
    limit = sum(undisturbed[0][3:6]) / 3 - 1e-6  # log_every=3
    outcome = fitted(built(corpus, tmp_path, f"diverged_above={limit}", "diverged_from=3", "eval_every=100"))
    assert outcome.state == "diverged" and f"above diverged_above={limit:g}" in outcome.reason
    assert metrics(tmp_path / "run")[-1]["step"] == 6
    assert (
        fitted(built(corpus, tmp_path, f"diverged_above={limit}", "diverged_from=12", "name=late")).state == "finished"
    )


def altered_on_one(world, corpus, out, altered_rank):
    # sharded, the owner's values would be everybody's after the next step
    run = built(corpus, out, "check_every=8", "shard_optimizer=none", world=world)  # no boundary of another kind
    step = run.trainer.train_step

    def alter():
        if run.trainer.step == 7 and world.rank == altered_rank:
            next(run.model.parameters()).data[0, 0] += 1e-3
        return step()

    run.trainer.train_step = alter
    try:
        fitted(run)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_weights_that_have_parted_are_found(corpus, tmp_path):
    said = on_ranks(2, altered_on_one, corpus, tmp_path, 1)
    assert said[0] == said[1] and said[0].startswith("after step 8 ") and "embed" in said[0]
    assert on_ranks(2, altered_on_one, corpus, tmp_path / "whole", None) == [None, None]


@pytest.mark.parametrize("policy, writable_at", [("stop", None), ("stop", 6), ("continue", 6), ("continue", None)])
@pytest.mark.slow
def test_metrics_that_cannot_be_written(corpus, tmp_path, monkeypatch, undisturbed, policy, writable_at):
    """By default no checkpoint goes beyond the record. Nothing is missing from it if there is room again in time."""
    run = built(corpus, tmp_path, f"on_save_error={policy}")
    record = run.trainer.metrics._lines
    write = record.write

    def write_unless_full():
        if run.trainer.step > 2 and (writable_at is None or run.trainer.step < writable_at):
            raise OSError(errno.ENOSPC, "No space left on device", str(record.path))
        write()

    monkeypatch.setattr(record, "write", write_unless_full)
    if policy == "continue":
        assert fitted(run) == Outcome("finished")
        assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(13 if writable_at else 1))
        assert (tmp_path / "run" / "checkpoints" / "step-00000012").exists()
        if not writable_at:
            return
    else:  # the save at step 4, or the last one, must not be
        with pytest.raises(OSError):
            fitted(run)
        assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    resumed = trained(corpus, tmp_path)
    assert [line["step"] for line in metrics(resumed.folder)] == list(range(13))
    assert losses(resumed.folder) == undisturbed[0]
