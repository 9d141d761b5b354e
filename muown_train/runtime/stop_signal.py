"""A planned stop: signals and a time limit lead every rank to stop after the same update.

A signal sets a flag of the rank that it reached. The flags are reduced once an update, without anybody waiting: the
reduction that call k of `should_stop` starts, of one number on the host, is read by call k + 1. So every rank learns of
the stop at the same call, one update after the flag was set.
"""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muown_train.runtime.distributed import World

# SLURM's preemption, Ctrl-C, SLURM's early warning, a terminal that is closed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """Asks all ranks to stop; made by every rank, as it makes a process group, and used as a context.

    Inside the context SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for a stop, of which one line on stderr tells at once;
    a second SIGINT raises KeyboardInterrupt. Signals can only be handled where the main thread enters it.

    Args:
        time_limit: seconds from now after which it asks by itself.
    """

    def __init__(self, world: World, time_limit: float | None = None) -> None:
        self.world, self.time_limit = world, time_limit
        self.began = time.monotonic()
        self.wanted: str | None = None  # by this rank
        self._interrupted = False
        self._decided: str | None = None
        self._pending: tuple[dist.Work, Tensor] | None = None
        self._before: dict[signal.Signals, Any] = {}
        # on the host, whatever the ranks compute on: the answer never waits for a device
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None

    def __enter__(self) -> "StopSignal":
        self._before = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # as under nohup
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:  # after an error the other ranks may never come to theirs
            self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT":
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self.wanted is None and self._decided is None:
            rank = f"[rank {self.world.rank}] " if self.world.size > 1 else ""
            again = "; once more stops at once" if self._interrupted else ""
            # print() may be what the signal interrupted, and is not to be entered twice
            os.write(2, f"{rank}{name}: stopping after this update and saving{again}\n".encode())
        self.request(name)

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason counts."""
        self.wanted = self.wanted or reason

    def should_stop(self) -> str | None:
        """Whether to stop now; each rank calls it after each update.

        Returns:
            The reason, the same on every rank and at the same call; None as long as nobody asked.
        """
        if self._decided:
            return self._decided
        if self.time_limit is not None and time.monotonic() - self.began >= self.time_limit:
            self.request("time limit")
        if self._group is None:
            self._decided = self.wanted
            return self._decided
        asking = self._reduced()
        if asking:
            reason = [self.wanted]
            dist.broadcast_object_list(reason, src=asking - 1, group=self._group)
            self._decided = reason[0]
            return self._decided
        flag = torch.tensor(self.world.rank + 1 if self.wanted else 0)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = work, flag
        return None

    def _reduced(self) -> int:
        """What the last call's reduction says: 1 + the highest rank that asks for a stop, or 0."""
        if self._pending is None:
            return 0
        work, flag = self._pending
        self._pending = None
        work.wait()
        return int(flag)

    def close(self) -> None:
        """Wait for what is under way; all ranks have called `should_stop` equally often. Any number of times."""
        self._reduced()
