"""What the monitor finds in lines of metrics: too many skipped steps in a row, and losses that have run away."""

import math

from muown_train.training.divergence import DivergenceMonitor


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
