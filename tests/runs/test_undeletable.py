"""Files that cannot be removed, as on network file systems: cleaning up is given up, and no work is lost.

`os.unlink` and `os.rmdir` refuse names with ".nfs" here, since the superuser, who may run these tests, can remove
everything else.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest

from muown_train.cli import summary
from muown_train.data import cache
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.status import Outcome
from muown_train.runtime.atomic_files import atomic_folder, clear_path, write_atomic
from tests.helpers.runs import HERE, built, trained


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    def refuse(real):
        def remove(path, *args, **kwargs):
            if ".nfs" in os.path.basename(os.fspath(path)):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            return real(path, *args, **kwargs)

        return remove

    for name in ("unlink", "remove", "rmdir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))


def leave(folder: Path, name: str = ".nfs01") -> Path:
    """Make a folder with a file that cannot be removed."""
    folder.mkdir(parents=True)
    (folder / name).write_text("open elsewhere")
    with pytest.raises(OSError):
        shutil.rmtree(folder)
    return folder


class Number:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("leftover", ["partial-step-00000002", "partial-step-00000001", "partial-step-00000009"])
def test_checkpoints_are_written_beside_what_cannot_be_removed(tmp_path, leftover):
    leave(tmp_path / leftover)
    checkpoints = Checkpoints(tmp_path, HERE, keep=1)
    for step in (1, 2):
        checkpoints.save(step, {"number": Number(step)}, wait=True)
    number = Number()
    assert Checkpoints(tmp_path, HERE).load({"number": number}) == 2 == number.value
    assert sorted(path.name for path in tmp_path.iterdir()) == [leftover, "step-00000002"]


def test_an_old_checkpoint_that_cannot_be_removed_leaves_the_names_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE, keep=1)
    for step in (1, 2, 3):
        checkpoints.save(step, {"number": Number(step)}, wait=True)
        (tmp_path / f"step-{step:08d}" / ".nfs07").write_text("open elsewhere")
    leave(tmp_path / "partial-step-00000003")
    checkpoints.save(4, {"number": Number(4)}, wait=True)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]
    assert (tmp_path / "partial-step-00000003+").exists()


def test_a_damaged_checkpoint_that_cannot_be_moved_is_passed_over(tmp_path, monkeypatch):
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, HERE, warn=said.append)
    for step in (1, 2):
        checkpoints.save(step, {"number": Number(step)}, wait=True)
    (tmp_path / "step-00000002" / "rank-00000.json").write_text("{")
    rename = Path.rename

    def refuse(path, target):
        if path.name == "step-00000002":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    number = Number()
    assert checkpoints.load({"number": number}) == 1 == number.value
    assert "cannot be set aside" in said[0]
    with pytest.raises(OSError, match="cannot write a checkpoint"):  # it is not taken for a saved one
        checkpoints.save(2, {"number": Number(5)}, wait=True)
    checkpoints.save(3, {"number": Number(3)}, wait=True)
    assert checkpoints.load({"number": number}) == 3


def test_a_file_with_the_name_of_a_checkpoint_is_set_aside(corpus, tmp_path):
    folder = trained(corpus, tmp_path).folder / "checkpoints"
    (folder / "step-00000050").write_text("x")
    assert trained(corpus, tmp_path, "tokens=5120").trainer.step == 20
    assert (folder / "damaged-step-00000050").is_file() and (folder / "step-00000020").is_dir()


def test_a_figure_that_cannot_be_replaced_is_a_warning(corpus, tmp_path, monkeypatch, capsys):
    run = trained(corpus, tmp_path)

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted", "loss.png")

    monkeypatch.setattr(summary, "plot_losses", refuse)
    summary.report_end(run, Outcome("finished"), already=True)
    said = capsys.readouterr()
    assert "warning: the figure of the losses cannot be written: " in said.err and "validation loss" in said.out


def test_a_run_trains_beside_leftovers(corpus, tmp_path):
    folder = tmp_path / "run"
    leave(folder / "checkpoints" / "partial-step-00000004")
    for name in ("status.json", "manifest.json", "config.yaml", "metrics.jsonl"):
        leave(folder / f"{name}.partial", ".nfs02")
    run = trained(corpus, tmp_path)
    assert run.trainer.step == 12 and built(corpus, tmp_path).resume().state == "finished"


@pytest.mark.parametrize("make", [lambda path: leave(path), lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_file_is_written_whatever_stands_where_it_is_begun(tmp_path, make):
    make(tmp_path / "a.json.partial")
    write_atomic(tmp_path / "a.json", b"1")
    assert (tmp_path / "a.json").read_bytes() == b"1"


def test_a_folder_is_written_whatever_stands_where_it_is_begun(tmp_path):
    for text in ("first", "second"):
        if text == "second":
            leave(tmp_path / ".shards.partial"), leave(tmp_path / ".shards.before")
        with atomic_folder(tmp_path / "shards", lambda folder: None) as partial:
            (partial / "a.txt").write_text(text)
    assert (tmp_path / "shards" / "a.txt").read_text() == "second"


def test_a_cache_is_built_anew_beside_one_that_cannot_be_removed(tmp_path):
    leave(tmp_path / "tokens-1.partial"), leave(tmp_path / "tokens-1")
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "a").write_text("content")
        return {}

    for _ in range(2):
        cache._build(tmp_path / "tokens-1", build) if not calls else None
    assert (tmp_path / "tokens-1" / "a").read_text() == "content" and len(calls) == 1


def test_clear_path(tmp_path):
    assert clear_path(tmp_path / "absent") == tmp_path / "absent"
    leave(tmp_path / "stays"), leave(tmp_path / "stays+")
    assert clear_path(tmp_path / "stays") == tmp_path / "stays++"
    (tmp_path / "link").symlink_to(tmp_path / "stays")
    assert clear_path(tmp_path / "link") == tmp_path / "link"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "stays").exists()
