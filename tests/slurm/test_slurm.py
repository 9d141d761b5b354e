"""slurm/train.sbatch, slurm/sweep.sbatch and the example of a job on a real cluster of two nodes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.paths import COMMAND, ROOT
from tests.helpers.runs import SMALL, losses, metrics
from tests.slurm.conftest import SMALL_JOB, Job, missing, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # another process that shares the tests may have the cluster first
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]
STEPS = 300


def places(corpus: Path, out: Path, name: str = "run") -> tuple[str, ...]:
    """The overrides of a small run of that name."""
    return (*SMALL, f"data.train={corpus}/*.txt", f"cache={corpus}/cache", f"out={out}", f"name={name}")


LONG = (f"tokens={256 * STEPS}", "eval_every=100")


@pytest.fixture
def train(cluster, corpus, tmp_path):
    """Submits a run named "run" on two nodes, into the test's folder."""

    def submit(*words: str) -> Job:
        run = (*places(corpus, tmp_path), *LONG, *words)
        return cluster.sbatch(tmp_path / "log", "--nodes=2", "slurm/train.sbatch", *run)

    return submit


@pytest.fixture(scope="module")
def uninterrupted(cluster, corpus, tmp_path_factory) -> list[float]:
    """The losses of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("uninterrupted")
    job = cluster.sbatch(out / "log", "--nodes=2", "slurm/train.sbatch", *places(corpus, out), *LONG)
    job.wait("COMPLETED")
    assert json.loads((out / "run" / "manifest.json").read_text())
    assert [line["step"] for line in metrics(out / "run")] == list(range(STEPS + 1))
    return losses(out / "run")


def trains(job: Job, step: int, folder: Path | None = None) -> None:
    """Wait until this many updates are recorded in a run's folder."""
    folder = folder or job.log.parent / "run"

    def reached() -> bool:
        return (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in metrics(folder))

    wait_for(reached, 200, job.told)


def test_the_shortest_job_trains_on_two_nodes(cluster, corpus, tmp_path):
    job = cluster.sbatch(tmp_path / "log", "examples/slurm_two_nodes.sh", *places(corpus, tmp_path))
    job.wait("COMPLETED")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ranks"] == 2
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(13))


def test_a_signal_before_the_time_limit_saves_and_requeues(train, tmp_path, uninterrupted):
    job = train()
    trains(job, 20)
    job.signal("USR1")
    job.wait_requeued()
    saved = metrics(tmp_path / "run")[-1]["step"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1:] == [f"step-{saved:08d}"]
    job.wait("COMPLETED")
    log = job.log.read_text()
    assert "SIGUSR1: stopping after this step and saving" in log and "stopped before the time limit: requeued" in log
    assert f"going on after step {saved}" in log
    assert losses(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("grace", [0, pytest.param(30, marks=pytest.mark.long)])
def test_a_preempted_run_goes_on_from_its_last_checkpoint(cluster, train, tmp_path, uninterrupted, grace):
    """Without grace it is killed at once; with it, the ranks get a SIGTERM and have so many seconds."""
    cluster.command("scontrol", "update", "PartitionName=low", f"GraceTime={grace}")
    job = train()
    trains(job, 20)
    other = cluster.sbatch(tmp_path / "other", "--partition=high", "--nodes=2", "--wrap=sleep 1")
    job.wait_requeued()
    other.wait("COMPLETED")
    job.wait("COMPLETED")
    log = job.log.read_text()
    assert "going on after step" in log and ("was preempted: requeued" in log) == (grace > 0)
    assert losses(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_others_with_the_reason_and_the_run_goes_on(train, tmp_path, uninterrupted, rank):
    job = train()
    trains(job, 20)
    job.kill_rank(rank)
    job.wait_requeued()
    job.wait("COMPLETED")
    log = job.log.read_text()
    assert f"rank {rank} on " in log and "is lost: its process has ended" in log
    assert "failed with status 137: requeued" in log
    assert losses(tmp_path / "run") == uninterrupted


@pytest.mark.long
def test_a_cancelled_run_saves_and_is_not_requeued(cluster, train, tmp_path):
    job = train()
    trains(job, 20)
    cluster.command("scancel", job.number)
    facts = job.wait("CANCELLED")
    assert facts["Restarts"] == "0" and "requeued" not in job.log.read_text()
    saved = metrics(tmp_path / "run")[-1]["step"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1:] == [f"step-{saved:08d}"]


def test_a_wrong_setting_is_not_requeued(train):
    job = train("optim.lr=fast")
    facts = job.wait("FAILED")
    assert (facts["Restarts"], facts["ExitCode"]) == ("0", "2:0") and "fast" in job.log.read_text()


def test_a_run_that_fails_at_the_same_update_gives_up(cluster, corpus, tmp_path):
    # no file may be as large as a checkpoint
    small_files = replace(cluster, environment=cluster.environment | {"PYTHON": "prlimit --fsize=400000 python"})
    words = (*places(corpus, tmp_path), *LONG, "give_up_after=2", "on_save_error=stop", "save_every=5")
    job = small_files.sbatch(tmp_path / "log", "--nodes=2", "slurm/train.sbatch", *words)
    job.wait_requeued(restarts=1)
    job.wait_requeued(restarts=2)
    facts = job.wait("FAILED")
    assert (facts["Restarts"], facts["ExitCode"]) == ("2", "3:0"), job.told()
    assert "2 starts in a row failed" in job.log.read_text()


def test_submitted_from_another_folder_a_job_has_the_name_of_its_run_and_its_log_there(cluster, corpus, tmp_path):
    words = (*places(corpus, tmp_path / "out"), "log_every=1")
    script = (ROOT / "slurm" / "train.sbatch", *words)
    number = cluster.command("sbatch", *SMALL_JOB, "-p", "high", "--nodes=2", *script, cwd=tmp_path).split()[-1]
    job = Job(cluster, number, tmp_path / "out" / "run" / "logs" / f"{number}.log")
    assert job.wait("COMPLETED")["JobName"] == "run"
    header, *lines = job.log.read_text().splitlines()
    commit = r"commit [0-9a-f]{7,}(-dirty)?"
    assert re.fullmatch(rf"\S+ job {number}, start 0 on \S+\[1-2\], {commit}: {tmp_path}/out/run", header), header
    assert sum(bool(re.match(r"\d\d:\d\d:\d\d step ", line)) for line in lines) > 2, lines
    (pointer,) = (tmp_path / f"muown-{number}.log").read_text().splitlines()
    assert pointer.endswith(f"job {number}: {job.log}")


def test_where_python_lacks_the_package_one_sentence_says_so(cluster, corpus, tmp_path):
    bare = replace(cluster, environment=cluster.environment | {"PYTHON": "python -I -S", "VENV": "/no/such"})
    job = bare.sbatch(tmp_path / "log", "--nodes=2", "slurm/train.sbatch", *places(corpus, tmp_path))
    assert job.wait("FAILED")["ExitCode"] == "2:0"
    (said,) = job.log.read_text().splitlines()
    assert said.startswith("error: python -I -S cannot import muown_train (ModuleNotFoundError: ")
    assert "set VENV, now '/no/such'" in said


@pytest.mark.long
def test_an_element_of_an_array_is_requeued_alone(cluster, corpus, tmp_path):
    """Also the one whose number is the whole array's."""
    words = (*places(corpus, tmp_path, "run-${seed}"), *LONG, "seed=0,1")
    array = cluster.sbatch(tmp_path / "%a", "--nodes=1", *words, program="slurm/sweep.sbatch")
    elements = [Job(cluster, f"{array.number}_{i}", tmp_path / f"{i}") for i in range(2)]
    for i, job in enumerate(elements):
        trains(job, 20, tmp_path / f"run-{i}")
    elements.sort(key=lambda job: job.facts()["JobId"] != array.number)
    elements[0].signal("USR1")
    elements[0].wait_requeued()
    elements[0].wait("COMPLETED")
    assert elements[1].wait("COMPLETED")["Restarts"] == "0"
    assert "SIGUSR1" not in elements[1].log.read_text()


def test_a_sweep_trains_each_combination_once(cluster, corpus, tmp_path):
    words = (*places(corpus, tmp_path, "${seed}-${schedule.warmup}"), "seed=3,4", "schedule.warmup=0.1,0.2")
    for attempt in ("first", "second"):
        options = ("-p", "high", "--nodes=1")
        job = cluster.sbatch(tmp_path / f"{attempt}-%a", *options, *words, program="slurm/sweep.sbatch")
        elements = (tmp_path / f"sweep-{job.number}.txt").read_text().splitlines()
        assert elements[1] == f"1  {tmp_path}/3-0.2  seed=3 schedule.warmup=0.2" and len(elements) == 4
        job.wait_gone(200)
        runs = {path.parent.name: path for path in tmp_path.glob("*/metrics.jsonl")}
        assert sorted(runs) == ["3-0.1", "3-0.2", "4-0.1", "4-0.2"]
        assert all(metrics(path.parent)[-1]["step"] == 12 for path in runs.values())
        written = {name: path.stat().st_mtime_ns for name, path in runs.items()}
        if attempt == "first":
            before = written
    assert written == before
    assert all("finished" in (tmp_path / f"second-{i}").read_text() for i in range(4))


def test_an_experiment_is_an_array_of_its_runs(cluster, corpus, tmp_path):
    """The grid of an experiment is submitted, once, and then lists as done."""
    data = ("data=files", f"data.train={corpus}/*.txt", f"cache={corpus}/cache", f"out={tmp_path}")
    script = (*COMMAND, "reproduce", "experiment=500m_magnitude", "scale=tiny", "points=1", *data)
    options = ("--nodes=1", *SMALL_JOB)
    printed = cluster.command(*script, "action=submit", "jobs=2", *options, "--hold", f"--output={tmp_path}/%a")
    job = Job(cluster, printed.split()[-1], tmp_path / "0")
    assert cluster.command(*script).endswith("3 runs: 3 queued\n")
    assert "nothing to submit" in cluster.command(*script, "action=submit", *options)
    cluster.command("scontrol", "release", job.number)
    wait_for(lambda: "RUNNING" in cluster.command("squeue", "-h", "-o%T"), 90, job.told)
    assert " queued" in (said := cluster.command(*script)) and " running" in said
    assert "nothing to submit" in cluster.command(*script, "action=submit", *options)
    job.wait_gone(200)
    assert cluster.command(*script).endswith("3 runs: 3 done\n"), (tmp_path / "0").read_text()
    assert "nothing to submit" in cluster.command(*script, "action=submit", *options)
