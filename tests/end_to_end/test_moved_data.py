"""The same data in another place continue a run: what counts is the content, not the path."""

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import built, losses, metrics, slow_but, trained


@pytest.fixture
def whole(corpus, tmp_path):
    return trained(corpus, tmp_path / "whole").folder


def begin(corpus, out):
    """Train half of a run."""
    run = built(corpus, out)
    step = run.trainer.train_step

    def train_step():
        if run.trainer.step == 7:
            run.trainer.stop.request("enough")
        return step()

    run.trainer.train_step = train_step
    run.resume()
    run.train()
    run.close()


@pytest.mark.parametrize("way", slow_but(["copied"], ["copied", "linked", "relative", "one glob more"]))
def test_files_in_another_place(corpus, tmp_path, whole, capsys, way):
    begin(corpus, tmp_path)
    place = f"{tmp_path}/elsewhere"
    if way == "copied":
        shutil.copytree(corpus, place, ignore=shutil.ignore_patterns("cache"))
    elif way == "linked":
        Path(place).symlink_to(corpus)
    given = {"relative": f"{os.path.relpath(corpus)}/*.txt", "one glob more": f"[{corpus}/0*.txt,{corpus}/1*.txt]"}
    train = given.get(way, f"{place}/*.txt")
    capsys.readouterr()
    run = trained(corpus, tmp_path, f"data.train={train}")
    assert losses(run.folder) == losses(whole)
    assert [line.get("data/hash") for line in metrics(run.folder)] == [line.get("data/hash") for line in metrics(whole)]
    assert "the data are those of the run, in another place: data.train was" in capsys.readouterr().err


def test_other_files_are_refused_before_a_step(corpus, tmp_path):
    begin(corpus, tmp_path)
    with pytest.raises(ValueError, match=r"holds a run on other data \(content was .*, is .*\)"):
        built(corpus, tmp_path, f"data.train={corpus}/0*.txt")


def test_another_kind_of_data_is_refused_at_once(corpus, tmp_path):
    begin(corpus, tmp_path)
    with pytest.raises(ValueError, match=r"holds a run with data._target_=.*files, this one has .*"):
        built(corpus, tmp_path, "data=random")
