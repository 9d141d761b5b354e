"""Signals and the time limit stop every rank after the same update."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from muown_train.runtime.distributed import World
from muown_train.runtime.stop_signal import SIGNALS, StopSignal
from tests.helpers.ranks import free_port, on_ranks

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_asks_for_a_stop_and_tells_at_once(number, capfd):
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopSignal(ALONE) as stop:
        assert stop.should_stop() is None
        os.kill(os.getpid(), number)
        told = capfd.readouterr().err
        assert stop.should_stop() == stop.should_stop() == number.name
    assert told.startswith(f"{number.name}: stopping after this step and saving") and told.count("\n") == 1
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_second_interrupt_stops_at_once_and_others_do_not():
    with pytest.raises(KeyboardInterrupt), StopSignal(ALONE) as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.should_stop() == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second SIGINT was not obeyed")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signal_in_the_middle_of_printing(capfd):
    with StopSignal(ALONE) as stop:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        end = time.monotonic() + 5
        while not stop.should_stop() and time.monotonic() < end:
            print("x" * 1000, file=sys.stderr, flush=True)
    assert "SIGUSR1: stopping" in capfd.readouterr().err


def test_time_limit_and_request():
    with StopSignal(ALONE, time_limit=0.05) as stop:
        assert stop.should_stop() is None
        time.sleep(0.06)
        assert stop.should_stop() == "time limit"
    with StopSignal(ALONE, time_limit=1000) as stop:
        stop.request("validation loss reached")
        stop.request("another")
        assert stop.should_stop() == "validation loss reached"


def _stops(world: World, seed: int) -> list[tuple[int, str | None]]:
    """Return (calls of `should_stop`, its reason) of trials with steps of random lengths and one or two signals."""
    common = random.Random(seed)
    results = []
    for trial in range(8):
        limit = 0.1 if trial == 7 and world.rank == 1 else None  # the clocks of ranks may differ
        chosen = {common.randrange(world.size): common.choice(SIGNALS) for _ in range(1 if trial < 5 else 2)}
        delay = common.uniform(0, 0.1)
        own = random.Random(world.rank + 100 * trial)
        with StopSignal(world, limit) as stop:
            if world.rank in chosen and trial < 7:
                threading.Timer(delay * own.random(), os.kill, (os.getpid(), chosen[world.rank])).start()
            calls = 0
            reason = None
            while not reason and calls < 10_000:
                time.sleep(own.choice([0, 0, 0.001, 0.01]))
                calls += 1
                reason = stop.should_stop()
            time.sleep(0.1)  # the signal of a second rank comes while there still is a handler
            assert stop.should_stop() == reason
        results.append((calls, reason))
    with StopSignal(world) as stop:  # an end without a stop leaves nothing unwaited
        results.append((3, [stop.should_stop() for _ in range(3)][-1]))
    return results


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_stop_after_the_same_update(size):
    first, *others = on_ranks(size, _stops, size)
    assert all(other == first for other in others)
    assert all(reason for _, reason in first[:-1]) and first[-2][1] == "time limit" and first[-1] == (3, None)


_UNDER_TORCHRUN = """
import os, time
from muown_train.runtime.distributed import join_world
from muown_train.runtime.stop_signal import StopSignal
with join_world() as here, StopSignal(here) as stop:
    os.write(1, b"started\\n")  # in one piece
    for update in range(1, 10_000):
        time.sleep(0.02)
        if reason := stop.should_stop():
            break
    os.write(1, f"saved {update} {reason}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_forwards_signals_to_its_ranks(number, tmp_path):
    """The ranks stop as planned, while torchrun itself ends with a traceback of its own and status 1."""
    script = tmp_path / "script.py"
    script.write_text(_UNDER_TORCHRUN)
    launcher = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "started\n"
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    first, second = out.splitlines()
    assert first == second and first.endswith(number.name)
    assert process.returncode == 1 and "SignalException" in err
