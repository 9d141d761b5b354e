"""loss.png shows a run that is under way, at little cost, and never ends one."""

import math

import pytest

from muown_train.cli import summary
from muown_train.cli.summary import LossFigure, draw_losses
from muown_train.cli.train import train
from tests.helpers.runs import built, make_config, trained

EVALUATED = [{"step": 5, "valid/loss": 1.0}]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: `clock[0]` is its time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(summary, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def figure(corpus, tmp_path, clock, monkeypatch):
    """A sink that has started, whose drawings `figure.drawn` lists by their time and take `figure.takes` seconds."""
    made = LossFigure(built(corpus, tmp_path))
    made.drawn, made.takes = [], 0.1

    def draw(run):
        made.drawn.append(clock[0])
        clock[0] += made.takes

    monkeypatch.setattr(summary, "draw_losses", draw)
    made.start(made.run.folder, {}, 12)
    yield made
    made.run.close()


def write_each_second(figure, clock, seconds):
    for _ in range(seconds):
        figure.write(EVALUATED)
        clock[0] += 1


def test_it_is_drawn_once_a_minute_and_not_in_the_first(figure, clock):
    write_each_second(figure, clock, 200)
    first, second, third = figure.drawn
    assert first - 1000 >= 60 and 60 <= second - first < 62 and 60 <= third - second < 62


def test_drawing_takes_a_hundredth_of_the_time_at_most(figure, clock):
    figure.takes = 2.0
    write_each_second(figure, clock, 500)
    assert len(figure.drawn) == 3 and min(b - a for a, b in zip(figure.drawn, figure.drawn[1:], strict=False)) >= 200


def test_only_evaluations_renew_it(figure, clock):
    clock[0] += 100
    figure.write([{"step": 3, "train/loss": 1.0}])
    assert figure.drawn == []
    figure.write([{"step": 4, "train/loss": 1.0}, *EVALUATED])
    assert len(figure.drawn) == 1


def test_it_is_the_picture_of_the_end(corpus, tmp_path, monkeypatch):
    run = trained(corpus, tmp_path)
    figure = LossFigure(run)
    monkeypatch.setattr(summary, "_PAUSE", 0.0)
    figure.start(run.folder, {}, 12)
    figure.write(EVALUATED)
    during = (run.folder / "loss.png").read_bytes()
    (run.folder / "loss.png").unlink()
    draw_losses(run)
    assert during == (run.folder / "loss.png").read_bytes() and during.startswith(b"\x89PNG")


def test_one_that_fails_ends_no_run_and_is_said_once(corpus, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(summary, "_PAUSE", 0.0)
    monkeypatch.setattr(summary, "draw_losses", refuse)
    monkeypatch.setattr(summary, "report_end", lambda *_, **__: None)
    loss = train(make_config(corpus, tmp_path), ["name=run"])
    assert math.isfinite(loss)
    assert capsys.readouterr().err.count("loss.png is not renewed before the end of the run: no fonts") == 1


def test_a_run_of_the_command_line_renews_it(corpus, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(summary, "_PAUSE", 0.0)
    monkeypatch.setattr(summary, "_SHARE", math.inf)
    monkeypatch.setattr(summary, "draw_losses", lambda run: drawn.append(run.trainer.step))
    monkeypatch.setattr(summary, "report_end", lambda *_, **__: None)
    train(make_config(corpus, tmp_path), ["name=run"])
    assert drawn == [0, 5, 10, 12]
