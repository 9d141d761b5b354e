"""Benchmarks, and the old names of commands: what they say to a word that they do not know."""

import os
import runpy
import subprocess
import sys

import pytest

from muown_train.cli.errors import WRONG
from muown_train.cli.main import COMMANDS
from tests.helpers.paths import ROOT
from tests.helpers.runs import slow_but

SCRIPTS = ROOT / "scripts"
BENCHMARKS = [path.name for path in sorted(SCRIPTS.glob("benchmark_*.py"))]
MOVED = [path.name for path in sorted(SCRIPTS.glob("*.py")) if "run_moved_script" in path.read_text()]


def run_script(name: str, *words: str, cwd) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPTS / name), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", slow_but(["benchmark_optim.py"], BENCHMARKS))
@pytest.mark.slow
def test_an_unknown_flag_of_a_benchmark_is_one_sentence(name, tmp_path):
    done = run_script(name, "--rundos=3", cwd=tmp_path)
    assert done.returncode == WRONG and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_count_that_cannot_be_is_one_sentence(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    main = runpy.run_path(str(SCRIPTS / name))["main"]
    words = ["--tokenizer=x", "--files=x", "--tokens"] if name == "benchmark_data.py" else ["--rounds"]
    for count in ("0", "-1", "1.5", "9" * 400):
        if (name, count) == ("benchmark_train.py", "0"):  # measures memory alone
            continue
        monkeypatch.setattr(sys, "argv", [name, *words, count])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert ended.value.code == WRONG and said.startswith("error: ") and words[-1] in said
        assert said.count("\n") == 1 and len(said) < 200


def test_every_command_but_two_had_a_script():
    assert len(MOVED) == len(COMMANDS.keys() - {"train", "tokenizer"})


@pytest.mark.parametrize("name", slow_but(["compare.py"], MOVED))
def test_an_old_name_says_the_new_one_and_works(name, tmp_path):
    done = run_script(name, "--rundos=3", cwd=tmp_path)
    assert done.returncode == WRONG and not done.stdout and not list(tmp_path.iterdir())
    note, error = done.stderr.splitlines()
    assert note.startswith("note: ") and "is `muown-train " in note and error.startswith("error: ")
