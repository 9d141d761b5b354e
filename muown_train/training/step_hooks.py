"""What happens between steps: garbage is collected at the same step on all ranks, and steps are profiled."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

GARBAGE_EVERY = 100  # steps between two collections of garbage
MEMORY_EVENTS = 100_000  # allocations that a snapshot of a GPU's memory has at most

AfterStep = Callable[[int], None]


@contextmanager
def collect_garbage_together(ranks: int) -> Iterator[list[AfterStep]]:
    """Yield what collects garbage after every GARBAGE_EVERY-th step; Python's own collections are off meanwhile.

    Those come at another step on each rank, and at each of them the other ranks wait. A single rank keeps them, and
    gets nothing to call.
    """
    if ranks == 1 or not gc.isenabled():
        yield []
        return

    def collect(step: int) -> None:
        if step % GARBAGE_EVERY == 0:
            gc.collect()

    gc.disable()
    try:
        yield [collect]
    finally:
        gc.enable()


class StepProfiler:
    """Profiles some steps, after the step before the first of them, and writes what it saw after the last.

    A trace goes to `profile/rank-RRRRR-steps-FIRST-LAST.json.gz` in the run's folder, for chrome://tracing or Perfetto;
    on a GPU a snapshot of its memory goes beside it (`.pickle`), for https://pytorch.org/memory_viz.

    Args:
        first, last: the first and the last step to profile, counted from 1.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device, first: int, last: int) -> None:
        self.path = folder / "profile" / f"rank-{rank:05d}-steps-{first}-{last}.json.gz"
        self.rank, self.device, self.first, self.last = rank, device, first, last
        self.profile: profile | None = None

    def __call__(self, step: int) -> None:
        """Begin the profile if the next step is one of those to profile, and write it after the last of them."""
        if self.profile is None and self.first - 1 <= step < self.last:
            self._start()
        elif self.profile is not None and step >= self.last:
            self._finish()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self.profile = profile(activities=activities, record_shapes=True)
        self.profile.start()

    def _finish(self) -> None:
        assert self.profile is not None
        self.profile.stop()
        try:
            self.path.parent.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))
            if self.device.type == "cuda":
                snapshot = str(self.path.with_suffix("").with_suffix(".pickle"))
                torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:  # a profile that cannot be written ends no run
            print(f"the profile of steps {self.first} to {self.last} is lost: {error}", file=sys.stderr, flush=True)
        else:
            if self.rank == 0:
                print(f"  profiled steps {self.first} to {self.last}: {self.path}", flush=True)
        self.profile = None
