"""The process group: the backend of a device, and NCCL bound to the GPU of its rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from muown_train.runtime import distributed


class Store:
    def set_timeout(self, timeout: timedelta) -> None: ...


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:3", "nccl")])
def test_nccl_is_bound_to_the_gpu_of_its_rank(device, backend, monkeypatch):
    made = []
    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(Store(), 1, 4)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append((backend, options)))
    distributed._init_process_group(1, 4, torch.device(device), timedelta(seconds=9))
    [(used, options)] = made
    assert used == backend
    assert options["device_id"] == (torch.device("cuda", 3) if backend == "nccl" else None)
    assert (options["rank"], options["world_size"], options["timeout"]) == (1, 4, timedelta(seconds=9))
