"""Every generator goes on where it was, through a checkpoint, on other numbers of ranks too."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.state import RandomState
from muown_train.runtime.distributed import World

CPU = torch.device("cpu")
DRAWS = {
    "torch": lambda: torch.randn(3).tolist(),
    "numpy": lambda: np.random.standard_normal(3).tolist(),
    "python": lambda: [random.gauss(0, 1), random.random(), random.getrandbits(100)],
}


@pytest.fixture(autouse=True)
def _generators_as_before():
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def draws() -> dict:
    return {name: draw() for name, draw in DRAWS.items()}


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_draws_go_on(value, drawn_before):
    seed(value)
    for _ in range(drawn_before):  # an odd number of normal draws leaves one in store
        draws()
    state = RandomState(World(0, 1, CPU)).state_dict()
    expected = [draws(), draws()]
    seed(value ^ 1)
    RandomState(World(0, 1, CPU)).load_state_dict(state)
    assert [draws(), draws()] == expected


def test_through_a_checkpoint_each_rank_takes_its_own_and_others_go_on_as_they_are(tmp_path):
    class Union:
        """What a checkpoint of two ranks holds."""

        def state_dict(self):
            union, self.expected = {}, {}
            for rank in (0, 1):
                seed(rank)
                union |= RandomState(World(rank, 2, CPU)).state_dict()
                self.expected[rank] = draws()
            return union

    union = Union()
    Checkpoints(tmp_path, World(0, 1, CPU)).save(1, {"random": union}, wait=True)
    for rank in (0, 1):
        seed(9)
        Checkpoints(tmp_path, World(0, 1, CPU)).load({"random": RandomState(World(rank, 3, CPU))})
        assert draws() == union.expected[rank]
    seed(9)
    expected = draws()
    seed(9)
    Checkpoints(tmp_path, World(0, 1, CPU)).load({"random": RandomState(World(2, 3, CPU))})
    assert draws() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_a_gpu():
    world = World(0, 1, torch.device("cuda", 0))
    state = RandomState(world).state_dict()
    expected = torch.randn(3, device="cuda").tolist()
    RandomState(world).load_state_dict(state)
    assert torch.randn(3, device="cuda").tolist() == expected
    del state["0"]["cuda"]  # saved without a GPU
    RandomState(world).load_state_dict(state)
