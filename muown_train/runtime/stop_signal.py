"""Planned stops: after a signal, or a time limit, all ranks stop after the same step.

A signal sets a flag on the rank that it reaches. The flags are reduced once a step, and no rank waits for it: call k of
`should_stop` starts the reduction of one number on the host, and call k + 1 reads the result. So every rank learns of
the stop at the same call, one step after the flag was set.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muown_train.runtime.distributed import World

# sent by SLURM's preemption, by Ctrl-C, as SLURM's early warning, and by a terminal that closes
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopRequested(Exception):
    """Ends work that is done again later, such as an evaluation, on every rank at the same place."""


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Make SIGTERM and SIGUSR1 raise StopRequested inside the context, in work of one process that may be left out."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number).name)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopSignal:
    """A context in which a signal on one rank makes all ranks stop; making it is a collective call.

    Inside the context SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for a stop, and a line on stderr says so at once. A
    second SIGINT raises KeyboardInterrupt. Only the main thread can enter the context, since only it handles signals.

    Args:
        time_limit: seconds from now after which a stop is asked for without a signal.
    """

    def __init__(self, world: World, time_limit: float | None = None) -> None:
        self.world, self.time_limit = world, time_limit
        self.began = time.monotonic()
        self.requested: str | None = None  # the reason for which this rank asks for a stop
        self._interrupted = False
        self._decided: str | None = None
        self._pending: tuple[dist.Work, Tensor] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        # gloo reduces on the host, so that the answer never waits for a GPU
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None

    def __enter__(self) -> "StopSignal":
        self._previous_handlers = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # ignored under nohup
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if error is None:  # after an error the other ranks may never make their call
            self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT":
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self.requested is None and self._decided is None:
            rank = f"[rank {self.world.rank}] " if self.world.size > 1 else ""
            again = "; once more stops at once" if self._interrupted else ""
            # os.write, since the signal may have interrupted a print(), which must not be entered twice
            os.write(2, f"{rank}{name}: stopping after this step and saving{again}\n".encode())
        self.request(name)

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason counts."""
        self.requested = self.requested or reason

    def should_stop(self) -> str | None:
        """Return the reason to stop now, or None; every rank calls this after each step.

        The answer of a call is the same on every rank.
        """
        if self._decided:
            return self._decided
        if self.time_limit is not None and time.monotonic() - self.began >= self.time_limit:
            self.request("time limit")
        if self._group is None:
            self._decided = self.requested
            return self._decided
        asking = self._finish_reduction()
        if asking:
            reason = [self.requested]
            dist.broadcast_object_list(reason, src=asking - 1, group=self._group)
            self._decided = reason[0]
            return self._decided
        flag = torch.tensor(self.world.rank + 1 if self.requested else 0)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = work, flag
        return None

    @property
    def decided(self) -> str | None:
        """The reason for which all ranks stop, once they know of it."""
        return self._decided

    def check(self) -> None:
        """Raise StopRequested if it is time to stop; every rank calls this at the same places of long work."""
        if self.should_stop():
            raise StopRequested

    def _finish_reduction(self) -> int:
        """Return the result of the last call's reduction: 1 + the highest rank that asks for a stop, or 0."""
        if self._pending is None:
            return 0
        work, flag = self._pending
        self._pending = None
        work.wait()
        return int(flag)

    def close(self) -> None:
        """Wait for the reduction under way; all ranks must have called `should_stop` equally often.

        Further calls do nothing.
        """
        self._finish_reduction()
