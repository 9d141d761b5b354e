"""The device of these tests. Without a GPU they are skipped, unless the environment asks for the CPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from muown_train.runtime.distributed import World

ON_CPU = "MUOWN_GPU_TESTS_ON_CPU"  # this variable makes the tests run on the CPU, as far as they mean something there


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get(ON_CPU):
        return torch.device("cpu")
    pytest.skip(f"torch finds no GPU ({ON_CPU}=1 runs this test on the CPU)")


@pytest.fixture
def world(device: torch.device) -> World:
    return World(0, 1, device)


@pytest.fixture
def forbid_sync(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which an operation that makes the host wait for the GPU raises an error."""

    @contextmanager
    def forbid() -> Iterator[None]:
        if device.type == "cpu":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbid
