"""What happens between steps: weights are measured, garbage is collected on all ranks at once, steps are profiled."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from muown_train.runs.metrics import Line

GARBAGE_EVERY = 100  # steps between two collections of garbage
MEMORY_EVENTS = 100_000  # allocations that a snapshot of a GPU's memory has at most

AfterStep = Callable[[int], None]


@dataclass(frozen=True)
class Measurement:
    """A measurement of the weights at some steps, which changes nothing.

    Args:
        key: a key of the line that `measure` returns; a line of metrics that has it needs no such measurement.
        every: steps between two of them; the last step has one too.
        measure: returns what is to stand in the line of the step; every rank calls it, and it may raise StopRequested.
        before_training: whether the weights before the first step are measured too.
    """

    key: str
    every: int
    measure: Callable[[], Line]
    before_training: bool = True


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


@contextmanager
def profile_steps(
    span: Sequence[int] | None, folder: Path, rank: int, device: torch.device, begun: int
) -> Iterator[list[AfterStep]]:
    """Yield what profiles some of the steps that are taken in this context; nothing where none of them is asked for.

    A trace goes to `profile/rank-RRRRR-steps-FIRST-LAST.json.gz` in the run's folder, for chrome://tracing or Perfetto;
    on a GPU a snapshot of its memory goes beside it (`.pickle`), for https://pytorch.org/memory_viz. If training ends
    before the last step to profile, or began after the first, they have the steps that were taken.

    Args:
        span: the first and the last step to profile, counted from 1.
        begun: steps that are done.
    """
    if span is None or begun >= span[1]:
        yield []
        return
    profiler = _StepProfiler(folder / "profile", rank, device, max(span[0], begun + 1), span[1])
    profiler.advance(begun)
    try:
        yield [profiler.advance]
    finally:
        profiler.finish()


class _StepProfiler:
    """The profile of the steps from `first` to `last`."""

    def __init__(self, folder: Path, rank: int, device: torch.device, first: int, last: int) -> None:
        self.folder, self.rank, self.device, self.first, self.last = folder, rank, device, first, last
        self.profile: profile | None = None
        self.step = 0  # the last step that is done

    def advance(self, step: int) -> None:
        """Begin the profile where the step after this one is the first, and write it where this one is the last."""
        self.step = step
        if step == self.first - 1:
            self._start()
        elif step == self.last:
            self.finish()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self.profile = profile(activities=activities, record_shapes=True)
        self.profile.start()

    def finish(self) -> None:
        """Write what was profiled, if anything was."""
        if self.profile is None:
            return
        self.profile.stop()
        path = self.folder / f"rank-{self.rank:05d}-steps-{self.first}-{self.step}"
        try:
            if self.step >= self.first:
                self.folder.mkdir(exist_ok=True)
                self.profile.export_chrome_trace(f"{path}.json.gz")
                if self.device.type == "cuda":
                    torch.cuda.memory._dump_snapshot(f"{path}.pickle")  # type: ignore[no-untyped-call]
                if self.rank == 0:
                    print(f"  profiled steps {self.first} to {self.step}: {path}.json.gz", flush=True)
        except OSError as error:  # a profile that cannot be written ends no run
            print(f"the profile of steps {self.first} to {self.step} is lost: {error}", file=sys.stderr, flush=True)
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        self.profile = None
