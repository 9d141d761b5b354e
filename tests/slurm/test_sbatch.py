"""What slurm/train.sbatch asks srun for, and the environment of its tasks; SLURM's programs are stand-ins."""

import os
import subprocess

import pytest

from tests.helpers.paths import ROOT

SCONTROL = """\
case "$*" in
    "show job"*) echo "JobId=7 JobState=RUNNING Command={script} StdOut=/elsewhere/log PreemptTime=None " ;;
    "show hostnames"*) echo n1 ;;
    "show node"*) echo "NodeName=n1 NodeAddr=10.0.0.1 " ;;
esac
"""
SRUN = """\
printf '%s\\n' "$@" > {folder}/words
env > {folder}/environment
"""
PYTHON = """\
case "$1" in -c) ;; *) echo {folder}/run ;; esac
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the script as a job with some variables of SLURM; returns srun's words and the environment of tasks."""
    script = ROOT / "slurm" / "train.sbatch"
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python": PYTHON}.items():
        program = tmp_path / name
        program.write_text("#!/bin/sh\n" + text.format(script=script, folder=tmp_path))
        program.chmod(0o755)

    def run(**variables: str) -> tuple[list[str], dict[str, str]]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": "", "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", **variables}
        done = subprocess.run(["bash", script, "name=run"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "environment").read_text().splitlines()
        return (tmp_path / "words").read_text().splitlines(), dict(line.split("=", 1) for line in lines if "=" in line)

    return run


@pytest.mark.parametrize(
    ("cpus", "tasks", "asked", "share"),
    [
        ("32(x2)", "4(x2)", "8", 8),
        ("288(x2)", "4(x2)", "8", 72),  # --exclusive
        ("112", "8", None, 14),
        ("2", "4", "1", 1),
        ("72,36", "4(x2)", "8", 8),  # nodes differ
        (None, None, None, 1),
    ],
)
def test_a_task_gets_its_share_of_the_cores(submit, cpus, tasks, asked, share):
    given = {"SLURM_JOB_CPUS_PER_NODE": cpus, "SLURM_TASKS_PER_NODE": tasks, "SLURM_CPUS_PER_TASK": asked}
    words, _ = submit(**{name: value for name, value in given.items() if value})
    assert f"--cpus-per-task={share}" in words


def test_tasks_are_bound_to_cores_and_memory_is_not_lost_in_pieces(submit):
    words, environment = submit()
    assert {"--distribution=block:block", "--cpu-bind=cores"} <= set(words[: words.index("bash")])
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    assert [environment[name] for name in names] == ["expandable_segments:True"] * 2
    assert environment["MASTER_ADDR"] == "10.0.0.1" and words[-1] == "name=run"


def test_what_the_user_chooses_is_left(submit):
    words, environment = submit(SRUN_OPTIONS="--cpu-bind=none --mem=0", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:9")
    assert words[: words.index("bash")][3:] == ["--cpu-bind=none", "--mem=0"]
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:9"
    words, environment = submit(SRUN_OPTIONS="", PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert len(words[: words.index("bash")]) == 3
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
