"""A wheel carries the configurations and runs from any directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.slow
def test_a_wheel_runs_anywhere(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    code = "import muown_train.config.compose as c; print(c.CONFIG_DIR)"
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    where = subprocess.run([sys.executable, "-c", code], **run).stdout.strip()
    assert Path(where) == tmp_path / "site" / "muown_train" / "configs"
    shown = subprocess.run([sys.executable, "-m", "muown_train", "--cfg", "job", "model=500m"], **run).stdout
    assert "dim: 1280" in shown and "HuggingFaceFW/fineweb-edu" in shown
