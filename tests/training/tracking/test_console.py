"""What a run shows: a line now and then in a log, one live line on a terminal, news always."""

import io
import math

import pytest

from muown_train.runtime.formatting import format_duration, format_speed
from muown_train.training.tracking.console import ConsoleSink, describe_line


def test_a_log_has_a_line_now_and_then_and_all_news(capsys):
    sink = ConsoleSink(lambda: (0, ""), every=1e9)
    sink.start(None, {}, 300)
    sink.write([{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0}])
    sink.write([{"step": 3, "train/loss": 1.5}])
    sink.write([{"step": 4, "train/loss": 1.0, "valid/loss": 1.25, "valid/perplexity": math.exp(1.25)}])
    sink.write([{"step": 5, "train/loss": 1.0, "train/skipped": True}, {"step": 6, "train/loss": 1.0}])
    sink.write([{"step": 9, "train/loss": math.nan, "train/skipped": True, "train/skipped_updates": 3}])
    sink.write([{"step": 4, "train/loss": 1.0, "train/rolled_back": True}])
    sink.write([{"step": 5, "train/loss": 1.0, "tasks/words/acc": 0.5, "tasks/seconds": 3.0}])
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step   2/300  loss 2.0000",
        "step   4/300  loss 1.0000  validation loss 1.2500 (perplexity 3.49)",
        "step   9/300  loss nan  3 STEPS SKIPPED: gradients not finite",
        "step   4/300  loss 1.0000  ROLLED BACK",
        "step   5/300  loss 1.0000  words/acc 0.5000",
    ]


def test_a_sample_is_shown_but_for_the_last_one_which_the_summary_shows(capsys):
    sink = ConsoleSink(lambda: (0, ""), every=1e9)
    sink.start(None, {}, 20)
    for step in (10, 20):
        sink.write([{"step": step, "train/loss": 3.0, "sample": "def f():\n\x1b[2J"}])
    expected = "--- sample after step 10 ---\ndef f():\n\\x1b[2J\n--- end of sample ---\n"
    assert capsys.readouterr().out == expected


def test_a_log_says_that_the_model_is_compiled(capsys):
    for compiled in (True, False):
        ConsoleSink(lambda: (0, ""), every=1e9).start(None, {"compile": compiled}, 300)
    assert capsys.readouterr().out == "compiling; the first step comes in a minute or more\n"


USUAL = {
    "step": 4990,
    "tokens": 2_000_000_000,
    "train/loss": 10.8249,
    "train/lr": 4e-3,
    "train/grad_norm": 1.269,
    "data/hash": "0123456789abcdef",
    "system/tokens_per_second": 1_234_567.8,
    "system/mfu": 0.412,
    "system/seconds_left": 36_000 + 59 * 60,
}
EVALUATED = USUAL | {"valid/loss": 10.8312, "valid/perplexity": 50574.12}


@pytest.mark.parametrize("news", [{}, {"train/skipped_updates": 10}, {"train/rolled_back": True}])
@pytest.mark.parametrize("line", [USUAL, EVALUATED])
def test_usual_lines_fit_100_columns(line, news):
    text = describe_line(line | news, 10_000)
    assert len(text) <= 100 + ("valid/loss" in line and 40 * len(news))
    assert "loss 10.8249" in text and text.endswith("  10h59m left")
    assert ("1.235M tokens/s  MFU 41%" in text) == (line is USUAL and not news)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def print_to_terminal(monkeypatch, width: int) -> Terminal:
    """Make standard output a terminal; not in a fixture, since pytest sets it anew when the test begins."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    return terminal


def read_live_line(sink: ConsoleSink, width: int) -> str:
    """What the live line shows now; it must be one line."""
    from rich.console import Console

    shown = io.StringIO()
    Console(file=shown, width=width).print(sink.status._progress.get_renderable())
    assert shown.getvalue().count("\n") == 1
    return shown.getvalue().rstrip("\n")


@pytest.mark.parametrize("width", [120, 100, 80, 60, 40])
def test_the_live_line_never_wraps_and_news_scroll_up(width, monkeypatch):
    screen = print_to_terminal(monkeypatch, width)
    sink = ConsoleSink(lambda: (4990, ""))
    sink.start(None, {}, 10_000)
    sink.write([USUAL])
    live = read_live_line(sink, width)
    assert width < 80 or live.endswith("10h59m left")
    numbers = "4990/10000  loss 10.825  1.235M tokens/s"
    numbers += "  lr 4.00e-03" * (width >= 100) + "  grad norm 1.269  MFU 41%" * (width >= 120)
    assert width < 80 or f" {numbers} " in live
    sink.write([EVALUATED | {"train/skipped_updates": 1}, USUAL | {"step": 4991, "train/diverged": True}])
    sink.finish({})
    said = " ".join(screen.getvalue().split())
    assert "1 STEP SKIPPED" in said and "(perplexity 50574.12)" in said and "DIVERGED" in said


def test_the_live_line_says_what_the_run_does_and_moves_between_lines_of_metrics(monkeypatch):
    print_to_terminal(monkeypatch, 80)
    now = (20, "")
    sink = ConsoleSink(lambda: now)
    sink.start(None, {"compile": True}, 100)
    assert " 20/100  compiling " in read_live_line(sink, 80)
    now = (20, "evaluating")
    assert " 20/100  evaluating " in read_live_line(sink, 80)
    sink.write([{"step": 40, "train/loss": 2.0, "system/seconds_left": 60.0}])
    now = (70, "")
    assert " 70/100  loss 2.000 " in read_live_line(sink, 80) and read_live_line(sink, 80).endswith(" 30s left")
    now = (100, "saving")
    sink.write([{"step": 100, "train/loss": 1.0, "system/seconds_left": 0.0}])
    assert " 100/100  saving  loss 1.000 " in read_live_line(sink, 80)
    sink.finish({})


def test_numbers_for_people():
    assert [format_duration(s) for s in (5, 90, 3700)] == ["5s", "1m30s", "1h01m"]
    assert [format_speed(r) for r in (12.3, 45_678.9, 999_999.4, 999_999.6)] == [
        "12 tokens/s",
        "45,679 tokens/s",
        "999,999 tokens/s",
        "1.000M tokens/s",
    ]
    line = {"step": 7, "train/loss": 1.0, "train/lr": 0.004, "system/mfu": 0.5, "system/seconds_left": 61}
    assert describe_line(line, 10) == "step  7/10  loss 1.0000  lr 4.00e-03  MFU 50%  1m01s left"
