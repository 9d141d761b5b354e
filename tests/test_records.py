"""Records: whole lines, each step once, nothing lost."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from muown_train.records import Metrics, PlainConsole, describe, duration, plot_losses


def test_append_and_read(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append([{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": math.nan}])
    assert metrics.read() == [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": "nan"}]


@given(st.integers(-1, 12), st.integers(0, 30))
def test_rewind_moves_lines_and_loses_none(step, cut):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = Metrics(folder)
        metrics.append({"step": i, "train/loss": 1.0 / (i + 1)} for i in range(10))
        text = metrics.path.read_text()
        metrics.path.write_text(text[: len(text) - cut])  # as a kill might leave it
        metrics.rewind(step)
        kept = metrics.path.read_text()
        moved = folder / "metrics.rolled_back.jsonl"
        assert text.startswith(kept)
        assert [json.loads(line)["step"] for line in kept.splitlines()] == [line["step"] for line in metrics.read()]
        assert all(line["step"] <= step for line in metrics.read())
        rest = moved.read_text() if moved.exists() else ""
        assert (kept + rest).rstrip("\n") == text[: len(text) - cut].rstrip("\n")


def test_plain_console_prints_now_and_then(capsys):
    sink = PlainConsole(every=1e9)
    sink.start(None, {}, 300)
    sink.lines([{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0}])
    sink.lines([{"step": 3, "train/loss": 1.5}])
    sink.lines([{"step": 4, "train/loss": 1.0, "valid/loss": 1.25, "valid/perplexity": math.exp(1.25)}])
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  loss")[0] for line in out] == ["step   2/300", "step   4/300"]
    assert "validation loss 1.2500 (perplexity 3.49)" in out[1]


def test_numbers_for_people():
    assert [duration(s) for s in (5, 90, 3700)] == ["5s", "1m30s", "1h01m"]
    line = {"step": 7, "train/loss": 1.0, "train/lr": 0.004, "system/mfu": 0.5, "system/seconds_left": 61}
    assert describe(line, 10) == "step  7/10  loss 1.0000  lr 4.00e-03  MFU 50.0%  1m01s left"


def test_the_plot_is_a_picture(tmp_path):
    lines = [{"step": i, "tokens": i * 10, "train/loss": 2.0 / (i + 1), "valid/loss": 2.1} for i in range(5)]
    plot_losses([*lines, {"step": 6, "tokens": 60, "train/loss": "nan"}], tmp_path / "loss.png", "x", 3.0)
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
