"""What all scripts have in common: how each takes a word that it does not know."""

import os
import subprocess
import sys

import pytest

from muown_train.cli.main import WRONG
from tests.helpers.paths import ROOT
from tests.helpers.runs import slow_but

RUNNABLE = [path.name for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", slow_but(["compare.py", "benchmark_optim.py", "reproduce.py"], RUNNABLE))
def test_an_unknown_flag_is_one_sentence(name, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / name), "--rundos=3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == WRONG and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
