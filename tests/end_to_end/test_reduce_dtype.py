"""Gradients reduced in bfloat16: close to those reduced in float32, the same on all ranks, in a run and its resume."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from muown_train.models.parallel import wrap_in_ddp
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, trained

# the lr is constant since the budget, and so the schedule, changes; half of the blocks work under DDP checkpointed
SETTINGS = ("schedule=constant", "schedule.warmup=0", "eval_every=100", "model.activation_checkpointing=1")


def gradients(world: World, in_bfloat16: bool) -> list[Tensor]:
    """Mean over ranks of what each adds up over two micro-batches of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 50, bias=False))
    replica = wrap_in_ddp(model, world.device, in_bfloat16)
    rows = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(world.rank))
    with replica.no_sync():
        replica(rows[0]).logsumexp(-1).sum().backward()
    replica(rows[1]).logsumexp(-1).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def both(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients reduced in float32 and in bfloat16."""
    return gradients(world, False), gradients(world, True)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_gradients_are_close_to_those_of_float32_and_the_same_on_all_ranks():
    (expected, found), (expected_too, found_too) = on_ranks(2, both)
    assert equal(expected, expected_too) and equal(found, found_too)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and 0 < (a - b).norm() < 1e-2 * b.norm()


def storages(world: World, corpus: Path, out: Path) -> list[set[int]]:
    """Where gradients lie before, within and after two steps of a run of two micro-batches each."""
    run = built(corpus, out, world=world)
    found = []

    def look(*_: object) -> None:
        found.append({p.grad.untyped_storage().data_ptr() for p in run.model.parameters()})

    run.trainer.replica.register_forward_pre_hook(look)
    for _ in range(3):
        run.trainer.train_step()
        look()
    run.close()
    return found


@pytest.mark.slow
def test_gradients_exist_once(corpus, tmp_path):
    for found in on_ranks(2, storages, corpus, tmp_path):
        assert len(found) == 3 * 3
        assert all(len(places) == 1 for places in found)  # a bucket of DDP, also while micro-batches are added up
        assert len(set(map(frozenset, found))) <= 2  # DDP makes others once it knows in which order gradients come


def runs(world: World, corpus: Path, out: Path) -> list[list[Tensor]]:
    """The weights of a run of 8 steps, whole and resumed after 4."""
    weights = []
    for name, budgets in {"whole": [2048], "resumed": [1024, 2048]}.items():
        for tokens in budgets:
            run = trained(corpus, out / name, *SETTINGS, "reduce_dtype=bfloat16", f"tokens={tokens}", world=world)
        weights.append([p.detach().clone() for p in run.model.parameters()])
    return weights


@pytest.mark.slow
def test_a_run_trains_and_resumes_with_the_same_weights_on_all_ranks(corpus, tmp_path):
    (whole, resumed), (whole_too, resumed_too) = on_ranks(2, runs, corpus, tmp_path)
    assert equal(whole, whole_too) and equal(resumed, resumed_too) and equal(whole, resumed)
    found = losses(tmp_path / "whole" / "run")
    assert len(found) == 8 and losses(tmp_path / "resumed" / "run") == found
    alone = trained(corpus, tmp_path / "alone", *SETTINGS, "tokens=2048")  # nothing is reduced
    assert losses(tmp_path / "alone" / "run") == pytest.approx(found, abs=0.02)
    assert not equal(whole, [p.detach() for p in alone.model.parameters()])


def test_one_rank_has_nothing_to_reduce(corpus, tmp_path):
    run = built(corpus, tmp_path, "reduce_dtype=bfloat16")
    assert run.trainer.replica is run.trainer.model
    run.close()
