"""Programs whose output nobody reads to its end, as in `… | head`: they end quietly."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muown_train.cli.errors import FAILED, WRONG, report_errors
from muown_train.cli.main import COMMANDS, main
from muown_train.cli.process import OUTPUT_CLOSED, check_ranks
from tests.helpers.folders import line, settings, write
from tests.helpers.paths import ROOT
from tests.helpers.runs import slow_but


def unread(*words: str, cwd: Path = ROOT) -> tuple[int, str]:
    """Exit status and standard error of a program whose standard output is closed at the other end."""
    ours, theirs = os.pipe()
    os.close(ours)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", slow_but(["prepare"], COMMANDS))
def test_help_of_a_command(name):
    status, said = unread("-m", "muown_train", name, "--help")
    assert status in (0, OUTPUT_CLOSED) and not said  # 0 where argparse took it


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--cfg", "job"]], ids=" ".join)
def test_what_training_says_without_training(words):
    assert unread("-m", "muown_train", *words) == (OUTPUT_CLOSED, "")


def test_in_the_midst_of_its_work(tmp_path):
    write(tmp_path / "run", [line(1, 3.0), line(2, 2.0, 2.0)], settings())
    status, said = unread("-m", "muown_train", "compare", "run", cwd=tmp_path)
    assert status in (1, OUTPUT_CLOSED) and not said  # 1 where it is rich that prints


def test_what_was_read_to_its_end_is_no_fault():
    code = (
        "import os; from muown_train.cli.process import run_script; "
        "run_script(lambda: print(1, flush=True) or os.read(0, 1) and 0)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout.readline() == b"1\n"
        process.stdout.close()
        process.stdin.write(b"1")
        process.stdin.close()
        assert process.wait() == 0 and not process.stderr.read()


def test_what_is_wrong_is_still_said(tmp_path):
    status, said = unread("-m", "muown_train", "compare", "nothing", cwd=tmp_path)
    assert (
        status == 2 and said == "error: there is no folder nothing: give those of runs, such as runs/NAME or 'runs/*'\n"
    )


def test_another_broken_pipe_is_an_error(tmp_path):
    code = "from muown_train.cli.errors import report_errors\nfrom muown_train.cli.process import run_script\n"
    code += (
        "def main():\n    with report_errors([]):\n        raise BrokenPipeError(32, 'Broken pipe')\nrun_script(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: [Errno 32] Broken pipe\n"


@pytest.mark.slow
def test_training_that_nobody_watches_any_more_goes_on_another_time(tmp_path):
    words = (
        "out=runs",
        "tokens=2000",
        "batch_tokens=256",
        "micro_batch=1",
        "model.layers=1",
        "model.dim=16",
        "model.heads=1",
    )
    status, said = unread("-m", "muown_train", *words, "data=random", "sample_tokens=0", cwd=tmp_path)
    goes_on = "the same command goes on from the last checkpoint"
    assert (status, said) == (1, f"error: nobody reads what it prints any more; {goes_on}\n")


ENDING = "import os, sys; from muown_train.cli.process import run_command; os.environ.pop('RANK', 0); {first}\n"
ENDING += "print('said'); run_command(lambda: sys.exit({status}))"


@pytest.mark.parametrize(
    "status, first, expected",
    [
        (128 + signal.SIGINT, "", -signal.SIGINT),
        (128 + signal.SIGTERM, "", -signal.SIGTERM),
        (128 + signal.SIGHUP, "", -signal.SIGHUP),
        (128 + signal.SIGKILL, "", 128 + signal.SIGKILL),
        (130, "import signal; signal.signal(2, signal.SIG_IGN)", -signal.SIGINT),
        (130, "os.environ['RANK'] = '0'", 130),
        (2, "", 2),
    ],
)
def test_a_command_that_a_signal_has_stopped_ends_by_it(status, first, expected):
    code = ENDING.format(first=first or "pass", status=status)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stdout) == (expected, b"said\n")


def test_the_loop_of_a_shell_ends_with_the_command_that_ctrl_c_has_stopped():
    """A program stands for a run that has been saved."""
    code = ENDING.format(
        first="import signal, time; heard = []; signal.signal(2, lambda *_: heard.append(1)); print('up', flush=True)\n"
        "while not heard: time.sleep(0.01)",
        status=130,
    )
    loop = 'for s in 1 2 3; do "$@"; done; echo went on'
    words = ["bash", "-c", loop, "bash", sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert (process.returncode, said) == (-signal.SIGINT, b"said\n")


@pytest.mark.parametrize(
    "variables, part",
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' must be a whole number of at least 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be"),
        ({"WORLD_SIZE": "9" * 20}, "must be a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT and RANK too: torchrun sets them all"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1 does not fit WORLD_SIZE=1"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number of at least 0"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' must be"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 does not fit WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be a port"),
    ],
)
def test_variables_of_ranks_that_cannot_be(monkeypatch, capsys, variables, part):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert check_ranks() == 1
    if len(variables) > 1:
        variables = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["muown-train", "seed=1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == WRONG
    said = capsys.readouterr().err
    assert part in said and said.count("\n") == 1, said


def test_ranks_that_fit(monkeypatch):
    for rank in range(4):
        for name, value in {"WORLD_SIZE": 4, "RANK": rank, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "29500")
        assert check_ranks() == 4


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_machine_that_gives_no_more_is_one_sentence(capsys, error):
    with pytest.raises(SystemExit) as end, report_errors([]):
        raise error
    assert end.value.code == FAILED and "this machine gives the process no more" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="other"), report_errors([]):
        raise RuntimeError("other")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENFILE])
def test_what_cannot_be_read_now_is_no_wrong_setting(capsys, number):
    with pytest.raises(SystemExit) as end, report_errors([]):
        raise OSError(number, os.strerror(number), "/runs/a/index.json")
    said = capsys.readouterr().err
    assert end.value.code == FAILED and said.startswith("error: ") and said.count("\n") == 1
    assert "/runs/a/index.json" in said and os.strerror(number) in said


@pytest.mark.parametrize("closed", ["stdout", "stdin", "stderr"])
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path, closed):
    code = """
import os, sys
from muown_train.cli.process import run_command
def main():
    with open(sys.argv[1], "w") as file:
        assert file.fileno() > 2, file.fileno()
        print("said")
        file.write("whole")
run_command(main)
"""
    number = ("stdin", "stdout", "stderr").index(closed)
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(["bash", "-c", f'"$@" {number}>&-', "bash", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "whole" and done.stdout == ("" if closed == "stdout" else "said\n")
