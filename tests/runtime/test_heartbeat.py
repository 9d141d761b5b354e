"""A rank that is killed, halted or failing ends the others with the reason, wherever their main threads are."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from muown_train.runtime import distributed
from muown_train.runtime.heartbeat import HeartbeatMonitor, explain_lost_rank
from tests.helpers.ranks import free_port

GOES_ON = "the same command goes on from the last checkpoint"
# a main thread that waits in a collective for a rank that does not come is like one that sleeps
_RANK = """
import os, sys, time
import torch
from muown_train.runtime.distributed import join_world
with join_world(lost_after=float(sys.argv[2])) as here:
    print("started", flush=True)
    here.record_step(7)
    {body}
print("ended", flush=True)
"""
STUCK = "time.sleep(60)"
COLLECTIVES = "\n    ".join(["for _ in range(10_000):", "    time.sleep(0.01)", "    here.sum(torch.ones(3))"])


@contextmanager
def ranks(size: int, body: str, lost_after: float = 60.0) -> Iterator[list[subprocess.Popen]]:
    """Processes in a world of `size`, started; those left are killed at the end."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK.format(body=body), "rank", str(lost_after)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "started\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen, within: float) -> tuple[int, str]:
    """Exit status and first line of stderr of a process that ends in so many seconds."""
    error = process.communicate(timeout=within)[1]
    return process.returncode, error.splitlines()[0] if error else ""


def lost(rank: int, why: str) -> tuple[int, str]:
    return 1, f"rank {rank} on {socket.gethostname()} is lost: {why} (after step 7); {GOES_ON}"


@pytest.mark.parametrize("body", [STUCK, pytest.param(COLLECTIVES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_the_others_at_once(victim, body):
    with ranks(3, body) as processes:
        processes.pop(victim).kill()
        for process in processes:
            assert ended(process, within=10) == lost(victim, "its process has ended")


@pytest.mark.slow
@pytest.mark.parametrize("victim, body", [(0, STUCK), pytest.param(1, COLLECTIVES, marks=pytest.mark.long)])
def test_a_halted_rank_ends_the_others_after_a_while(victim, body):
    with ranks(3, body, lost_after=2) as processes:
        time.sleep(3)  # silence counts from the last sign of life: all are alive until now
        halted = processes.pop(victim)
        halted.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        for process in processes:
            assert ended(process, within=15) == lost(victim, "no sign of life for 2 s")
        assert time.monotonic() - since > 1.5
        halted.send_signal(signal.SIGCONT)
        assert ended(halted, within=10)[0] == 1


def test_a_rank_that_never_comes_is_not_waited_for_for_long(monkeypatch):
    monkeypatch.setattr(distributed, "START_TIMEOUT", timedelta(seconds=1))
    for key, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(key, str(value))
    with (
        pytest.raises(ConnectionError, match=r"the 2 ranks did not meet: .* 1/2 clients joined"),
        distributed.join_world(),
    ):
        pass


@pytest.mark.slow
def test_ranks_that_were_all_halted_go_on():
    with ranks(2, "time.sleep(9)", lost_after=2) as processes:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                process.send_signal(number)
            time.sleep(4)
        assert [ended(process, within=20) for process in processes] == [(0, "")] * 2


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others_after_its_own_message():
    with ranks(3, f"if here.rank == 1: raise ValueError('no such file')\n    {STUCK}") as processes:
        assert "Traceback" in ended(processes.pop(1), within=10)[1]
        for process in processes:
            assert ended(process, within=20) == lost(1, "it failed")


@pytest.mark.slow
def test_an_error_of_all_ranks_is_all_that_they_say():
    with ranks(3, "time.sleep(here.rank); raise SystemExit('no such file')") as processes:
        assert [ended(process, within=20) for process in processes] == [(1, "no such file")] * 3


@pytest.mark.long
def test_ranks_may_end_one_after_the_other():
    for order in ("here.rank", "2 - here.rank"):
        with ranks(3, f"time.sleep(1.5 * ({order}))", lost_after=1) as processes:
            assert [ended(process, within=20) for process in processes] == [(0, "")] * 3


@contextmanager
def a_pair() -> Iterator[tuple[HeartbeatMonitor, socket.socket]]:
    """The watch of rank 0 in this process, and the connection of a rank 1 played by the test."""
    server = socket.create_server(("127.0.0.1", 0))
    monitor = HeartbeatMonitor(0, ["here", "there"], server, "token", lost_after=10)
    with monitor, socket.create_connection(server.getsockname()) as other:
        other.sendall(b"token 1\n")
        yield monitor, other


def test_strangers_are_neither_heard_nor_missed():
    with a_pair() as (monitor, other):
        strangers = [socket.create_connection(monitor._connection.getsockname()) for _ in range(3)]
        strangers[0].sendall(b"lost 1 by my word\nbye\nfailed\n\xff\xfe\n")
        strangers[1].sendall(b"GET / HTTP/1.1\r\n" * 1000)
        strangers[2].close()
        assert other.recv(100).startswith(b"alive")
        other.sendall(b"al")
        other.sendall(b"ive\nbye\n")
        monitor._thread.join(0.3)
        assert monitor._thread.is_alive()  # it leaves when told to
    assert not monitor._thread.is_alive()


def test_which_errors_mean_a_loss():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:549] Connection closed by peer [127.0.0.1]:9\nmore")
    assert explain_lost_rank(gloo) == f"another rank is lost: {str(gloo).splitlines()[0]}; {GOES_ON}"
    assert explain_lost_rank(RuntimeError("shapes do not match")) is None
    assert explain_lost_rank(ConnectionResetError("Connection reset by peer")) is None  # of a download
