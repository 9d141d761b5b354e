"""slurm/grid.py, which says how many runs a grid has and what each trains; no cluster is needed."""

import os
import subprocess
import sys

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from muown_train.config.compose import load_config
from muown_train.config.overrides import expand_grid, find_varying_words
from tests.helpers.paths import ROOT

AXES = ("optim.lr=1e-3,2e-3", "seed=range(0,3)", "model=choice(tiny,small)", "name='${seed}-${optim.lr}-${model.dim}'")


def grid(*words):
    done = subprocess.run([sys.executable, "slurm/grid.py", *words], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", [AXES, ("seed=1,2", "seed=3,4", "tokens=1e5"), ("data=files", "data.train='a,b'", "seed=1")]
)
def test_the_runs_of_a_grid_are_those_of_hydras_sweeper(words):
    (expected,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(words)), None)
    ours = expand_grid(words)
    assert [load_config(job).to_dict() for job in ours] == [load_config(job).to_dict() for job in expected]


def test_the_words_that_vary():
    assert find_varying_words([("a=1", "b=1", "c=1"), ("a=1", "b=2", "c=1")]) == ["b=1", "b=2"]
    assert find_varying_words([("a=1",)]) == [""] and find_varying_words([]) == []


def test_a_grid_is_counted_and_each_element_printed(tmp_path):
    status, printed, _ = grid("list", *AXES)
    assert (status, printed.splitlines()[1::6]) == (
        0,
        [
            "1  runs/0-0.001-64  optim.lr=0.001 seed=0 model=small",
            "7  runs/0-0.002-64  optim.lr=0.002 seed=0 model=small",
        ],
    )
    (tmp_path / "runs").write_text("optim=muon seed=1\noptim=muown 'name=of two'\n")
    status, printed, _ = grid("3", f"@{tmp_path}/runs", "tokens=1e5,2e5")
    assert (status, printed.split("\0")) == (0, ["optim=muown", "name=of two", "tokens=200000.0", ""])
    status, _, said = grid("4", f"@{tmp_path}/runs", "tokens=1e5,2e5")
    assert status == 2 and "element 4 of an array, but the grid has 4 runs" in said


@pytest.mark.parametrize(
    "words, parts",
    [
        (["seed=0,1", "precision=float32,bf16"], ["job 2 of 4 (seed=0 precision=bf16): precision='bf16'"]),
        (["seed=0,1", "name=x"], ["job 2 of 2 (seed=1): it would train in runs/x, as job 1 does"]),
        (["seed=0,1", "tokns=5"], ["no key tokns (did you mean tokens?)"]),
        (["seed=0,1", "batch_size=8"], ["no key batch_size; here it is batch_tokens="]),
        (["seed"], ["cannot read 'seed'"]),
        (["@no/such/file"], ["no/such/file: No such file"]),
    ],
)
def test_nothing_is_submitted_where_a_setting_is_wrong(tmp_path, words, parts):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "VENV": ""}
    command = ["bash", "slurm/sweep.sbatch", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "submitted").exists()
    assert done.stderr.startswith("error: ") and done.stderr.endswith("; nothing is submitted\n"), done.stderr
    assert all(part in done.stderr for part in parts) and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_requeued_job_takes_another_port():
    script = (ROOT / "slurm" / "train.sbatch").read_text()
    (line,) = (line for line in script.splitlines() if line.startswith("PORT="))

    def choose_port(**variables):
        done = subprocess.run(["bash", "-euc", f"{line}\necho $PORT"], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    ports = [choose_port(SLURM_JOB_ID="123456", SLURM_RESTART_COUNT=str(start)) for start in range(4)]
    assert len(set(ports)) == 4 and all(1024 < port < 65536 for port in ports)
    assert choose_port(SLURM_JOB_ID="123456") == ports[0] != choose_port(SLURM_JOB_ID="123457")
    assert choose_port(SLURM_JOB_ID="123456", SLURM_RESTART_COUNT="1", PORT="29500") == 29500
