"""The process group: the backend of a device, and NCCL bound to the GPU of its rank."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muown_train.runtime import distributed
from muown_train.runtime.distributed import join_world
from tests.helpers.ranks import start_process


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


def join_within_a_second() -> None:
    distributed.STRANGER_AFTER = 1.0
    with join_world():
        print("met", flush=True)


def start_rank(rank: int, port: int, output: Path):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start_process(join_within_a_second, (), output, environment=variables)


@pytest.mark.slow
def test_a_stranger_at_the_port_of_rank_0_is_named(tmp_path):
    """Rank 0 cannot have its port, and the other rank does not wait for it there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        rank = start_rank(1, port, tmp_path / "1")
        rank.join(60)
        assert rank.exitcode == 1
    said = (tmp_path / "1").read_text()
    assert f"[rank 1] error: what answers at 127.0.0.1:{port} is not rank 0: give another MASTER_PORT" in said


@pytest.mark.slow
def test_a_rank_waits_for_a_rank_0_that_comes_late(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    late = start_rank(1, port, tmp_path / "1")
    late.join(5)  # some looks at a port where nobody listens
    first = start_rank(0, port, tmp_path / "0")
    for rank in (first, late):
        rank.join(60)
    assert [first.exitcode, late.exitcode] == [0, 0]
    assert "met" in (tmp_path / "1").read_text()
