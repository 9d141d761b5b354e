"""A rank that is killed, halted or failing ends the others with the reason, wherever their main threads are."""

import errno
import itertools
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from muown_train.runtime import distributed
from muown_train.runtime.distributed import World, join_world
from muown_train.runtime.heartbeat import monitor
from muown_train.runtime.heartbeat.explain import describe_error, explain_lost_rank
from muown_train.runtime.heartbeat.monitor import HeartbeatMonitor
from tests.helpers.ranks import free_port, start_process
from tests.helpers.runs import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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
                # torch 2.10's gloo prints lines of its own
                wait_until(lambda output=output: output.read_text().endswith("started\n"))
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
            assert other.end(within=20) == (1, lost(1, "")[1].replace("is lost: ", "failed: no such file"))


@pytest.mark.slow
def test_an_error_of_all_ranks_is_all_that_they_say(ranks):
    with ranks(3, fail_one_by_one) as all_ranks:
        assert [rank.end(within=20) for rank in all_ranks] == [(1, "no such file")] * 3


@pytest.mark.long
@pytest.mark.parametrize("body", [end_in_order, end_in_reverse_order])
def test_ranks_may_end_one_after_the_other(ranks, body):
    with ranks(3, body, lost_after=1) as all_ranks:
        assert [rank.end(within=20) for rank in all_ranks] == [(0, "")] * 3


class Ends(list):
    """The exit statuses with which threads have ended this process, which goes on."""

    def __call__(self, status: int) -> None:
        self.append(status)
        raise SystemExit  # ends the thread


@pytest.fixture
def ends(monkeypatch):
    ends = Ends()
    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(monitor, "_LEAVE_WITHIN", 0.1)
    return ends


@contextmanager
def a_pair(
    *counts: Callable[[], int], hosts: Sequence[str] = ("here", "there"), **limits: float
) -> Iterator[tuple[HeartbeatMonitor, ...]]:
    """The watches of ranks 0 and 1, or more, all in this process, which leave together."""
    limits = {"lost_after": 1.0} | limits
    ends = {rank: socket.socketpair() for rank in range(1, len(hosts))}
    monitors = [HeartbeatMonitor(0, list(hosts), {rank: end for rank, (end, _) in ends.items()}, **limits)]
    monitors += [HeartbeatMonitor(rank, list(hosts), {0: end}, **limits) for rank, (_, end) in ends.items()]
    for watch, count in zip(monitors, counts, strict=False):
        watch._count_collectives = count
    for watch in monitors:
        watch.__enter__()
    yield tuple(monitors)
    leave_together(monitors)


def leave_together(monitors: Iterable[HeartbeatMonitor]) -> None:
    """Close the monitors as ranks do that end at the same time: one waits a moment for the others."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(HeartbeatMonitor.close, monitors))


def test_a_rank_that_is_late_is_named_with_its_place(ends, monkeypatch, capfd):
    kept = []
    monkeypatch.setattr(monitor, "_PACKAGE", Path(__file__).parents[1])
    with a_pair(lambda: 5, lambda: 3, late_after=0.3) as (first, second):
        first.step, second.step, first.on_verdict = 8, 7, kept.append
        wait_until(lambda: len(ends) == 2)
    assert ends == [1, 1] and first.verdict == second.verdict and kept == [first.verdict]
    start, _, rest = first.verdict.partition("; it is in ")
    assert start == "rank 1 on there is late: the others have waited 0 s for it"
    assert re.fullmatch(rf"wait_until \(helpers/runs.py, line \d+\) \(after step 7\); {GOES_ON}", rest)
    assert capfd.readouterr().err == f"{first.verdict}\n" * 2


def test_a_rank_is_not_late_while_it_goes_on_or_when_the_others_wait_for_nobody(ends):
    counts = itertools.count()
    with a_pair(lambda: next(counts) + 100, lambda: next(counts), late_after=0.3):
        time.sleep(0.6)
    with a_pair(lambda: 5, lambda: 5, late_after=0.1):
        time.sleep(0.4)
    assert not ends


def test_rank_0_is_late_too(ends):
    with a_pair(lambda: 5, lambda: 6, late_after=0.2) as (_, second):
        wait_until(lambda: len(ends) == 2)
    assert second.verdict.startswith("rank 0 on here is late")


def test_of_several_that_wait_the_one_they_wait_for_is_late(ends):
    counts = [lambda: 5, lambda: 4, lambda: 3]  # rank 1 waits in a group with rank 2, and rank 0 in one of all
    with a_pair(*counts, hosts="abc", late_after=0.2) as monitors:
        wait_until(lambda: len(ends) == 3)
    assert all(watch.verdict.startswith("rank 2 on c is late") for watch in monitors)


def break_collective() -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:549] Connection closed by peer [127.0.0.1]:9")


def test_a_broken_collective_is_explained_by_the_error_of_the_rank_that_failed(ends):
    with a_pair() as (first, second), ThreadPoolExecutor(1) as pool:
        pool.submit(second.close, KeyError("loss"))
        with pytest.raises(RuntimeError) as caught:
            break_collective()
        assert first.explain(caught.value) == f"rank 1 on there failed: KeyError: 'loss' (after step 0); {GOES_ON}"
        assert first.explain(RuntimeError("shapes do not match")) is None


def test_errors_of_the_heartbeat_itself_end_no_run(ends, capfd):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    for counts in ((fail, lambda: 0), (lambda: 0, fail)):
        with a_pair(*counts, lost_after=0.5) as monitors:
            time.sleep(0.8)  # beyond the silence that means a loss
            assert sum(watch._thread.is_alive() for watch in monitors) == 1
        assert capfd.readouterr().err.count("sends no more heartbeats ([Errno 24] Too many open files)") == 1
    assert not ends


def test_a_machine_without_threads_has_no_heartbeat_but_runs(ends, monkeypatch, capfd):
    ours, theirs = socket.socketpair()
    first, second = (HeartbeatMonitor(rank, ["a", "b"], {1 - rank: c}, 0.5) for rank, c in ((0, ours), (1, theirs)))
    first.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
        second.__enter__()
    time.sleep(0.8)
    leave_together([first, second])
    assert not ends and "rank 1 sends no more heartbeats (no thread)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "error, says",
    [
        (ValueError("no number"), "no number"),
        (KeyError("loss"), "KeyError: 'loss'"),
        (MemoryError(), "MemoryError"),
        (SystemExit("this rank leaves"), "this rank leaves"),
        (OSError(5, "Input/output error", "/data/shard"), "[Errno 5] Input/output error: '/data/shard'"),
        (
            RuntimeError("two\nlines\u2028and\x1b[2J \ud800 hf_abcdefghijklmnopqrstuv"),
            "two lines and\\x1b[2J \\ud800 ***",
        ),
        (RuntimeError("x" * 1_000_000), "x" * 1000),
    ],
)
def test_an_error_is_one_line_for_others(error, says):
    assert describe_error(error) == says


def test_which_errors_mean_a_loss():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:549] Connection closed by peer [127.0.0.1]:9\nmore")
    assert explain_lost_rank(gloo) == f"another rank is lost: {str(gloo).splitlines()[0]}; {GOES_ON}"
    assert explain_lost_rank(RuntimeError("shapes do not match")) is None
    late = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
    assert explain_lost_rank(late).startswith("the ranks have waited for one another for too long, for which is not ")
    assert explain_lost_rank(ConnectionResetError("Connection reset by peer")) is None  # of a download
