"""A compiled run compiles one block in its first steps and never again, and trains as one that is not compiled."""

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"),
]


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def test_nothing_is_compiled_after_the_first_evaluation_and_steps(corpus, tmp_path):
    # several micro-batches, a last evaluation batch that is not full, a learning rate that moves, a save and a log
    run = built(corpus, tmp_path, "compile=true", "precision=auto", "model.layers=3", "eval_every=4")
    trainer = run.trainer
    counters.clear()
    run.resume()
    trainer.begin()
    for _ in range(2):
        trainer.step_metrics.add(trainer.train_step())
    first = graphs()
    # a block and the end of the head, each with and without gradients and for two shapes of batches; for the optimizer
    # two parts for each of four shapes
    assert first[0] <= 8 + 8
    trainer.handle_boundary(None)
    while trainer.step < trainer.settings.steps:
        trainer.step_metrics.add(trainer.train_step())
        if trainer.step % 4 == 0:
            trainer.handle_boundary(None)
    assert graphs() == first
    run.close()


def count_compiled_blocks(layers: int, corpus: Path, out: Path, *overrides: str) -> int:
    """The graphs of two steps; the optimizer's are not compiled."""
    torch._dynamo.reset()
    counters.clear()
    run = built(corpus, out, "precision=auto", f"model.layers={layers}", *overrides)
    run.model.compile_blocks()
    for _ in range(2):
        run.trainer.train_step()
    run.close()
    return graphs()[0]


@pytest.mark.parametrize("overrides", [(), ("model.activation_checkpointing=2",)], ids=["plain", "checkpointing"])
def test_one_program_serves_all_blocks(overrides, corpus, tmp_path):
    expected = 1 + (2 if overrides else 1)  # the end of the head; blocks, and those that are computed again
    assert count_compiled_blocks(2, corpus, tmp_path / "2", *overrides) <= expected
    assert count_compiled_blocks(5, corpus, tmp_path / "5", *overrides) <= expected


def train_compiled(world: World, corpus: Path, out: Path) -> tuple[int, int]:
    """Train with compiled blocks and a sharded optimizer; return the number of graphs and of places that broke them."""
    counters.clear()
    run = built(corpus, out, "compile=true", "micro_batch=1", "model.layers=3", world=world)
    run.trainer.fit()
    run.close()
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


def test_compiled_on_two_ranks_with_a_sharded_optimizer_it_trains_as_if_it_were_not(corpus, tmp_path):
    found = on_ranks(2, train_compiled, corpus, tmp_path / "compiled")
    trained(corpus, tmp_path / "eager", "micro_batch=1", "model.layers=3")
    expected = losses(tmp_path / "eager" / "run")
    assert losses(tmp_path / "compiled" / "run") == pytest.approx(expected, abs=1e-3)
    assert len(expected) == 12
    for count, breaks in found:
        assert count <= 16 and not breaks  # as on one rank: DDP's buckets split nothing
