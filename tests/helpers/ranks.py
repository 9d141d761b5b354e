"""Run a function on several real gloo ranks of this machine and collect what each returns.

Ranks are forked from a process that has imported torch and the trainer once, which takes most of the time of a start.
"""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["torch", "muown_train.training.build"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _entry(
    rank: int, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.clear()  # that of the process which preloads may be an earlier test's
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from muown_train.runtime.distributed import join_world

    try:
        with join_world() as world:
            results[rank] = ("done", function(world, *args))
    except BaseException:
        results[rank] = ("failed", traceback.format_exc())
        raise


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(world, *args)` on each rank; results in order of rank. It must be importable (module level)."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mp.Manager() as manager:
        results = manager.dict()
        passed = (dict(os.environ) | environment, function, args, results)
        mp.start_processes(_entry, passed, nprocs=size, start_method="forkserver")
        return [results[rank][1] for rank in range(size)]
