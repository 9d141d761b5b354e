"""The benchmark of training runs and measures what it says."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ranks import free_port

SCRIPT = ROOT / "scripts" / "benchmark_train.py"
SMALL = "model.layers=1 model.dim=32 model.heads=2 model.vocab_size=512 seq_len=32 micro_batch=2 batch_tokens=128"


def rows(output: str) -> dict[str, list[str]]:
    table = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in table}


@pytest.mark.slow
def test_it_compares_configurations_with_a_plain_loop():
    arguments = ["", "optim=adamw micro_batch=1", "", "--common", SMALL, "--against", "torch", "--rounds", "3"]
    ran = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    found = rows(ran.stdout)
    assert list(found)[2:] == ["torch", "default", "optim=adamw micro_batch=1", "default (3)"]
    assert found["torch"][1] == "1.00"
    for speed, ratio, update, *parts, _, memory in list(found.values())[2:]:
        assert float(speed.replace(",", "")) == pytest.approx(128e3 / float(update), rel=0.2)
        assert 0.01 < float(ratio) < 100 and float(memory) >= 0
        assert sum(map(float, parts)) > 0 and all(float(part) >= 0 for part in parts)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["optim.lrr=3"], "error: there is no key optim.lrr (did you mean optim.lr?)"),
        (["", "model.heads=3"], "error: model.dim=256 does not split into model.heads=3"),
        (["data=stdlib"], "data=stdlib has no effect here"),
        (["--threads", "0"], "--threads: 0 must be a whole number from 1 to 1024"),
        (["model.dim='"], "No closing quotation"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments, sentence, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import benchmark_train

    with pytest.raises(SystemExit) as left:
        benchmark_train.main()
    said = capfd.readouterr().err
    assert left.value.code == 2 and sentence in said and "Traceback" not in said


@pytest.mark.slow
def test_it_measures_two_ranks():
    arguments, port = ["--common", SMALL, "--rounds", "2"], str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "default" in rows(outputs[0]) and not outputs[1]
