"""Processes of this machine: functions on several gloo ranks, and commands, each with what it returns or prints.

All of them are forked from one process that has imported torch and the trainer, which is most of a start.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["torch", "muown_train.training.build"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _take_environment(environment: Mapping[str, str]) -> None:
    """Make this process's environment the given one: the process that it is forked from may have an earlier test's."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)


def _run_rank(
    rank: int, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    _take_environment(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    from muown_train.runtime.distributed import join_world

    try:
        with join_world() as world:
            results[rank] = ("done", function(world, *args))
    except BaseException:
        results[rank] = ("failed", traceback.format_exc())
        raise


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(world, *args)` on each rank; results in order of rank. It must be importable (module level)."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mp.Manager() as manager:
        results = manager.dict()
        passed = (dict(os.environ) | environment, function, args, results)
        mp.start_processes(_run_rank, passed, nprocs=size, start_method="forkserver")
        return [results[rank][1] for rank in range(size)]


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], output: Path, errors: Path, environment: dict[str, str]
) -> None:
    for number, path in ((1, output), (2, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    _take_environment(environment)
    # A daemon ends with the test, but may have no processes of its own, such as those that read data.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    function(*args)


def start_process(
    function: Callable[..., Any],
    args: Sequence[Any],
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `function(*args)` in a process of its own. It must be importable (module level).

    Args:
        output: what it prints is added to this file; errors: the same, by default the same file.
        environment: variables besides those of this process.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    variables = dict(os.environ) | dict(environment or {})
    process = multiprocessing.get_context("forkserver").Process(
        target=_call, args=(function, tuple(args), output, errors or output, variables), daemon=True
    )
    process.start()
    return process


def _run_command(*words: str) -> None:
    sys.argv = ["muown-train", *words]
    from muown_train.cli.main import run

    run()


def start_command(
    words: Sequence[str], output: Path, errors: Path | None = None, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start `muown-train` with these words; see `start_process`."""
    return start_process(_run_command, words, output, errors, environment)
