"""`muown-train reproduce` as a user meets it: it lists, reports, trains small experiments, is killed and goes on."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from muown_train.cli.commands import reproduce as command
from muown_train.config.compose import compose_config
from muown_train.experiments.grid import load_grid
from muown_train.experiments.slurm_queue import record_job
from muown_train.runs.record import read_archived_runs, read_run
from muown_train.runtime.formatting import format_lr
from tests.helpers.experiments import fill, match_paper
from tests.helpers.paths import COMMAND, ROOT
from tests.helpers.runs import metrics, wait_until

RUN_WORDS = ("series=adam,fixed", "points=1", "scale=tiny")


@pytest.fixture
def reproduce(capsys):
    def call(*words) -> tuple[int, str]:
        status = command.main([*map(str, words)])
        return status, capsys.readouterr().out

    return call


def small(corpus: Path, out: Path, *words: str) -> list[str]:
    """The command of an experiment in small on the tests' texts."""
    data = ("data=files", f"data.train={corpus}/*.txt", f"cache={corpus}/cache")
    return [*COMMAND, "reproduce", f"out={out}", "scale=tiny", *data, *words]


def states(said: str) -> dict[str, str]:
    """What a list says of each run."""
    return dict(
        re.findall(r"^(\S+)  +(done|diverged|running|queued|stopped|cut off|failed|damaged|missing)", said, re.M)
    )


def test_a_list_of_nothing_and_of_a_half(reproduce, tmp_path):
    status, said = reproduce("experiment=500m_multiseed", f"out={tmp_path}")
    assert status == 0 and said.startswith("500m_multiseed: Table 500M-multiseed")
    assert set(states(said).values()) == {"missing"} and len(states(said)) == 54
    assert said.endswith("54 runs: 54 missing\n") and not list(tmp_path.iterdir())
    grid = load_grid("2_7b")
    points = grid.expand()
    fill(tmp_path / "2_7b", points[:6], match_paper(grid.paper, grid.seeds))
    _, said = reproduce("experiment=2_7b", f"out={tmp_path}")
    assert re.search(r"^muown_wd0-lr=0.002-seed=0 +done +2/2  loss 2.2586$", said, re.M)
    assert re.search(r"^muon_wd0.1-lr=0.002-seed=0 +diverged", said, re.M)
    assert said.endswith("15 runs: 5 done, 1 diverged, 9 missing\n")


def test_a_part_of_an_experiment(reproduce, tmp_path):
    _, said = reproduce("experiment=500m_multiseed", "points=2", "seeds=1", "series=soap_wd1e-4,muown_wd0")
    names = [f"{series}-lr={lr}-seed=0" for series in ("soap_wd1e-4", "muown_wd0") for lr in ("0.004", "0.001")]
    assert list(states(said)) == names
    _, said = reproduce("experiment=500m_multiseed", "points=1", "seeds=1", "series=muon_wd0", "paper_exact=false")
    assert list(states(said)) == ["muon_wd0-paper_exact=False-lr=0.002-seed=0"]


@pytest.mark.parametrize(("scale", "series"), [(None, None), ("tiny", ["muon"])])
def test_a_further_axis_is_set_as_a_command_line_would_set_it(scale, series):
    grid = load_grid("124m_weight_decay", scale).select(points=1, series=series)
    for point in grid.expand(["grad_clip=2"]):
        composed_anew = OmegaConf.to_container(compose_config(list(point.overrides)), resolve=True)
        assert composed_anew == point.config and point.config["optim"]["weight_decay"] == point.value


def test_keys_with_dashes(reproduce):
    _, said = reproduce("--experiment", "1b", "--scale=tiny", "--points", "1", "series=muon_wd0")
    assert list(states(said)) == ["muon_wd0-lr=0.001-seed=0"]


def test_a_report(reproduce, tmp_path):
    grid = load_grid("2_7b")
    fill(tmp_path / "2_7b", grid.expand(), match_paper(grid.paper, grid.seeds))
    status, said = reproduce("experiment=2_7b", "action=report", f"out={tmp_path}")
    assert (
        status == 0
        and "| 2e-3 | 9.57 | diverged | diverged |" in said
        and "15 runs: 7 done, 2 diverged, 6 missing." in said
    )
    written = sorted(path.name for path in (tmp_path / "2_7b" / "report").iterdir())
    assert written == ["figure.pdf", "figure.png", "table.csv", "table.md", "table.tex"]


@pytest.mark.slow
def test_a_plan(reproduce, tmp_path):
    grid = load_grid("500m_magnitude")
    fill(tmp_path / "500m_magnitude", grid.expand()[:3], lambda point: 14.0)
    status, said = reproduce("experiment=500m_magnitude", "action=plan", f"out={tmp_path}")
    assert status == 0 and said.count("511,371,520 parameters: embedding 64,358,400") == 3
    assert "19,073 steps of 524,288, on each of 4 GPUs 8 micro-batches of 8 x 2048 tokens" in said
    assert re.search(r"memory of each GH200-96GB: [\d.]+ GiB of 88.90\n", said)
    total, left = map(
        float, re.search(r"9 runs: ([\d.]+) GPU hours on 4 x GH200-96GB.*; ([\d.]+) of them", said).groups()
    )
    assert left == pytest.approx(total * 2 / 3, abs=0.1) and total == pytest.approx(grid.gpu_hours, rel=0.01)
    _, said = reproduce(
        "experiment=500m_magnitude", "action=plan", "device=H100-80GB", "ranks=8", "mfu=0.5", "series=adam", "points=1"
    )
    flops = (6 * (511_371_520 - 57_600) + 12 * 22 * 1280 * 2048) * 19_073 * 524_288
    hours = flops / (0.5 * 8 * 989e12) / 3600
    assert float(re.search(r"a run: ([\d.]+) hours", said)[1]) == pytest.approx(hours, rel=0.01)
    _, said = reproduce("experiment=qwen2_0_5b", "action=plan", "points=1", "series=muon_wd0")
    assert re.search(r"memory of each GH200-96GB: [\d.]+ GiB of 88.90\n", said) and "at the MFU that" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["action=list"], "experiment is not set: there are 124m_learning_rate, "),
        (["experiment=1c"], "there is no experiment=1c; there are 124m_learning_rate, "),
        (["experiment=1b", "action=lst"], "there is no action=lst (did you mean list?); there are list, plan, run"),
        (["experiment=1b", "points=0"], "points=0 must be a whole number of at least 1"),
        (["experiment=1b", "seeds=two"], "seeds='two' must be a whole number of at least 1"),
        (["experiment=1b", "--nodes=2"], "--nodes=2 is for sbatch, with action=submit; settings are key=value"),
        (["experiment=1b", "--scale"], "--scale is for sbatch, with action=submit"),
        (["experiment=1b", "--scale", "huge"], "there is no scale=huge; there are tiny, small"),
        (["experiment=1b", "scale=huge"], "there is no scale=huge; there are tiny, small"),
        (["experiment=1b", "series=muon"], "series=muon: 1b has none of that name (did you mean muon_wd0"),
        (["experiment=1b", "grad_clip=1,2"], "grad_clip=1,2 is several values: the grid is the experiment's"),
        (["experiment=1b", "seed=1"], "seed=1 cannot be given to all runs: seeds=N takes the first N seeds"),
        (
            ["experiment=124m_weight_decay", "optim.weight_decay=0"],
            "optim.weight_decay=0 cannot be given to all runs: the",
        ),
        (["experiment=1b", "name=x"], "name=x cannot be given to all runs"),
        (["experiment=1b", "grad_clp=1"], "there is no key grad_clp (did you mean grad_clip?)"),
        (["experiment=1b", "points", "2"], "cannot read 'points': settings are key=value without spaces"),
        (["experiment=1b", "mfu=40", "action=plan"], "mfu=40 must be above 0 and at most 1"),
        (["experiment=1b", "device=H1000", "action=plan"], "there is no device H1000 (did you mean"),
        (["experiment=1b", "ranks=3", "action=plan"], "batch_tokens=524288 cannot be made of micro_batch=8 rows"),
        (["experiment=1b", "mfu=0.4", "action=run"], "mfu=0.4 is for action=plan"),
        (["experiment=1b", "page=x.md", "action=archive"], "page=x.md is for action=report"),
        (
            ["experiment=1b", "ranks=2", "action=submit"],
            "ranks=2 is for action=run and action=plan; for submit sbatch's",
        ),
        (
            ["experiment=1b", "ranks=3", "action=run", "points=1"],
            "batch_tokens=524288 cannot be made of micro_batch=8 rows of seq_len=2048 tokens on 3 ranks",
        ),
        (
            ["experiment=1b", "micro_batch=abc", "action=run"],
            "micro_batch='abc' must be a whole number from 1 to 16777216",
        ),
        (
            ["experiment=1b", "micro_batch=-4", "action=submit"],
            "micro_batch=-4 must be a whole number from 1 to",
        ),
        (["experiment=1b", "grad_clip=-1", "action=run", "points=1"], "grad_clip=-1 must be"),
        (["experiment=1b", "precision=fp8", "action=run", "points=1"], "precision='fp8' must be auto, bfloat16"),
        (["experiment=1b", "model.dim=81", "action=run", "points=1"], "model.dim=81 does not split into"),
        (["experiment=1b", "page=nowhere.md", "action=report"], "page=nowhere.md is no file"),
        (["experiement=1b"], "experiment is not set (did you mean experiment?): there are 124m"),
        (["experiment=1bb"], "there is no experiment=1bb (did you mean 1b?); there are 124m"),
        (["experiment=1b", "out="], "out= must be a folder"),
        (["experiment=1b", f"out={__file__}"], f"out={__file__} must be a folder"),
        (["experiment=track3_muon"], "experiment=track3_muon is a single run, not a grid"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(reproduce, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        reproduce(*words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith(f"error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content", "state", "said"),
    [
        ("metrics.jsonl", '{"step": 0}\n{"step": 1, "valid/loss": 7.0}\n{"st', "damaged", "ends at step 1, the run"),
        ("metrics.jsonl", None, "damaged", "metrics.jsonl ends at step 0, the run at step 2"),
        ("config.yaml", "{[not yaml: : :", "damaged", "config.yaml is not YAML"),
        ("config.yaml", "", "damaged", "config.yaml does not hold settings"),
        ("status.json", '{"st', "cut off", ""),
        ("status.json", None, "cut off", ""),
    ],
)
def test_a_damaged_run_counts_for_nothing_and_holds_nothing_up(
    reproduce, capsys, tmp_path, monkeypatch, file, content, state, said
):
    grid = load_grid("500m_magnitude").select(points=2, series=["adam"])
    first, second = grid.expand()
    fill(tmp_path / grid.folder, [first, second], lambda point: 14.0)
    broken = tmp_path / grid.folder / first.name / file
    broken.write_text(content) if content is not None else broken.unlink()
    words = ("experiment=500m_magnitude", "points=2", "series=adam", f"out={tmp_path}")
    listed = reproduce(*words)[1]
    assert states(listed) == {first.name: state, second.name: "done"} and said in listed
    made = reproduce(*words, "action=report")[1]
    assert f"| {format_lr(first.lr)} | — |" in made and f"| {format_lr(second.lr)} | 14.00 |" in made
    monkeypatch.setattr(command, "ARCHIVE", tmp_path / "archive")
    kept = reproduce(*words, "action=archive")[1]
    assert [run.name for run in read_archived_runs(tmp_path / "archive")] == [second.name], kept


@pytest.mark.parametrize("action", ["submit", "archive"])
def test_an_installed_package_says_what_needs_a_clone(reproduce, capsys, tmp_path, monkeypatch, action):
    """Listing and planning work without one."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "ARCHIVE", tmp_path / "docs" / "results" / "runs")
    words = ("experiment=2_7b", "points=1", "seeds=1", f"out={tmp_path}/runs")
    assert reproduce(*words)[1].endswith("5 runs: 5 missing\n")
    with pytest.raises(SystemExit) as stopped:
        reproduce(*words, f"action={action}")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: action={action} needs a clone of the repository, since slurm/")


def test_help_names_the_experiments(reproduce):
    _, said = reproduce("--help")
    assert "action=" in said or "action " in said
    assert re.search(r"^experiment=500m_multiseed +Table 500M-multiseed", said, re.M)


def test_the_grid_is_no_setting_of_a_run():
    assert "experiment" not in compose_config(["experiment=1b"])


def test_submitting(reproduce, tmp_path, monkeypatch):
    """A stand-in for sbatch writes down what it is given, and slurm/grid.py says what each element then trains."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "sbatch").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    (bin_folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    words = ("experiment=500m_magnitude", *RUN_WORDS, "action=submit", f"out={tmp_path}/of runs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        reproduce(*words)  # elsewhere relative paths would be others
    monkeypatch.chdir(ROOT)
    status, said = reproduce(*words, "--nodes=2", "jobs=3")
    assert status == 0 and "2 runs, at most 3 at a time" in said
    *options, script, file = (tmp_path / "given").read_text().splitlines()
    assert (options, script) == (["--array=0-1%3", "--nodes=2"], str(ROOT / "slurm" / "train.sbatch"))
    grid = load_grid("500m_magnitude", "tiny").select(1, series=["adam", "fixed"])
    for i, point in enumerate(grid.expand()):
        done = subprocess.run([sys.executable, "slurm/grid.py", str(i), file, "time_limit=5"], capture_output=True)
        given = done.stdout.decode().split("\0")[:-1]
        folder = f"{tmp_path}/of runs/500m_magnitude-tiny"
        assert given == [*point.overrides, f"out={folder}", f"name={point.name}", "time_limit=5"]


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Stand-ins: sbatch names job 17, squeue says what is in the file `queue` here, and fails where there is none."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, script in (("sbatch", "echo Submitted batch job 17"), ("squeue", f"cat {tmp_path}/queue")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.mark.slow
def test_what_is_in_the_queue_is_not_submitted_again(reproduce, slurm, capsys):
    words = ("experiment=500m_magnitude", "points=1", "scale=tiny", f"out={slurm}/of runs")
    status, said = reproduce(*words, "series=adam,fixed", "action=submit")
    assert status == 0 and said.endswith("Submitted batch job 17\n")
    (slurm / "queue").write_text("17 0 PENDING\n17 1 RUNNING\n17 7 PENDING\n16 1 PENDING\n15 N/A RUNNING\n")
    _, said = reproduce(*words)
    fixed, signum, adam = load_grid("500m_magnitude", "tiny").select(1).expand()
    assert states(said) == {adam.name: "queued", fixed.name: "running", signum.name: "missing"}
    assert said.endswith("3 runs: 1 running, 1 queued, 1 missing\n")
    assert reproduce(*words, "series=adam,fixed", "action=submit")[1].endswith("nothing to submit\n")
    assert reproduce(*words, "series=adam", "action=run")[1].endswith("nothing to train\n")
    _, said = reproduce(*words, "action=submit")
    assert ": 1 runs, at most" in said
    (slurm / "queue").write_text("16 1 PENDING\n")
    assert set(states(reproduce(*words)[1]).values()) == {"missing"}
    fill(slurm / "of runs" / "500m_magnitude-tiny", [adam], lambda point: 14.0)
    (slurm / "queue").write_text("17 0 PENDING\n")
    assert states(reproduce(*words)[1])[adam.name] == "done"


@pytest.mark.slow
def test_a_queue_that_does_not_answer(reproduce, slurm, capsys):
    words = ("experiment=500m_magnitude", *RUN_WORDS, f"out={slurm}/runs")
    assert reproduce(*words)[0] == 0  # nothing was submitted: it is not asked
    reproduce(*words, "action=submit")
    assert set(states(reproduce(*words)[1]).values()) == {"missing"}
    with pytest.raises(SystemExit) as stopped:
        reproduce(*words, "action=submit")
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "error: squeue does not answer (cat: " in said and "is not known" in said


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("Submitted batch job 17\n", "17"),
        ("sbatch: a word from 3 sites\nSubmitted batch job 17 on cluster c2\n", "17"),
        ("17;c2\n", "17"),
        ("", None),
        ("none\n", None),
    ],
)
def test_the_job_that_sbatch_names(tmp_path, said, number):
    assert record_job(tmp_path / "submitted-1.txt", said) == (number is not None)
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert written == ([f"{number}\n"] if number else [])


@pytest.mark.slow
def test_an_experiment_whole(corpus, tmp_path):
    words = small(corpus, tmp_path, "experiment=gradient_noise_124m")
    done = subprocess.run([*words, "action=run", "jobs=2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(words, capture_output=True, text=True).stdout
    assert set(states(listed).values()) == {"done"} and len(states(listed)) == 3
    folders = list((tmp_path / "gradient_noise_124m-tiny").glob("*-seed=0*"))
    for folder in folders:
        assert [line["step"] for line in metrics(folder)] == list(range(31))
        assert len(list((folder / "checkpoints").glob("step-*"))) == 3  # kept for what measures them
        assert "experiment" not in read_run(folder).config
    again = subprocess.run([*words, "action=run"], capture_output=True, text=True)
    assert again.returncode == 0 and "nothing to train\n" in again.stdout
    for folder in folders:
        measured = (folder / "analysis" / "gradient_noise.jsonl").read_text().splitlines()
        assert [json.loads(each)["step"] for each in measured] == [10, 20, 30]
    made = subprocess.run([*words, "action=report"], capture_output=True, text=True)
    report = tmp_path / "gradient_noise_124m-tiny" / "report"
    assert made.returncode == 0 and (report / "figure.png").stat().st_size > 10_000
    final = {float(f"{read_run(folder).last('valid/perplexity'):.2f}") for folder in folders}
    shown = {float(point) for point in re.findall(r" (\d+\.\d\d) \|", (report / "table.md").read_text())}
    assert final <= shown
    assert "Gradient noise was measured in 3 of them." in made.stdout and "| 30 | " in made.stdout


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def at_step(folder: Path, step: int) -> bool:
    return (folder / "metrics.jsonl").exists() and len(metrics(folder)) > step


@pytest.mark.slow
def test_an_experiment_killed_in_the_middle_goes_on(corpus, tmp_path):
    """A kill -9 of the program and its runs; then a SIGTERM to the program alone; then to the end."""
    words = small(corpus, tmp_path, "experiment=500m_magnitude", *RUN_WORDS, "tokens=153600", "save_every=10")
    grid = load_grid("500m_magnitude", "tiny").select(1, series=["adam", "fixed"])
    further = [word for word in words[5:] if not word.startswith(("experiment=", "series=", "points=", "scale="))]
    first, second = (tmp_path / grid.folder / point.name for point in grid.expand(further))

    def started() -> subprocess.Popen:
        return subprocess.Popen([*words, "action=run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    process = started()
    wait_until(lambda: at_step(first, 30))
    inner = children(process.pid)
    assert len(inner) == 1
    for pid in (process.pid, *inner):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not Path(f"/proc/{inner[0]}").exists())
    listed = subprocess.run(words, capture_output=True, text=True).stdout
    assert list(states(listed).values()) == ["cut off", "missing"], listed

    process = started()
    wait_until(lambda: at_step(second, 30))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and "SIGTERM: all runs have saved; the same command goes on" in said, (
        said
    )
    log = tmp_path / grid.folder / "logs" / f"{first.name}.log"
    assert "going on after step" in log.read_text()
    listed = subprocess.run(words, capture_output=True, text=True).stdout
    assert list(states(listed).values()) == ["done", "stopped"], listed

    done = subprocess.run([*words, "action=run"], capture_output=True, text=True)
    assert done.returncode == 0 and f"{second.name}  goes on" in done.stdout, done.stdout + done.stderr
    for folder in (first, second):
        assert [line["step"] for line in metrics(folder)] == list(range(151))
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
