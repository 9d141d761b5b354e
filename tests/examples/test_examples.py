"""Every program in examples/ runs, and a run that is stopped and continued ends with the same weights, bit for bit."""

import importlib.util
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from muown_train.optim.core import orthogonalize
from tests.helpers.paths import ROOT
from tests.helpers.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLES = ROOT / "examples"
CASES = {  # what the file imports, the words that say how long it trains, half and whole
    "muown_in_a_plain_loop": ([], "--steps", 5, 10),
    "resnet": ([], "--steps", 5, 10),
    "lora": (["peft", "transformers"], "--steps", 10, 20),
    "with_hf_trainer": (["accelerate", "transformers"], "--steps", 10, 20),
    "with_accelerate": (["accelerate", "transformers"], "--epochs", 1, 2),
    "with_lightning": (["lightning"], "--epochs", 2, 3),
    "with_lightning before it unfreezes": (["lightning"], "--epochs", 1, 3),
}


SHARDED = ["fsdp2", "torchtitan_loop"]  # run by torchrun
OURS = ["muown_in_a_plain_loop", "resnet", "lora"]  # their loops are their own


def run(name, out, *words):
    """Return the weights and buffers at the end of an example, which is run in this process."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.main(["--out", str(out), *map(str, words)])
    return {name: get_whole(value).clone() for name, value in model.state_dict().items()}


def get_whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_is_continued_exactly(case, tmp_path, capsys):
    libraries, key, half, whole = CASES[case]
    for library in libraries:
        pytest.importorskip(library)
    if case == "with_accelerate":
        pytest.importorskip("transformers", minversion="5")  # in earlier ones Mixtral's experts are modules
    name = case.split()[0]
    straight = run(name, tmp_path / "straight", key, whole)
    assert "parameters" in capsys.readouterr().out  # the table of where each parameter goes
    stopped = run(name, tmp_path / "stopped", key, half)
    torch.manual_seed(9)  # what a new process has instead
    continued = run(name, tmp_path / "stopped", key, whole)
    assert straight.keys() == continued.keys()
    assert [key for key in straight if not torch.equal(straight[key], continued[key])] == []
    assert any(not torch.equal(stopped[key], continued[key]) for key in straight)
    for steps in (half, whole) if name in OURS else ():  # what is further stays as it is
        again = run(name, tmp_path / "stopped", key, steps)
        assert [key for key in straight if not torch.equal(straight[key], again[key])] == []


def run_on_rank(world, name, out, steps):
    return run(name, out, "--steps", steps)


def run_in_float32(world, name, out, steps):
    """Iterate in float32 on any CPU: in bfloat16 rounding decides where directions have nearly no gradient."""
    orthogonalize._cpu_has_fast_bfloat16 = lambda: False
    return run(name, out, "--steps", steps)


@pytest.mark.parametrize("name", SHARDED)
def test_a_stopped_run_of_sharded_parameters_is_continued_exactly(name, tmp_path):
    (straight, _) = on_ranks(2, run_on_rank, name, tmp_path / "straight", 20)
    (stopped, _) = on_ranks(2, run_on_rank, name, tmp_path / "stopped", 10)
    for continued in on_ranks(2, run_on_rank, name, tmp_path / "stopped", 20):
        assert [key for key in straight if not torch.equal(straight[key], continued[key])] == []
    assert any(not torch.equal(stopped[key], continued[key]) for key in straight)
    on_ranks(2, run_on_rank, name, tmp_path / "stopped", 10)  # is further already
    (again, _) = on_ranks(2, run_on_rank, name, tmp_path / "stopped", 20)
    assert [key for key in straight if not torch.equal(straight[key], again[key])] == []
    # one process takes the same rows, in another order of sums
    (alone,) = on_ranks(1, run_in_float32, name, tmp_path / "alone", 3)
    for sharded in on_ranks(3, run_in_float32, name, tmp_path / "three", 3):
        for key, value in alone.items():
            torch.testing.assert_close(sharded[key], value, rtol=0, atol=1e-3)


def test_the_page_lists_every_example():
    rows = re.findall(r"(?m)^\| `([\w./]+)` \|", (ROOT / "docs" / "own-training-code.md").read_text())
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".sh")}
    assert sorted(rows) == sorted({*files, "add_an_optimizer/"})


def test_every_program_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHARDED, *(case.split()[0] for case in CASES)}
