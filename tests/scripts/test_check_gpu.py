"""The check of a GPU runs all of its parts on a CPU, says which failed, and skips them without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.paths import ROOT

SCRIPT = ROOT / "scripts" / "check_gpu.py"
WRONG = [
    (["speed"], "there is no part speed; there are tests, train"),
    (["--models", "9b"], "--models 9b must be 124m, 500m or both"),
    (["--minutes", "0"], "--minutes 0.0 must be above 0"),
]
PARTS = ["tests", "train", "optimizers", "attention", "compare"]


def check(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_executes_every_part(tmp_path):
    done = check("--dry-run", "--out", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0, done.stdout
    assert {name: part["state"] for name, part in found["parts"].items()} == dict.fromkeys(PARTS, "done")
    tables = {name: {row["table"] for row in part["rows"]} for name, part in found["parts"].items()}
    assert all(tables.values())
    assert {"training step of tiny", "beside the plan"} <= tables["train"]
    assert {"optimizer step with the matrices of tiny", "SOAP, one layer"} <= tables["optimizers"]
    assert found["parts"]["tests"]["rows"][0]["failed"] == 0 and found["machine"]["dry_run"]
    assert all(f"\n**{table}**\n" in done.stdout for table in set.union(*tables.values()))


def test_a_part_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from check_gpu import wait_for_part

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert wait_for_part(subprocess.Popen(command, start_new_session=True), 0.1) == "out of time"
    failing, passing = ([sys.executable, "-c", f"raise SystemExit({status})"] for status in (1, 0))
    assert wait_for_part(subprocess.Popen(failing, start_new_session=True), 60) == "failed"
    assert wait_for_part(subprocess.Popen(passing, start_new_session=True), 60) == "done"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_every_part_is_skipped_with_a_sentence():
    done = check()
    assert done.returncode == 0
    assert [line.split(": skipped, since ")[0] for line in done.stdout.splitlines()] == PARTS


@pytest.mark.slow
@pytest.mark.parametrize("words, sentence", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(words, sentence):
    done = check(*words)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
