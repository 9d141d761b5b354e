"""A rank that is killed, halted or failing ends the others with the reason, wherever their main threads are."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from muown_train.runtime import distributed
from muown_train.runtime.distributed import World, join_world
from muown_train.runtime.heartbeat import HeartbeatMonitor, explain_lost_rank
from tests.helpers.ranks import free_port, start_process
from tests.helpers.runs import wait_until

GOES_ON = "the same command goes on from the last checkpoint"


def sleep(world: World) -> None:
    """A main thread that waits in a collective for a rank that does not come is like one that sleeps."""
    time.sleep(60)


def sum_often(world: World) -> None:
    for _ in range(10_000):
        time.sleep(0.01)
        world.sum(torch.ones(3))


def sleep_nine_seconds(world: World) -> None:
    time.sleep(9)


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("no such file")
    time.sleep(60)


def fail_one_by_one(world: World) -> None:
    time.sleep(world.rank)
    raise SystemExit("no such file")


def end_in_order(world: World) -> None:
    time.sleep(1.5 * world.rank)


def end_in_reverse_order(world: World) -> None:
    time.sleep(1.5 * (2 - world.rank))


def _run_rank(body: Callable[[World], None], lost_after: float) -> None:
    try:
        with join_world(lost_after=lost_after) as world:
            print("started", flush=True)
            world.record_step(7)
            body(world)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


@dataclass
class Rank:
    """A process of a world, and the file of its stderr."""

    process: BaseProcess
    errors: Path

    def end(self, within: float) -> tuple[int | None, str]:
        """Exit status and first line of stderr of a process that ends in so many seconds."""
        self.process.join(within)
        assert not self.process.is_alive()
        said = self.errors.read_text()
        return self.process.exitcode, said.splitlines()[0] if said else ""

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@pytest.fixture
def ranks(tmp_path):
    """A context of processes in a world of `size`, started; those left are killed at the end."""

    @contextmanager
    def start(size: int, body: Callable[[World], None], lost_after: float = 60.0) -> Iterator[list[Rank]]:
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(size):
            output, errors = (tmp_path / f"{common['MASTER_PORT']}-{rank}.{name}" for name in ("out", "err"))
            output.touch()
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = start_process(_run_rank, (body, lost_after), output, errors, variables)
            started.append((Rank(process, errors), output))
        try:
            for _, output in started:
                wait_until(lambda output=output: output.read_text() == "started\n")
            yield [rank for rank, _ in started]
        finally:
            for rank, _ in started:
                rank.process.kill()
                rank.process.join()

    return start


def lost(rank: int, why: str) -> tuple[int, str]:
    """The exit status and the message of the others if `rank` is lost."""
    return 1, f"rank {rank} on {socket.gethostname()} is lost: {why} (after step 7); {GOES_ON}"


@pytest.mark.parametrize("body", [sleep, pytest.param(sum_often, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_the_others_at_once(ranks, victim, body):
    with ranks(3, body) as others:
        others.pop(victim).process.kill()
        for other in others:
            assert other.end(within=10) == lost(victim, "its process has ended")


@pytest.mark.slow
@pytest.mark.parametrize("victim, body", [(0, sleep), pytest.param(1, sum_often, marks=pytest.mark.long)])
def test_a_halted_rank_ends_the_others_after_a_while(ranks, victim, body):
    with ranks(3, body, lost_after=2) as others:
        time.sleep(3)  # silence counts from the last sign of life: all are alive until now
        halted = others.pop(victim)
        halted.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        for other in others:
            assert other.end(within=15) == lost(victim, "no sign of life for 2 s")
        assert time.monotonic() - since > 1.5
        halted.send_signal(signal.SIGCONT)
        assert halted.end(within=10)[0] == 1


@pytest.mark.slow
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
def test_ranks_that_were_all_halted_go_on(ranks):
    with ranks(2, sleep_nine_seconds, lost_after=2) as both:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in both:
                rank.send_signal(number)
            time.sleep(4)
        assert [rank.end(within=20) for rank in both] == [(0, "")] * 2


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others_after_its_own_message(ranks):
    with ranks(3, fail_on_rank_1) as others:
        assert "Traceback" in others.pop(1).end(within=10)[1]
        for other in others:
            assert other.end(within=20) == lost(1, "it failed")


@pytest.mark.slow
def test_an_error_of_all_ranks_is_all_that_they_say(ranks):
    with ranks(3, fail_one_by_one) as all_ranks:
        assert [rank.end(within=20) for rank in all_ranks] == [(1, "no such file")] * 3


@pytest.mark.long
@pytest.mark.parametrize("body", [end_in_order, end_in_reverse_order])
def test_ranks_may_end_one_after_the_other(ranks, body):
    with ranks(3, body, lost_after=1) as all_ranks:
        assert [rank.end(within=20) for rank in all_ranks] == [(0, "")] * 3


@contextmanager
def a_pair() -> Iterator[tuple[HeartbeatMonitor, socket.socket]]:
    """The watch of rank 0 in this process, and the connection of a rank 1 played by the test."""
    server = socket.create_server(("127.0.0.1", 0))
    monitor = HeartbeatMonitor(0, ["here", "there"], server, "token", lost_after=10)
    with monitor, socket.create_connection(server.getsockname()) as other:
        other.sendall(b"token 1\n")
        yield monitor, other


@pytest.mark.slow
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
