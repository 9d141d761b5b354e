"""Progress lines: few in a log, one that is replaced on a terminal, with a steady rate and time left."""

import io

import pytest

from muown_train.runtime import progress as progress_module
from muown_train.runtime.progress import Progress, StatusLine


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: a list with the time, to be advanced."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def lines_of(clock, bursts, total=None, label="", expected=None):
    """What a log shows while this many tokens are done in each second."""
    log, done = io.StringIO(), 1000
    with StatusLine(log, every=5.0, first=2.0) as line:
        progress = Progress(line, total, done, label)
        for tokens in bursts:
            clock[0] += 1
            done += tokens
            progress.update(done, expected)
    return log.getvalue().splitlines()


def test_there_is_no_rate_at_first_and_then_that_of_the_last_seconds(clock):
    lines = lines_of(clock, [5000] * 10 + [500] * 40, 100_000)
    assert lines[0] == "11,000 of 100,000 tokens"
    assert lines[1] == "36,000 of 100,000 tokens, 5,000 tokens/s, 13s left"
    assert lines[-1] == "69,500 of 100,000 tokens, 500 tokens/s, 1m01s left"
    assert len(lines) == 10


def test_an_expected_total_gives_the_time_left(clock):
    assert lines_of(clock, [1000] * 8, expected=80_000)[1] == "8,000 tokens, 1,000 tokens/s, 1m12s left"


def test_a_label(clock):
    assert lines_of(clock, [1000] * 8, 21_000, "run")[1] == "run: 8,000 of 21,000 tokens, 1,000 tokens/s, 13s left"


def test_a_log_is_not_flooded_and_messages_stay(clock):
    log = io.StringIO()
    line = StatusLine(log, every=10.0)
    for second in range(31):
        line.show(f"at {second}")
        clock[0] += 1
    line.print("news")
    line.show("unsaid")
    line.close()
    assert log.getvalue().splitlines() == ["at 0", "at 10", "at 20", "at 30", "news"]


def test_on_a_terminal_one_line_is_replaced_and_vanishes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen, file = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    with StatusLine(screen) as line:
        line.show("[a] of [b]", 0.5, 90)
        line.print("a message [that stays]")
        print("a result")
        line._progress.refresh()
    assert file.getvalue() == "a result\n"
    shown = screen.getvalue()
    assert "[a] of [b]" in shown and "1m30s left" in shown and "a message [that stays]\n" in shown
    assert shown.endswith("\x1b[2K") or "\x1b[2K" in shown[shown.rindex("1m30s left") :]
