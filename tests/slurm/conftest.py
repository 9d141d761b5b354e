"""A SLURM cluster of two nodes on this machine, and jobs on it."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.paths import FIXTURES, ROOT

SCRIPTS = FIXTURES / "slurm"
# options for sbatch: jobs of tests need neither GPUs nor more than a processor a node
SMALL_JOB = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")


def missing() -> str | None:
    """Return what this machine lacks for a cluster."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch")
    if absent := [program for program in programs if not shutil.which(program, path=_PATH)]:
        return f"{', '.join(absent)} not installed: apt-get install -y --no-install-recommends slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start the daemons of a cluster"
    return None


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def wait_for(true: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Wait for a condition; where it does not come true, fail with what is there instead."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"not after {seconds:g} s: {what()}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Cluster:
    """A running cluster; `environment` for commands that use it."""

    environment: dict[str, str]

    def command(self, *words: object, cwd: Path = ROOT) -> str:
        """Return what a SLURM command prints; it must succeed."""
        result = subprocess.run(
            [str(word) for word in words], cwd=cwd, env=self.environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def sbatch(self, log: Path, *words: object, program: str = "sbatch") -> "Job":
        """Submit."""
        printed = self.command(program, *SMALL_JOB, f"--output={log}", *words)
        return Job(self, printed.split()[-1], log)


@dataclass(frozen=True)
class Job:
    """A submitted job, or an element of an array."""

    cluster: Cluster
    number: str
    log: Path

    def facts(self) -> dict[str, str]:
        """What SLURM knows of it."""
        words = self.cluster.command("scontrol", "show", "job", "-o", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def told(self) -> str:
        """Its log, and how it stands: for messages."""
        facts = self.facts()
        short = {key: facts.get(key) for key in ("JobState", "Reason", "Restarts", "ExitCode")}
        return f"{short}\n{self.log.read_text() if self.log.exists() else 'no log'}"

    def wait(self, state: str, seconds: float = 200, restarts: int | None = None) -> dict[str, str]:
        """Wait for a state, after so many restarts if given; the facts then."""

        def reached() -> bool:
            facts = self.facts()
            return facts["JobState"] == state and restarts in (None, int(facts["Restarts"]))

        wait_for(reached, seconds, self.told)
        return self.facts()

    def wait_gone(self, seconds: float) -> None:
        """Wait until it, or every element of it, has ended."""
        wait_for(lambda: not self.cluster.command("squeue", "-h", f"--jobs={self.number}"), seconds, self.told)

    def wait_requeued(self, restarts: int = 1) -> None:
        """Wait until it is pending again, and shorten its wait of two minutes."""
        self.wait("PENDING", restarts=restarts)
        time.sleep(2)  # a start in the second of the requeue is refused: its credential counts as revoked
        self.cluster.command("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def signal(self, name: str) -> None:
        """To the batch script, as `sbatch --signal=B:…` has it done."""
        self.cluster.command("scancel", "--batch", f"--signal={name}", self.number)

    def kill_rank(self, rank: int) -> None:
        """Kill -9 one of its processes."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = {f"SLURM_JOB_ID={self.number}".encode(), f"RANK={rank}".encode()} <= set(environment)
            if ours and words[1:3] == [b"-m", b"muown_train"]:
                os.kill(int(process.name), signal.SIGKILL)
                return
        pytest.fail(f"no process of rank {rank}: {self.told()}")


@pytest.fixture(scope="module")
def _turn() -> Iterator[None]:
    """The machine can have one cluster at a time: of processes that share the tests one waits for the other."""
    with FileLock(Path(tempfile.gettempdir()) / "muown_train-slurm-cluster.lock"):
        yield


@pytest.fixture(scope="module")
def cluster(_turn, tmp_path_factory) -> Iterator[Cluster]:
    """A cluster that is started for these tests and stopped after them."""
    if reason := missing():
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("slurm")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment |= {"S": str(state), "PATH": _PATH, "VENV": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    cluster = Cluster(environment | {"SLURM_CONF": str(state / "slurm.conf")})
    try:
        # its daemons keep the output open
        with (state / "start.log").open("w") as log:
            subprocess.run(
                ["bash", SCRIPTS / "start_cluster.sh"], env=environment, stdout=log, stderr=log, timeout=60, check=True
            )
        yield cluster
    finally:
        subprocess.run(["scancel", "--user=root"], env=cluster.environment, capture_output=True)
        subprocess.run(["bash", SCRIPTS / "stop_cluster.sh"], env=environment, timeout=60)
