"""What a command loads: each library where it is used, and not before."""

import os
import subprocess
import sys

import pytest

from tests.helpers.runs import SMALL

# slow to import; packages, or modules in them
NEVER_TO_TRAIN = (
    "datasets",
    "huggingface_hub",
    "matplotlib",
    "pandas",
    "pyarrow",
    "rich",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
    "wandb",
)
NEVER_WITHOUT_TRAINING = (*NEVER_TO_TRAIN, "numpy", "safetensors", "sympy", "tiktoken", "tokenizers", "torch")

PROGRAM = """
import sys
from muown_train.cli.main import main

try:
    main()
finally:
    print("loaded:", *sys.modules)
"""
# as far as to the last update, and not what tells of the end
TO_THE_LAST_UPDATE = """
import sys
from muown_train.cli import summary
from muown_train.cli.main import main

summary.report_end = lambda run, outcome, already: print("update", run.trainer.step, *sys.modules, sep=" ")
main()
"""


def after(program: str, *arguments: str) -> tuple[str, set[str]]:
    """What a program says before, and the names in, its last line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # small tensors
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    *said, loaded = done.stdout.splitlines() or [""]
    return "\n".join([*said, done.stderr]), set(loaded.split())


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--help"], "The most used settings"),
        (["--cfg", "job"], "batch_tokens: 4096"),
        (["optim=nope"], "there is no optim=nope"),
        (["seq_len=0"], "seq_len=0 must be"),
    ],
)
def test_without_training_nothing_heavy_is_loaded(arguments, says):
    said, loaded = after(PROGRAM, *arguments)
    assert says in said and "hydra" in loaded
    assert not loaded & set(NEVER_WITHOUT_TRAINING)


@pytest.mark.slow
def test_training_loads_only_what_it_uses(corpus, tmp_path):
    places = (f"data.train={corpus}/*.txt", f"out={tmp_path}", f"cache={corpus}/cache")
    said, loaded = after(TO_THE_LAST_UPDATE, *SMALL, *places, "name=run", "tokens=512")
    assert {"update", "2", "torch"} <= loaded, said
    assert not loaded & set(NEVER_TO_TRAIN)
