"""Records: whole lines, each step once, nothing lost."""

import errno
import io
import json
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.runs import metrics as records
from muown_train.runs.metrics import Metrics, read_metrics


def some_lines(first: int, last: int) -> list[dict]:
    return [{"step": i, "tokens": 256 * i, "train/loss": 1.0 / (i + 1)} for i in range(first, last + 1)]


def steps(path: Path) -> list[int]:
    """Of a file in which every line must parse."""
    return [json.loads(text)["step"] for text in path.read_text().splitlines()] if path.exists() else []


def test_append_and_read(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append([{"step": 0, "train/loss": 2.5}, {"step": 1, "train/loss": math.nan}])
    assert json.loads(metrics.path.read_text().splitlines()[1]) == {"step": 1, "train/loss": "nan"}
    for lines in (metrics.read(), read_metrics(metrics.path)):
        assert lines[0] == {"step": 0, "train/loss": 2.5} and math.isnan(lines[1]["train/loss"])


def test_a_last_line_is_amended(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.amend({"step": 0, "a": 1})
    metrics.append([{"step": 1}])
    metrics.amend({"step": 1, "valid/loss": 2.0})
    assert metrics.read() == [{"step": 0, "a": 1}, {"step": 1, "valid/loss": 2.0}]


@settings(max_examples=60)
@given(st.data())
def test_killed_at_any_byte_and_rewound_each_step_is_there_once(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = Metrics(folder)
        metrics.append(some_lines(0, 11))
        text = metrics.path.read_bytes()
        cut = data.draw(st.integers(0, len(text)), "bytes that reached the file")
        metrics.path.write_bytes(text[:cut] + data.draw(st.sampled_from([b"", b"\xff\0\x0b", b"\0" * 9]), "garbage"))
        resumed = Metrics(folder)
        there = len(resumed.read())
        step = data.draw(st.integers(-1, there - 1), "of the checkpoint")
        resumed.rewind(step)
        assert steps(metrics.path) == list(range(step + 1))
        moved = folder / "metrics.rolled_back.jsonl"
        rest = moved.read_bytes() if moved.exists() else b""
        assert (metrics.path.read_bytes() + rest).startswith(text[:cut])  # all that was there
        resumed.append(some_lines(step + 1, 12))
        assert steps(metrics.path) == list(range(13))


@given(st.integers(0, 400))
def test_without_a_rewind_only_a_part_of_a_line_is_cut_off(cut):
    with tempfile.TemporaryDirectory() as name:
        metrics = Metrics(Path(name))
        metrics.append(some_lines(0, 5))
        text = metrics.path.read_bytes()[:cut]
        metrics.path.write_bytes(text)
        metrics = Metrics(Path(name))
        whole = len(metrics.read())
        metrics.append(some_lines(whole, 7))
        assert steps(metrics.path) == list(range(8))


def test_a_kill_between_moving_and_replacing_loses_nothing(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path)
    metrics.append(some_lines(0, 9))
    before = metrics.path.read_bytes()

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            metrics.rewind(6)
    assert metrics.path.read_bytes() == before
    Metrics(tmp_path).rewind(6)
    assert steps(metrics.path) == list(range(7))
    assert sorted(set(steps(tmp_path / "metrics.rolled_back.jsonl"))) == [7, 8, 9]


def test_what_was_rolled_back_adds_up_and_repeated_steps_are_among_it(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append(some_lines(0, 4))
    metrics.rewind(2)
    metrics.append(some_lines(3, 5) + some_lines(4, 5))
    metrics.rewind(5)
    assert steps(metrics.path) == list(range(6))
    assert steps(tmp_path / "metrics.rolled_back.jsonl") == [3, 4, 4, 5]


class Disk:
    """A file of which only so many bytes can be written at a time, until it is full."""

    def __init__(self, room: int, at_once: int = 70) -> None:
        self.room, self.at_once = room, at_once

    def put_under(self, patch: pytest.MonkeyPatch) -> None:
        disk = self

        class File(io.FileIO):
            def write(self, data) -> int:
                if disk.room == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                count = min(len(data), disk.at_once, disk.room)
                disk.room -= count
                return super().write(bytes(data)[:count])

        plain = Path.open
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", *a, **k: File(path, mode) if mode == "a+b" else plain(path, mode, *a, **k),
        )


@given(st.integers(0, 700), st.integers(1, 200))
def test_a_full_disk_leaves_whole_lines_and_the_others_follow_in_order(room, at_once):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        metrics = Metrics(Path(name))
        metrics.append(some_lines(0, 3))
        disk = Disk(room, at_once)
        disk.put_under(patch)
        failed = 0
        for step in range(4, 12):
            try:
                metrics.append(some_lines(step, step))
            except OSError as error:
                failed += 1
                assert "No space left on device" in str(error) and "to be written" in str(error)
                assert str(metrics.path) in str(error)
            assert steps(metrics.path) == list(range(len(steps(metrics.path))))
            assert [line["step"] for line in metrics.read()] == list(range(step + 1))
            disk.room += 100 if step == 8 else 0
        assert failed or room >= 8 * 40 - 100
        disk.room = 10**6
        metrics.append(some_lines(12, 12))
        assert steps(metrics.path) == list(range(13))


def test_a_rollback_takes_back_lines_that_wait(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append(some_lines(0, 3))
    with pytest.MonkeyPatch.context() as patch:
        Disk(0).put_under(patch)
        with pytest.raises(OSError, match="3 lines to be written"):
            metrics.append(some_lines(4, 6))
    metrics.rewind(4)
    assert steps(metrics.path) == [0, 1, 2, 3, 4]
    assert steps(tmp_path / "metrics.rolled_back.jsonl") == [5, 6]
    metrics.append(some_lines(5, 5))
    assert steps(metrics.path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_on_a_file_system_that_is_really_full(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        metrics = Metrics(tmp_path)
        metrics.append(some_lines(0, 9))
        filling = tmp_path / "filling"
        filling.write_bytes(bytes(60 * 1024))
        with pytest.raises(OSError, match="No space left"):
            metrics.append(some_lines(10, 400))
        assert steps(metrics.path) == list(range(10))
        filling.unlink()
        metrics.append(some_lines(401, 401))
        assert steps(metrics.path) == list(range(402))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_went_away(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = Metrics(folder)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=r"No such file or directory; 1 line to be written"):
        metrics.append(some_lines(0, 0))
    folder.mkdir()
    metrics.append(some_lines(1, 1))
    assert steps(metrics.path) == [0, 1]


def test_events_are_never_taken_back_and_never_stop_the_run(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append(some_lines(0, 5))
    metrics.append_event({"kind": "skipped update", "step": 5, "ranks": [1], "train/grad_norm": math.inf})
    with pytest.MonkeyPatch.context() as patch:
        Disk(0).put_under(patch)
        metrics.append_event({"kind": "rollback", "step": 6})
    metrics.rewind(2)
    metrics.append(some_lines(3, 3))
    metrics.sync()
    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [("skipped update", 5), ("rollback", 6)]
    assert events[0]["train/grad_norm"] == "inf"
