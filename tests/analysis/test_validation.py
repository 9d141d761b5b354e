"""Evaluation: the same tokens and the same number whatever the ranks and the micro-batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muown_train.analysis.validation import cut_valid_rows, evaluate
from muown_train.models.gpt import GPT
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks


@given(st.integers(2, 300), st.integers(1, 400), st.integers(1, 40))
def test_each_target_once(length, targets, seq_len):
    ids = np.arange(length, dtype=np.uint16)
    rows = cut_valid_rows(ids, targets, seq_len)
    wanted = rows[:, 1:][rows[:, 1:] >= 0].tolist()
    assert wanted == list(range(1, min(targets, length - 1) + 1))
    real = rows[:, 1:] >= 0
    assert (rows[:, :-1][real] + 1 == rows[:, 1:][real]).all()


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=50, layers=2, dim=32, heads=2, seq_len=16)


IDS = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint16)


def naive(targets: int) -> float:
    total = 0.0
    for start in range(0, targets, 16):
        part = torch.tensor(IDS[start : min(start + 16, targets) + 1].astype(np.int64))[None]
        total += model()(part[:, :-1], part[:, 1:]).item()
    return total / targets


def _evaluate(world: World, targets: int, micro_batch: int) -> tuple[float, int]:
    return evaluate(model(), IDS, targets, 16, micro_batch, world)


@pytest.mark.parametrize("targets", [1, 16, 100, 337])
@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_equals_a_plain_loop(targets, micro_batch):
    loss, count = _evaluate(World(0, 1, torch.device("cpu")), targets, micro_batch)
    assert count == targets and loss == pytest.approx(naive(targets), rel=1e-6)


@pytest.mark.slow
def test_equal_on_three_ranks():
    expected = naive(337)
    for loss, count in on_ranks(3, _evaluate, 337, 4):
        assert count == 337 and loss == pytest.approx(expected, rel=1e-6)
