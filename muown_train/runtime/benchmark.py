"""Measure the time and the peak memory of a call."""

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from muown_train.runtime.hardware import find_device


def parse_device(word: str) -> str:
    """Return the name of a device that this machine has, cpu or cuda for auto; a `type` for argparse."""
    try:
        device = find_device(word)
    except (ValueError, ConnectionError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return device.type if word in ("auto", "cuda") else word


def read_clock(device: torch.device) -> float:
    """Return the clock's seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_call(action: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, including the device's work."""
    started = read_clock(device)
    action()
    return read_clock(device) - started


def measure_peak_memory(action: Callable[[], Any], device: torch.device | str) -> int:
    """Return the most bytes of tensors that a call holds at once, besides the tensors that exist before it.

    On a GPU the allocator counts them. On a CPU the profiler records what is allocated and freed, which slows the call
    down.
    """
    gc.collect()  # garbage from before, if freed during the call, would be subtracted from the call's own tensors
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from announcing its begin and end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    allocated = peak = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
