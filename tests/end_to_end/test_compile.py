"""A compiled run compiles in its first steps and never again."""

import shutil

import pytest
from torch._dynamo.utils import counters

from tests.helpers.runs import built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"),
]


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def test_nothing_is_compiled_after_the_first_evaluation_and_steps(corpus, tmp_path):
    # several micro-batches, a last evaluation batch that is not full, a learning rate that moves, a save and a log
    run = built(corpus, tmp_path, "compile=true", "precision=auto", "model.layers=1", "eval_every=4")
    trainer = run.trainer
    counters.clear()
    run.resume()
    trainer.begin()
    for _ in range(2):
        trainer.step_metrics.add(trainer.train_step())
    first = graphs()
    assert first[0] >= 4  # the model with and without gradients, the optimizer's two parts
    trainer.handle_boundary(None)
    while trainer.step < trainer.settings.steps:
        trainer.step_metrics.add(trainer.train_step())
        if trainer.step % 4 == 0:
            trainer.handle_boundary(None)
    assert graphs() == first
    run.close()
