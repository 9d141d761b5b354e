"""A sink in the background: training never waits for it, never ends by it, and it gets every line in order."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.training.tracking.async_sink import AsyncSink


class Slow:
    """A sink that remembers; `gates` hold up its calls until they are set."""

    def __init__(self, *held: str) -> None:
        self.calls: list[object] = []
        self.gates = {name: threading.Event() for name in held}

    def _called(self, name: str, *what: object) -> None:
        if name in self.gates:
            self.gates[name].wait(20)
        self.calls += what

    def start(self, folder, config, steps):
        self._called("start", ("start", steps))

    def write(self, lines):
        self._called("write", *(line["step"] for line in lines))

    def finish(self, summary):
        self._called("finish", ("finish", dict(summary)))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=12))
def test_every_line_in_order_then_the_summary_once(batches):
    sink, said = Slow(), []
    background = AsyncSink(sink, "it", warn=said.append)
    background.start(None, {}, 7)
    step = 0
    for count in batches:
        background.write([{"step": step + i} for i in range(count)])
        step += count
    background.finish({"a": 1})
    background.finish({})
    background.write([{"step": 99}])
    assert sink.calls == [("start", 7), *range(step), ("finish", {"a": 1})] and said == []


@pytest.mark.parametrize("held", ["start", "write", "finish"])
def test_one_that_hangs_holds_up_nothing(held):
    sink, said = Slow(held), []
    background = AsyncSink(
        sink, "W&B", finish_timeout=0.3, late_hint=lambda: "send the rest yourself", warn=said.append
    )
    started = time.monotonic()
    background.start(None, {}, 7)
    for step in range(100):
        background.write([{"step": step}])
    assert time.monotonic() - started < 0.2
    background.finish({"a": 1})
    assert 0.2 < time.monotonic() - started < 2
    assert said == ["W&B did not take everything within 0.3 s: send the rest yourself"]
    thread = next(thread for thread in threading.enumerate() if thread.name == "W&B")
    assert thread.daemon  # the process can end
    sink.gates[held].set()
    thread.join(5)
    assert len(said) == 1


def test_when_too_many_wait_the_oldest_are_dropped_and_that_is_said_once():
    sink, said = Slow("start"), []
    background = AsyncSink(sink, "it", max_waiting=10, warn=said.append)
    background.start(None, {}, 7)
    for first in range(0, 40, 4):
        background.write([{"step": first + i} for i in range(4)])
    sink.gates["start"].set()
    background.finish({})
    assert sink.calls == [("start", 7), *range(30, 40), ("finish", {})]
    assert len(said) == 1 and "does not get all lines" in said[0]


@pytest.mark.parametrize("failing", ["start", "write", "finish"])
def test_what_it_raises_is_said_once_without_secrets(failing, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    sink, said = Slow(), []

    def fail(*args):
        raise RuntimeError("no access for 0123456789012345678901234567890123456789\nand more")

    setattr(sink, failing, fail)
    background = AsyncSink(sink, "it", warn=said.append)
    background.start(None, {}, 7)
    for step in range(3):
        background.write([{"step": step}])
        time.sleep(0.01)
    background.finish({})
    assert said == ["it: no access for ***; no longer recording there"]
    assert not background.waiting or failing != "write"


def test_without_a_start_nothing_happens():
    background = AsyncSink(Slow(), "it", warn=pytest.fail)
    background.write([{"step": 1}])
    background.finish({})
    assert not background.waiting
