"""Run a function on several real gloo ranks of this machine and collect what each returns."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _entry(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from muown_train.runtime.distributed import join_world

    try:
        with join_world() as here:
            results[rank] = ("done", function(here, *args))
    except BaseException:
        results[rank] = ("failed", traceback.format_exc())
        raise


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(world, *args)` on each rank; results in order of rank. It must be importable (module level)."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(_entry, (size, free_port(), function, args, results), nprocs=size, start_method="spawn")
        return [results[rank][1] for rank in range(size)]
