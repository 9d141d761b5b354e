"""One process among many: who it is, on which device, and sums over all of them.

Started by torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT): NCCL where there
are GPUs, gloo elsewhere. Without these variables it is a world of one, and nothing is initialised.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place; values on any device."""
        if self.size > 1:
            moved = values.to(self.device)
            dist.all_reduce(moved)
            values.copy_(moved)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The small object of every rank, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@contextmanager
def world(timeout: timedelta = timedelta(minutes=30)) -> Iterator[World]:
    """The world that the environment describes; the process group lives as long as the context."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(rank, size, device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        yield World(rank, size, device)
    finally:
        dist.destroy_process_group()
