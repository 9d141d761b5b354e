"""What a call takes, measured: time, and memory at most."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def read_clock(device: torch.device) -> float:
    """Seconds on the clock once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_call(action: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the device's work included."""
    started = read_clock(device)
    action()
    return read_clock(device) - started


def measure_peak_memory(action: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes of tensors that a call takes at most besides those that exist before it.

    On a GPU by the allocator's own count, on a CPU by the profiler's record of what is taken and freed, which slows
    the call down.
    """
    gc.collect()  # what is freed in the call and was there before it would count against what it takes
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say on the terminal that it begins and ends
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    taken = most = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most
