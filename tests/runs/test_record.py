"""Records of runs, half-written or not, are read without torch; runs of one setting are grouped; moving means."""

import json
import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from omegaconf import OmegaConf

from muown_train.runs.record import (
    ABSENT,
    NoRun,
    compute_moving_mean,
    find_differing_settings,
    group_runs,
    read_config,
    read_run,
    read_stored_config,
)
from tests.helpers.folders import line, settings, write
from tests.helpers.runs import trained


def test_a_run_that_was_trained(corpus, tmp_path):
    run = read_run(trained(corpus, tmp_path).folder)
    written = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(each["tokens"], each["valid/loss"]) for each in written if "valid/loss" in each]
    assert [*zip(*run.series("valid/loss", "tokens"), strict=True)] == evaluated and len(evaluated) == 4
    assert (run.state, run.step, run.steps, run.seed) == ("finished", 12, 12, 0)
    assert run.largest_lr == max(each["train/lr"] for each in written[1:])
    speeds = [each["system/tokens_per_second"] for each in written if "system/tokens_per_second" in each]
    assert run.tokens_per_second == statistics.median(speeds)
    assert run.settings["optim.lr"] == 0.004 and run.settings["data (content)"]
    assert not {"seed", "name", "out", "cache", "tracking"} & set(run.settings)
    assert run.device.startswith("1 x ")


def test_broken_lines_and_numbers_that_are_none(tmp_path):
    lines = [line(0, valid=5.0), line(1, 4.0), line(2, "nan"), line(3, 2.0), line(3, 1.0), line(4, valid="nan")]
    folder = write(tmp_path / "run", [*lines, line(5, loss=7.0)], settings())
    path = folder / "metrics.jsonl"
    whole = path.read_bytes().replace(b'"train/loss": 4.0', b'"train/loss": "four"')
    path.write_bytes(b"\0\xff\n[1]\n" + whole[:-9])  # the last line is cut off
    run = read_run(folder)
    assert run.step == 4
    steps, losses = run.series("train/loss")
    assert steps.tolist() == [2, 3] and math.isnan(losses[0]) and losses[1] == 1.0
    assert run.training_loss == 1.0 and run.smooth_training_loss()[1].tolist() == [1.0]
    assert run.series("valid/loss", "tokens")[0].tolist() == [0, 400] and math.isnan(run.last("valid/loss"))
    assert [len(of) for of in run.series("no/such", "tokens")] == [0, 0]


def test_a_folder_that_says_little(tmp_path):
    folder = write(tmp_path / "run", [line(1, 4.0)], settings(), state=None)
    (folder / "manifest.json").write_text("{")
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert (run.state, run.step, run.steps, run.device) == ("unknown", 0, None, None)
    assert run.training_loss is run.largest_lr is run.tokens_per_second is run.last("valid/loss") is None


def test_what_is_no_run(tmp_path):
    write(tmp_path / "runs" / "a", [line(1)], settings())
    with pytest.raises(NoRun, match="nothing is no folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(NoRun, match=r"runs is no run's folder, it has no config.yaml: did you mean .*runs/\*\?"):
        read_run(tmp_path / "runs")
    for text in ("a: [", "- 1\n", "3\n", "", "\tx"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(NoRun, match=r"config.yaml"):
            read_run(tmp_path)


def test_runs_of_one_setting(tmp_path):
    configs = [settings(11), settings(2), settings(0, lr=0.02), {**settings(3), "time_limit": 9, "tracking": {"a": 1}}]
    runs = [read_run(write(tmp_path / str(i), [line(1)], config)) for i, config in enumerate(configs)]
    groups = group_runs(runs)
    assert [[run.seed for run in group.runs] for group in groups] == [[2, 3, 11], [0]]
    assert find_differing_settings(groups) == {"optim.lr": [0.01, 0.02]}
    (tmp_path / "1" / "manifest.json").write_text('{"data": {"content": "another text"}}')
    groups = group_runs([read_run(tmp_path / "0"), read_run(tmp_path / "1")])
    assert find_differing_settings(groups) == {"data (content)": ["the text", "another text"]}
    groups = group_runs([*runs[:1], read_run(write(tmp_path / "x", [line(1)], settings(0, betas=None, momentum=1)))])
    facts = {"optim.betas": [[0.9, 0.95], None], "optim.momentum": [ABSENT, 1]}
    assert {key: find_differing_settings(groups)[key] for key in facts} == facts


def test_settings_that_a_run_is_older_than_are_the_default(tmp_path):
    """A run from before a setting existed and a run that has it at its default count as one setting."""
    old = settings()
    new = old | {"model": old["model"] | {"init_std": 0.02}, "optim": old["optim"] | {"magnitude_lr_scale": 1.0}}
    other = new | {"optim": new["optim"] | {"magnitude_lr_scale": 0.1}}
    runs = [read_run(write(tmp_path / str(i), [line(1, 3.0)], each)) for i, each in enumerate((old, new, other))]
    assert [len(group.runs) for group in group_runs(runs)] == [2, 1]
    assert runs[0].settings["model.init_std"] == 0.02


@pytest.mark.parametrize("window", [1, 2, 3, 8, 50])
def test_means_over_neighbours(window):
    values = np.random.default_rng(0).normal(size=20)
    before = (window - 1) // 2
    expected = [np.mean(values[max(0, i - before) : i - before + window]) for i in range(20)]
    assert compute_moving_mean(values, window) == pytest.approx(expected, abs=1e-12)


def test_settings_come_back_as_omegaconf_wrote_them(tmp_path):
    """Also texts that look like numbers, dates, times and truth values."""
    values = (
        "1e-3",
        "2026-01-01",
        "1:30",
        "yes",
        "on",
        "null",
        "~",
        "0x1f",
        "1_000",
        ".5",
        "1.",
        "a: b",
        "[1",
        "é",
        "",
    )
    texts = {f"text{i}": value for i, value in enumerate(values)}
    config = texts | {"small": 1e-30, "large": 1e300, "inf": float("inf"), "none": None, "list": [1, "1", 1.0, True]}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    assert repr(read_config(tmp_path)) == repr(config)


def test_renamed_settings_have_their_names_of_today(tmp_path):
    old = settings() | {"check_every": 5, "schedule": {"_target_": "muown_train.schedule.wsd", "warmup": 0.1}}
    old["model"] = old["model"] | {"checkpointed": 1}
    config = read_run(write(tmp_path / "run", [line(1)], old)).config
    assert config["replica_check_every"] == 5 and config["model"]["activation_checkpointing"] == 1
    assert config["schedule"]["_target_"] == "muown_train.training.schedule.wsd"
    assert read_stored_config(tmp_path / "run") == old


def test_torch_is_not_loaded():
    program = "import sys, muown_train.experiments.compare, muown_train.runs.record; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
