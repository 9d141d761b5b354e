"""What happens to a run whose folder others change while it trains, or have changed before it goes on."""

import errno
import json
import os
import shutil
import threading

import pytest

from muown_train.config.run_name import locate_run_folder
from muown_train.runs import checkpoint_files
from muown_train.runs import status as statuses
from muown_train.runs.metrics import FolderChangedError
from muown_train.runs.status import Outcome, lock_folder, read_status, write_status
from muown_train.training.trainer import Trainer
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, metrics, trained


def act_at(patch, step, action):
    """Do something once, before the step after `step`."""
    train_step = Trainer.train_step

    def act_and_train(trainer):
        if trainer.step == step:
            action()
        return train_step(trainer)

    patch.setattr(Trainer, "train_step", act_and_train)


def remove(folder):
    shutil.rmtree(folder)


def put_another_in_its_place(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    (folder / "theirs").write_text("a stranger's")


def remove_lock(folder):
    (folder / ".lock").unlink()


def lock_again(folder):
    (folder / ".lock").unlink()
    lock_folder(folder)


def cut_record(folder):
    os.truncate(folder / "metrics.jsonl", 100)


def remove_record(folder):
    (folder / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    "change, says",
    [
        (remove, "run was moved, removed or replaced while this run was training: nothing more is saved"),
        (put_another_in_its_place, "run was moved, removed or replaced while this run was training"),
        (remove_lock, "run/.lock was removed or replaced while this run was training, so that another process may"),
        (lock_again, "run/.lock was removed or replaced while this run was training"),
        (cut_record, r"metrics.jsonl was changed by somebody else .* \(it has 100 bytes now, and had [\d,]+\)"),
        (remove_record, r"metrics.jsonl was changed by somebody else .* \(it was removed\)"),
    ],
)
@pytest.mark.parametrize("on_save_error", ["stop", pytest.param("continue", marks=pytest.mark.slow)])
def test_a_folder_that_changes_while_a_run_trains(corpus, tmp_path, monkeypatch, change, says, on_save_error):
    run = built(corpus, tmp_path, f"on_save_error={on_save_error}")
    run.resume()
    act_at(monkeypatch, 5, lambda: change(run.folder))
    left = {}
    act_at(monkeypatch, 6, lambda: left.update({path: path.stat().st_size for path in tmp_path.rglob("*")}))
    with pytest.raises(FolderChangedError, match=says):
        run.train()
    assert run.trainer.step == 7  # it ends at the first boundary, and not where it would have saved
    run.close()
    now = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.name != "status.json"}
    assert now == {path: size for path, size in left.items() if path.name != "status.json"}  # nothing was written
    if change in (cut_record, remove_record):
        assert read_status(run.folder)["state"] == "failed"


def change_on_this_rank(world, corpus, out):
    """Train on two ranks while the main one finds another folder in place of its own; return what each rank raises."""
    run = built(corpus, out, "micro_batch=1", world=world)
    run.resume()
    if world.is_main:
        with pytest.MonkeyPatch.context() as patch:
            act_at(patch, 5, lambda: put_another_in_its_place(run.folder))
            return catch(run)
    return catch(run)


def catch(run):
    try:
        run.train()
    except OSError as error:
        return type(error).__name__, str(error), run.trainer.step
    finally:
        run.close()


@pytest.mark.slow
def test_all_ranks_stop_together(corpus, tmp_path):
    found = on_ranks(2, change_on_this_rank, corpus, tmp_path)
    assert found[0] == found[1] and found[0][0] == "FolderChangedError"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["theirs"]


def test_a_record_that_lacks_lines_is_said_when_the_run_goes_on(corpus, tmp_path, capsys):
    run = trained(corpus, tmp_path, "tokens=2048")
    file = run.folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] not in (3, 4, 6)))
    capsys.readouterr()
    trained(corpus, tmp_path)
    said = capsys.readouterr().err
    assert "warning: " in said and "lacks 3 of the lines up to step 8, from step 3 to step 6" in said
    assert [line["step"] for line in metrics(run.folder)] == [0, 1, 2, 5, 7, 8, 9, 10, 11, 12]
    trained(corpus, tmp_path, "name=whole", "tokens=2048")
    capsys.readouterr()
    trained(corpus, tmp_path, "name=whole")
    assert "lacks" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["loss.png", "status.json", "metrics.jsonl", "tokenizer.json", ".lock", "wandb_id"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_stands_where_a_run_writes_is_found_before_it_trains(tmp_path, name, make):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / name)
    with pytest.raises(ValueError, match=rf"run/{name} must be a file, which the run writes: move what is there"):
        locate_run_folder(str(tmp_path), "run")


def test_a_file_where_the_folder_of_a_run_should_be(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is a file, and must be the folder of the run"):
        locate_run_folder(str(tmp_path), "run")


def test_a_full_disk_still_takes_the_status(tmp_path, monkeypatch):
    write_status(tmp_path, Outcome("running"), 5, 10)

    def refuse(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(statuses, "write_atomic", refuse)
    write_status(tmp_path, Outcome("failed", "the disk is full"), 7, 10)
    assert read_status(tmp_path)["state"] == "failed" and read_status(tmp_path)["step"] == 7


def test_a_run_that_fails_leaves_no_part_of_a_checkpoint(corpus, tmp_path, monkeypatch):
    run = built(corpus, tmp_path)
    run.resume()
    gate, write_rank = threading.Event(), checkpoint_files.write_rank
    monkeypatch.setattr(checkpoint_files, "write_rank", lambda *words: gate.wait() and write_rank(*words))

    def fail():
        raise RuntimeError("a fault")

    act_at(monkeypatch, 4, fail)  # the checkpoint of this step is still being written
    with pytest.raises(RuntimeError, match="a fault"):
        run.train()
    gate.set()
    run.close()
    assert list((run.folder / "checkpoints").iterdir()) == []
