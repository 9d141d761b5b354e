"""A run that was written before modules and keys were renamed goes on, is evaluated, exported, compared and counted.

tests/fixtures/stored_run holds its data, its folder as a kill after step 9 left it (the checkpoint is of step 8), and
the metrics of the same run that was not killed. tests/fixtures/stored_experiment holds a run of an experiment.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from muown_train.cli.main import main
from muown_train.config.compose import load_config
from muown_train.config.renamed_names import RENAMED_KEYS, RENAMED_TARGETS, update_stored_config
from muown_train.runs.saved_run import open_run
from muown_train.training.build import build_run
from tests.helpers.paths import FIXTURES
from tests.helpers.runs import HERE, metrics

STORED = FIXTURES / "stored_run"
WORDS = [
    "data=files",
    "data.train=texts/*.txt",
    "data.tokenizer=tokenizer.json",
    "model.vocab_size=304",
    "model.layers=2",
    "model.dim=32",
    "model.heads=2",
    "seq_len=32",
    "batch_tokens=256",
    "micro_batch=2",
    "tokens=3072",
    "valid_tokens=200",
    "eval_every=5",
    "save_every=4",
    "log_every=3",
    "keep_checkpoints=1",
    "precision=float32",
    "sample_tokens=0",
    "cache=cache",
    "out=.",
    "name=run",
]


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Path:
    """Copy the stored run and its data to a folder of their own, and work there."""
    shutil.copytree(STORED, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "run"


def test_it_resumes_and_ends_as_if_it_had_not_been_killed(stored):
    assert "muown_train.schedule.wsd" in (stored / "config.yaml").read_text()
    run = build_run(load_config([*WORDS, "model.activation_checkpointing=1", "replica_check_every=6"]), HERE)
    assert run.resume() is None and run.trainer.step == 8
    assert run.train().state == "finished"
    run.close()
    whole = [json.loads(line) for line in (STORED / "metrics_of_the_whole_run.jsonl").read_text().splitlines()]
    assert len(whole) == len(metrics(stored)) == 13
    for ours, theirs in zip(metrics(stored), whole, strict=True):
        assert ours.get("data/hash") == theirs.get("data/hash") and ours["step"] == theirs["step"]
        for key in ("train/loss", "train/grad_norm", "train/lr", "valid/loss"):
            # equal bit for bit on the machine that wrote it
            assert (key in ours) == (key in theirs)
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4), (key, ours["step"])


def test_another_setting_is_still_refused(stored):
    with pytest.raises(ValueError, match=r"holds a run with model.dim=32, this one has model.dim=16"):
        build_run(load_config([*WORDS, "model.dim=16"]), HERE)


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["muown-train", *words])
    try:
        main()
    except SystemExit as end:
        assert not end.code


def test_it_is_evaluated_exported_and_compared(stored, monkeypatch, capsys):
    shutil.copy("tokenizer.json", stored / "tokenizer.json")
    call(monkeypatch, "evaluate", str(stored), "data=files", "data.valid=texts/0*.txt")
    call(monkeypatch, "export", str(stored))
    call(monkeypatch, "compare", str(stored), "--out", "compared")
    assert (stored / "hf" / "model.safetensors").exists()
    assert open_run(stored).config.replica_check_every == 6


def test_a_stored_run_of_an_experiment_counts(monkeypatch, capsys):
    """It was trained before paper_exact and data.bos were set there.

    The first changes nothing in Muown, the second the data, so the command asks for those of the run.
    """
    words = ("experiment=124m_learning_rate", "scale=tiny", "points=1", "seeds=1", "series=muown_wd0", "data.bos=false")
    call(monkeypatch, "reproduce", *words, f"out={FIXTURES / 'stored_experiment'}")
    assert "1 run: 1 done" in capsys.readouterr().out


def test_the_table_of_renamed_names_is_applied_to_stored_configurations():
    config = yaml.safe_load((STORED / "run" / "config.yaml").read_text())
    updated = update_stored_config(config)
    assert config["schedule"]["_target_"] in RENAMED_TARGETS
    assert updated["schedule"]["_target_"] == "muown_train.training.schedule.wsd"
    assert "check_every" not in updated and updated["replica_check_every"] == 6
    assert "checkpointed" not in updated["model"] and updated["model"]["activation_checkpointing"] == 1
    assert update_stored_config(updated) == updated
    assert set(RENAMED_TARGETS).isdisjoint(RENAMED_TARGETS.values()) and len(RENAMED_KEYS) == 2
