"""The progress of a preparation: no rate before there is one, and a steady time left."""

import io

from rich.console import Console

from muown_train.data.shards.progress import Report


def lines_of_a_report(monkeypatch, total, bursts, seconds=1.0):
    """What is printed while so many documents come at once each second, those of a file after those of another."""
    clock = 100.0
    monkeypatch.setattr("muown_train.data.shards.progress.time.monotonic", lambda: clock)
    written = io.StringIO()
    report = Report(Console(file=written, width=200))
    report.start(1000, total)
    for done, documents in bursts:
        clock += seconds
        for _ in range(documents):
            report.add(10, done)
    return written.getvalue().splitlines()


def test_no_rate_before_there_is_one_and_then_that_of_the_last_seconds(monkeypatch):
    bursts = [(0.0, 500)] * 10 + [(0.0, 50)] * 40  # 5,000 tokens a second, then 500
    lines = lines_of_a_report(monkeypatch, 100_000, bursts)
    assert lines[:2] == ["going on after 1,000 tokens", "6,010 tokens of 100,000"]
    assert lines[2] == "31,010 tokens of 100,000, 5,000 tokens/s, 14 s left"
    assert lines[-1] == "69,010 tokens of 100,000, 500 tokens/s, 1m02s left"
    rates = [int(line.split(", ")[1].split()[0].replace(",", "")) for line in lines[2:]]
    assert rates == sorted(rates, reverse=True) and set(rates[-4:]) == {500}


def test_files_that_are_done_tell_the_time_left_where_the_total_is_not_known(monkeypatch):
    bursts = [(0.0, 100)] * 9 + [(0.125, 100)] * 8  # nine seconds for an eighth of the files
    lines = lines_of_a_report(monkeypatch, None, bursts)
    assert lines[1:3] == ["2,010 tokens", "7,010 tokens, 1,000 tokens/s"]
    assert lines[3] == "12,010 tokens, 1,000 tokens/s, 1m08s left"  # of 10,000 / 0.125
    assert lines[4] == "17,010 tokens, 1,000 tokens/s, 1m03s left"
