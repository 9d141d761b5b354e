"""Tasks side by side: their GPUs, signals, failures, and what is left to other processes."""

import fcntl
import json
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from muown_train.experiments import launch
from muown_train.experiments.grid import load_grid
from muown_train.experiments.launch import Launcher, Task
from muown_train.experiments.progress import read_progress
from tests.helpers.folders import line, write
from tests.helpers.runs import wait_until


@pytest.mark.parametrize(("given", "names"), [(None, ["0", "1", "2", "3"]), ("4,5,6,7", ["4", "5", "6", "7"])])
def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch, given, names):
    started = []

    class Ends:
        returncode = 0

        def __init__(self, words, env, **rest):
            started.append((words, env))

        def poll(self):
            return 0

    monkeypatch.setattr(launch.subprocess, "Popen", Ends)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    grid = load_grid("500m_magnitude", "tiny").select(1)
    found = read_progress(grid, grid.expand(), str(tmp_path))
    said: list[str] = []
    assert (
        Launcher(tmp_path / "logs", 2, 2, 4, say=said.append).run(
            [launch.make_training_task(each, 2) for each in found]
        )
        == 0
    )
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in started] == [
        ",".join(names[:2]),
        ",".join(names[2:]),
        ",".join(names[:2]),
    ]
    assert all("--nproc-per-node=2" in words and "muown_train" in words for words, _ in started)
    assert {env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] for _, env in started} == {"600"}  # ranks have time to save
    assert {env["OMP_NUM_THREADS"] for _, env in started} == {str(max(1, len(os.sched_getaffinity(0)) // 4))}
    with pytest.raises(ValueError, match="jobs=3 runs of ranks=2 need 6 GPUs, there are 4"):
        Launcher(tmp_path, 3, 2, 4)


def test_a_run_that_fails_does_not_hold_up_the_others(tmp_path):
    def task(name, program):
        return Task(name, name, [sys.executable, "-c", program], "begins", lambda: "", lambda: "done")

    said: list[str] = []
    tasks = [task("a", "import sys; sys.exit('no such data')"), task("b", "import sys; sys.exit(3)"), task("c", "")]
    assert Launcher(tmp_path, 1, 1, 0, say=said.append).run(tasks) == 1
    assert [line for line in said if "  failed  " in line] == [
        "a  failed  status 1, no such data; 2 to go",
        f"b  failed  status 3, see {tmp_path}/b.log; 1 to go",
    ]
    assert any(line.startswith("c  done") for line in said), said


def test_a_setting_that_cannot_be_is_said_once(tmp_path):
    """The first run that ends tells of the others, but not a later one."""
    said: list[str] = []
    refused, well = [sys.executable, "-c", "import sys; sys.exit(2)"], [sys.executable, "-c", ""]

    def run(*commands):
        said.clear()
        tasks = [Task(name, name, each, "begins", str, str) for name, each in zip("abc", commands, strict=True)]
        return Launcher(tmp_path, 1, 1, 0, say=said.append).run(tasks), sum("  begins" in line for line in said)

    assert run(refused, well, well) == (1, 1) and any(line.startswith("2 more are not started") for line in said)
    assert run(well, refused, well) == (1, 3)


def test_a_run_that_another_process_begins_at_the_same_time_is_left_to_it(tmp_path):
    said: list[str] = []
    taken = iter([False, True])
    task = Task("a", "a", [sys.executable, "-c", "import sys; sys.exit(2)"], "", str, str, lambda: next(taken))
    assert Launcher(tmp_path, 1, 1, 0, say=said.append).run([task]) == 0
    assert said[-1] == "a  another process has begun it meanwhile: left to that one"


def test_a_run_that_was_killed_is_said_to(tmp_path):
    said: list[str] = []
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    task = Task("a", "a", [sys.executable, "-c", program], "", lambda: "step 10/30", str)
    assert Launcher(tmp_path, 1, 1, 0, say=said.append).run([task]) == 1
    assert said[-1] == "failed: a: killed by SIGKILL  step 10/30; the same command goes on"


SAVES = """import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
pathlib.Path("up").touch()
end = time.monotonic() + 2
while time.monotonic() < end:
    time.sleep(0.1)
pathlib.Path("saved").touch()
"""


@pytest.mark.parametrize(
    ("signals", "status", "saved"),
    [
        pytest.param([signal.SIGHUP], 0, True, marks=pytest.mark.slow),  # as under nohup
        pytest.param([signal.SIGTERM, signal.SIGTERM], 143, True, marks=pytest.mark.slow),
        ([signal.SIGINT, signal.SIGINT], 130, False),
    ],
    ids=["hangup", "twice SIGTERM", "twice Ctrl-C"],
)
def test_signals_while_runs_are_in_training(tmp_path, monkeypatch, signals, status, saved):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    task = Task("a", "a", [sys.executable, "-c", SAVES], "begins", lambda: "", lambda: "done")

    def send():
        while not Path("up").exists():
            time.sleep(0.05)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        threading.Thread(target=send).start()
        assert Launcher(tmp_path, 1, 1, 0, say=said.append).run([task]) == status
    finally:
        signal.signal(signal.SIGHUP, before)
    assert Path("saved").exists() == saved
    assert ("killed" in said[-1]) == (not saved), said


RANKS = """import pathlib, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)]
pathlib.Path("ranks").write_text(" ".join(str(rank.pid) for rank in ranks))
pathlib.Path("up").touch()
time.sleep(60)
"""


def test_a_second_ctrl_c_ends_the_ranks_too(tmp_path, monkeypatch):
    """Which have sessions of their own, as those of torchrun."""
    monkeypatch.chdir(tmp_path)

    def send():
        wait_until(Path("up").exists)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    threading.Thread(target=send).start()
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{RANKS}"
    task = Task("a", "a", [sys.executable, "-c", program], "begins", lambda: "", lambda: "done")
    assert Launcher(tmp_path, 1, 1, 0, say=lambda _: None).run([task]) == 130
    (rank,) = Path("ranks").read_text().split()
    wait_until(lambda: not Path(f"/proc/{rank}").exists() or "\nState:\tZ" in Path(f"/proc/{rank}/status").read_text())


@pytest.mark.parametrize(("state", "claims"), [("stopped", True), (None, True), ("running", False), ("failed", False)])
def test_a_run_that_fails_while_it_is_stopped_is_said_to(tmp_path, monkeypatch, state, claims):
    """Such as when the disk is full."""
    monkeypatch.chdir(tmp_path)
    grid = load_grid("500m_magnitude", "tiny").select(1)
    (found, *_) = read_progress(grid, grid.expand(), str(tmp_path / "runs"))
    program = "import pathlib, signal, sys, time; signal.signal(15, lambda *_: sys.exit('no space left')); "
    task = replace(
        launch.make_training_task(found),
        command=[sys.executable, "-c", f"{program}pathlib.Path('up').touch(); time.sleep(60)"],
    )
    if state:
        found.folder.mkdir(parents=True)
        (found.folder / "status.json").write_text(json.dumps({"state": state}))

    def send():
        wait_until(Path("up").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    said: list[str] = []
    assert Launcher(tmp_path, 1, 1, 0, say=said.append).run([task]) == 143
    assert ("all runs have saved" in said[-1]) == claims and ("no space left" in "".join(said)) != claims, said


def test_a_run_with_many_probes_says_how_far_it_is(tmp_path):
    """The last line of metrics.jsonl may be longer than what is read of its end."""
    grid = load_grid("500m_magnitude", "tiny").select(1)
    (point, *_) = grid.expand()
    many = {f"spectral/matrix_{i}": 1.0 for i in range(5000)}
    lines = [line(0), line(1, 5.0), line(2, 4.0, valid=4.5) | many]
    write(tmp_path / grid.folder / point.name, lines, dict(point.config), "finished", steps=2)
    (found, *_) = read_progress(grid, [point], str(tmp_path))
    assert launch.make_training_task(found).get_progress() == "step 2/2  validation loss 4.5000"


def test_a_run_that_another_process_has_begun_meanwhile_is_left_to_it(tmp_path):
    grid = load_grid("500m_magnitude", "tiny").select(1)
    tasks = [launch.make_training_task(each) for each in read_progress(grid, grid.expand(), str(tmp_path / "runs"))]
    folder = tmp_path / "runs" / grid.folder / tasks[0].log
    folder.mkdir(parents=True)
    said: list[str] = []
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Launcher(tmp_path / "logs", 1, 1, 0, say=said.append).run(tasks[:1]) == 0
    assert "another process has begun it meanwhile" in said[1] and len(said) == 2, said
    assert not list((tmp_path / "logs").iterdir())


def test_a_line_of_a_file_of_runs_is_words():
    grid = load_grid("500m_magnitude", "tiny").select(1)
    found = read_progress(grid, grid.expand(["data=files", "data.train='a b/*.txt'"]), "of runs")
    for each in found:
        assert shlex.split(shlex.join(launch.make_overrides(each))) == launch.make_overrides(each)
