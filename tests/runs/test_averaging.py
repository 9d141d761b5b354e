"""Averages of checkpoints: against sums by hand, dtypes kept, and the command as a user meets it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from muown_train.cli.commands import average
from muown_train.runs.averaging import average_weights, compute_shares, open_checkpoints
from muown_train.runs.saved_run import open_run, write_run
from tests.helpers.paths import ROOT
from tests.helpers.runs import trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """A run that kept the checkpoints after steps 4, 8 and 12."""
    return trained(corpus, tmp_path_factory.mktemp("runs"), "keep_checkpoints=3").folder


def status_of(*words: str) -> int:
    """Exit status of the command in this process."""
    try:
        average.main(words)
    except SystemExit as ended:
        return ended.code
    return 0


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return open_run(run, step).load_weights()


def test_the_mean(run):
    checkpoints = open_checkpoints(run)
    assert [one.folder.name for one in checkpoints] == ["step-00000004", "step-00000008", "step-00000012"]
    result = average_weights(checkpoints, compute_shares(3))
    parts = [weights(run, step) for step in (4, 8, 12)]
    assert result.keys() == parts[0].keys()
    for name, weight in result.items():
        expected = torch.stack([part[name].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(weight, expected, rtol=2e-7, atol=0)
        assert not torch.equal(weight, parts[-1][name])


def test_the_moving_average(run):
    result = average_weights(open_checkpoints(run), compute_shares(3, 0.75))
    parts = [weights(run, step) for step in (4, 8, 12)]
    for name, weight in result.items():
        moving = parts[0][name].double()
        for part in parts[1:]:
            moving = 0.75 * moving + 0.25 * part[name].double()
        torch.testing.assert_close(weight, moving.float(), rtol=2e-7, atol=0)


def test_shares_sum_to_one():
    assert compute_shares(4) == [0.25] * 4
    assert compute_shares(3, 0.0) == [0.0, 0.0, 1.0]
    assert compute_shares(3, 0.9) == pytest.approx([0.81, 0.09, 0.1])
    assert sum(compute_shares(50, 0.97)) == pytest.approx(1, abs=1e-12)


def written(run: Path, folder: Path, steps: dict[int, dict[str, torch.Tensor]]) -> Path:
    """A run's folder with one checkpoint for each step."""
    saved = open_run(run)
    for step, of in steps.items():
        part = folder.with_name(f"{folder.name}-{step}")
        write_run(part, of, saved.config.to_dict(), step, saved.data, None, {})
        shutil.copytree(part, folder, dirs_exist_ok=True)
    return folder


def test_a_dtype_is_kept_and_sums_are_not_rounded_to_it(run, tmp_path):
    values = [1.0, 2**-8, 2**-8, 2**-8, 2**-8]  # each is lost where 1 is added to it in bfloat16
    steps = {i: {"w": torch.tensor([value], dtype=torch.bfloat16)} for i, value in enumerate(values, 1)}
    folder = written(run, tmp_path / "low", steps)
    result = average_weights(open_checkpoints(folder), [1.0] * 5)["w"]
    assert result.dtype == torch.bfloat16 and result.item() == 1 + 2**-6
    only = average_weights(open_checkpoints(folder, last=2), [1.0] * 2)["w"]
    assert only.item() == 2**-7


def test_two_models_do_not_mix(run, tmp_path):
    shapes = written(run, tmp_path / "shapes", {1: {"w": torch.zeros(2, 3)}, 2: {"w": torch.zeros(3, 2)}})
    with pytest.raises(ValueError, match=r"w has shape \(2, 3\) in .*step-00000001 and \(3, 2\) in .*step-00000002"):
        average_weights(open_checkpoints(shapes), compute_shares(2))
    names = written(run, tmp_path / "names", {1: {"w": torch.zeros(2)}, 2: {"v": torch.zeros(2)}})
    with pytest.raises(ValueError, match=r"v is not in both .*step-00000001 and .*step-00000002"):
        average_weights(open_checkpoints(names), compute_shares(2))


def test_a_damaged_checkpoint_is_left_out_and_named(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    file = folder / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert status_of(str(folder)) == 0
    assert capsys.readouterr().err.count("step-00000008 is damaged: rank-00000.safetensors has ") == 1
    torch.testing.assert_close(
        open_run(tmp_path / "run-average").load_weights(), average_weights(open_checkpoints(run, [4, 12]), [0.5, 0.5])
    )
    assert [one.step for one in open_checkpoints(folder, last=2)] == [4, 12]
    with pytest.raises(ValueError, match=r"step-00000008 is damaged"):
        open_checkpoints(folder, [4, 8])
    with pytest.raises(ValueError, match=r"has 2 checkpoints, of steps 4, 12, and an average takes 3 or more"):
        open_checkpoints(folder, last=3)


@pytest.mark.parametrize("steps, says", [([49], "one checkpoint, of step 49"), ([], "no checkpoint that is whole")])
def test_too_few_are_said_by_name(run, tmp_path, steps, says):
    folder = written(run, tmp_path / "few", {step: {"w": torch.zeros(2)} for step in (49, 50)})
    for step in {49, 50} - set(steps):
        next(folder.glob(f"checkpoints/step-*{step}/*.safetensors")).write_bytes(b"")
    with pytest.raises(ValueError, match=f"few has {says}, and an average takes 2 or more"):
        open_checkpoints(folder)


def test_what_is_removed_meanwhile_is_averaged(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    checkpoints = open_checkpoints(folder)
    shutil.rmtree(folder)
    expected = average_weights(open_checkpoints(run), compute_shares(3))
    torch.testing.assert_close(average_weights(checkpoints, compute_shares(3)), expected, rtol=0, atol=0)


def test_weights_that_are_not_finite_are_not_averaged(run, tmp_path):
    bad = written(run, tmp_path / "bad", {1: {"w": torch.zeros(2)}, 2: {"w": torch.tensor([1.0, float("nan")])}})
    with pytest.raises(ValueError, match=r"step-00000002: w holds numbers that are not finite"):
        average_weights(open_checkpoints(bad), compute_shares(2))


def test_a_run_of_another_name_needs_out(run, tmp_path, capsys):
    folder = tmp_path / "a rün"
    shutil.copytree(run, folder)
    assert status_of(str(folder)) == 2
    said = capsys.readouterr().err
    assert "name='a rün-average' must be" in said and said.endswith("give another folder with --out\n")
    assert status_of(str(folder), "--out", str(tmp_path / "plain")) == 0
    assert open_run(tmp_path / "plain").step == 12


@pytest.mark.slow
def test_the_command_writes_a_run(run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    command = [sys.executable, "-m", "muown_train", "average", "run", "--ema", "0.5", "--steps", "12,4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step  4  0.5000" in done.stdout and "step 12  0.5000" in done.stdout
    saved = open_run(tmp_path / "run-ema=0.5")
    assert saved.step == 12 and saved.load_tokenizer().fingerprint == open_run(run).load_tokenizer().fingerprint
    first, last = weights(run, 4), weights(run, 12)
    model = dict(saved.load_model().named_parameters())
    for name, weight in model.items():
        torch.testing.assert_close(weight.data, (first[name] + last[name]) / 2)
    origin = json.loads((tmp_path / "run-ema=0.5" / "manifest.json").read_text())["average_of"]
    assert origin == {"run": "run", "steps": [4, 12], "shares": [0.5, 0.5], "ema": 0.5}
    monkeypatch.chdir(folder)
    assert status_of(".", "--last", "2") == 0
    assert open_run(tmp_path / "run-average").step == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no folder nothing"),
        (["run", "--steps", "4"], "--steps 4 must name two or more"),
        (["run", "--steps", "4,5"], "has no checkpoint of step 5; there are 12, 8, 4"),
        (["run", "--steps", "4,x"], "--steps 4,x must be steps with commas between them"),
        (["run", "--last", "1"], "--last 1 must be 2 or more"),
        (["run", "--last", "4"], "run has 3 checkpoints, of steps 4, 8, 12, and an average takes 4 or more"),
        (["run", "--last", "2", "--steps", "4,8"], "--steps: not allowed with argument --last"),
        (["run", "--ema", "1"], "--ema 1 must be at least 0 and below 1"),
        (["run", "--out", "run"], "run exists: give another folder with --out, or remove it"),
        (["run", "--out", "a name"], "name='a name' must be a plain folder name"),
        (["run", "--out", "run/checkpoints/mine"], "run/checkpoints/mine is in the run's own folder: give one beside"),
        (["run", "--out", "run/mine"], "run/mine is in the run's own folder"),
        (["one"], "one has one checkpoint, of step 12, and an average takes 2 or more: a run keeps"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(run, tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "run").symlink_to(run)
    saved = open_run(run)
    write_run(tmp_path / "one", saved.load_weights(), saved.config.to_dict(), 12, saved.data, None, {})
    monkeypatch.chdir(tmp_path)
    assert status_of(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
