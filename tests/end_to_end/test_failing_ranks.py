"""What the other ranks and status.json say when one of two ranks fails, hangs or is killed, whatever it does then."""

import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import pytest

from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.status import read_status
from muown_train.runtime import distributed
from muown_train.training import build
from muown_train.training.trainer import Trainer
from tests.helpers.ranks import free_port, start_process
from tests.helpers.runs import SMALL

LATE_AFTER = 10  # seconds, so that a machine under load makes no other rank late
GOES_ON = "the same command goes on from the last checkpoint"
# where a rank fails: the object and the name of what it calls, and how many calls go well before
PLACES = {
    "build": (build, "build_data", 0),
    "resume": (Checkpoints, "load", 0),
    "evaluate": (Trainer, "evaluate", 1),
    "step": (Trainer, "train_step", 6),
    "save": (Checkpoints, "save", 1),
}


class OddError(Exception):
    """An error that nothing else knows."""


def raise_odd_error() -> None:
    raise OddError("hf_abcdefghijklmnopqrstuvwxyz is odd\n\x1b[2Jand has\ttwo lines")


def raise_value_error() -> None:
    raise ValueError("no number")


def raise_key_error() -> None:
    raise KeyError("loss")


def raise_memory_error() -> None:
    raise MemoryError


def raise_os_error() -> None:
    raise OSError(5, "Input/output error", "/data/shard.bin")


def raise_runtime_error() -> None:
    raise RuntimeError("x" * 1_000_000)


def leave() -> None:
    sys.exit("this rank leaves")


def hang() -> None:
    while True:
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_fail(place: str, act: Callable[[], None], rank: int, words: list[str]) -> None:
    """Run the command, and `act` at a place of one rank. A rank that hangs is waited for some seconds."""
    owner, name, calls = PLACES[place]
    inner, called = getattr(owner, name), []

    @functools.wraps(inner)
    def act_or_call(*args, **kwargs):
        called.append(None)
        if len(called) > calls:
            act()
        return inner(*args, **kwargs)

    if os.environ["RANK"] == str(rank):
        setattr(owner, name, act_or_call)
    distributed.join_world = functools.partial(distributed.join_world, lost_after=20, late_after=LATE_AFTER)
    sys.argv = ["muown-train", *words]
    from muown_train.cli.main import run

    run()


def fail_on(corpus, tmp_path, place, act, rank):
    """Let one rank of two act so; the exit statuses, what each says on stderr, and status.json."""
    words = [*SMALL, f"data.train={corpus}/*.txt", f"out={tmp_path}", f"cache={corpus}/cache", "name=run"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    errors = [tmp_path / f"{i}.err" for i in range(2)]
    processes = [
        start_process(
            run_and_fail,
            (place, act, rank, words),
            tmp_path / f"{i}.out",
            errors[i],
            shared | {"RANK": str(i), "LOCAL_RANK": str(i)},
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            process.join(100)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return statuses, [path.read_text() for path in errors], read_status(tmp_path / "run")


ODD = "OddError: *** is odd \\x1b[2Jand has two lines (after step"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, act, says",
    [
        ("build", raise_odd_error, ODD),
        ("resume", raise_odd_error, ODD),
        ("evaluate", raise_odd_error, ODD),
        ("step", raise_odd_error, ODD),
        ("save", raise_odd_error, ODD),
        ("step", raise_value_error, "training failed after step 6: no number (after step 6)"),
        ("step", raise_key_error, "KeyError: 'loss' (after step 6)"),
        ("step", raise_memory_error, "MemoryError (after step 6)"),
        ("step", raise_os_error, f"/data/shard.bin: Input/output error; {GOES_ON} (after step 6)"),
        ("step", raise_runtime_error, "x" * 1000 + " (after step 6)"),
        ("step", leave, "this rank leaves (after step 6)"),
    ],
)
def test_the_others_say_what_made_a_rank_fail(corpus, tmp_path, place, act, says):
    statuses, said, status = fail_on(corpus, tmp_path, place, act, rank=1)
    sentence = f"rank 1 on {socket.gethostname()} failed: {says}"
    assert statuses[0] == 1 and statuses[1] not in (0, None)
    assert said[0].startswith(sentence) and said[0].count("\n") == 1 and len(said[0]) < 1300
    assert said[0].count(GOES_ON) == 1
    if place == "build":  # there is no folder yet
        assert status == {}
    else:
        assert status["state"] == "failed" and status["reason"] == said[0].rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step", "save"])
def test_rank_0_fails(corpus, tmp_path, place):
    statuses, said, status = fail_on(corpus, tmp_path, place, raise_odd_error, rank=0)
    assert statuses == [1, 1]
    assert said[1].startswith(f"rank 0 on {socket.gethostname()} failed: {ODD}") and said[1].count("\n") == 1
    assert status["state"] == "failed" and status["reason"] == "OddError: *** is odd \\x1b[2Jand has two lines"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["build", "step", "evaluate", "save"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs(corpus, tmp_path, place, rank):
    statuses, said, status = fail_on(corpus, tmp_path, place, hang, rank)
    sentence = f"rank {rank} on {socket.gethostname()} is late: the others have waited "
    assert statuses == [1, 1]
    for text in said:
        assert text.startswith(sentence) and text.count("\n") == 1
    assert said[0] == said[1]
    if place != "build":
        assert status["state"] == "failed" and status["reason"] == said[0].rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step", "save"])
def test_a_rank_that_is_killed(corpus, tmp_path, place):
    statuses, said, status = fail_on(corpus, tmp_path, place, die, rank=1)
    assert statuses == [1, -signal.SIGKILL]
    assert said[0].startswith(f"rank 1 on {socket.gethostname()} is lost: its process has ended (after step ")
    assert status["state"] == "failed" and status["reason"] == said[0].rstrip("\n")
