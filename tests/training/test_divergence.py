"""What the monitor finds in lines of metrics: too many skipped steps in a row, and losses that have run away."""

import math

import pytest

from muown_train.cli.summary import report_end
from muown_train.runs.status import read_status
from muown_train.training.divergence import DivergenceMonitor, explain_unlearned
from tests.helpers.runs import built


def test_judging_skipped_steps():
    monitor = DivergenceMonitor(max_bad_updates=3)
    marks = "..xx.xxxx.x"
    lines = [{"step": step} | ({"train/skipped": True} if mark == "x" else {}) for step, mark in enumerate(marks, 1)]
    rows = [(line["step"], line["step"] + 1) for line in lines]
    assert monitor.find_bad_steps(lines[:7], rows[:7]) is None
    assert monitor.find_bad_steps(lines[7:], rows[7:]).endswith("in 4 steps in a row, up to step 9")
    assert monitor.bad_rows == rows[5:9]


def test_judging_losses_window_by_window():
    """However many steps come at once, the same windows are judged."""
    losses = [9, 9, 9, 5, 5, 5, 5, math.nan, 9, 9, 9, 9]
    lines = [{"step": step, "train/loss": float(loss)} for step, loss in enumerate(losses, 1)]
    for cuts in ([12], [1, 2, 7, 12], range(1, 13), [5, 12]):
        monitor, said, begin = DivergenceMonitor(diverged_above=6, diverged_from=3, window=3), [], 0
        for end in cuts:
            said.append(monitor.find_divergence(lines[begin:end]))
            begin = end
        expected = ["training loss 7.0000, the mean of 3 steps up to step 9,"] * (9 in cuts)
        expected += ["training loss 9.0000, the mean of 3 steps up to step 12,"]
        assert [reason for reason in said if reason] == [f"{text} is above diverged_above=6" for text in expected]
    monitor = DivergenceMonitor(diverged_above=6, window=3)
    assert (
        monitor.find_divergence(lines[1:3]) is None and monitor.find_divergence(lines[3:6]) is None
    )  # a resume in the first window


@pytest.mark.parametrize(
    "loss, unigram, learnt",
    [
        (math.log(512), 5.4, False),
        (6.2383, None, False),
        (880.7, 5.4, False),
        (math.nan, 5.4, False),
        (6.2, 5.4, True),
        (3.0, None, True),
        (math.log(512), math.log(512), True),  # random data
    ],
)
def test_a_model_that_only_guesses_is_said(loss, unigram, learnt):
    sentence = explain_unlearned(loss, 512, unigram)
    assert (sentence == "") == learnt
    assert learnt or f"its validation loss {loss:.4f} is no lower than 6.2383" in sentence


def test_a_learning_rate_that_ruins_a_run_is_said_at_its_end_and_in_its_status(corpus, tmp_path, capsys):
    run = built(corpus, tmp_path, "optim.lr=1e4", "tokens=1536")
    run.resume()
    outcome = run.train()
    report_end(run, outcome, already=False)
    run.close()
    status = read_status(run.folder)
    assert status["state"] == "finished" and "the model has learnt nothing" in status["reason"]
    assert status["reason"] in capsys.readouterr().out
    again = built(corpus, tmp_path, "optim.lr=1e4", "tokens=1536")
    assert again.resume() == outcome
    again.close()
