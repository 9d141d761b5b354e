"""What the parts `train` and `compare` of check_gpu.py measure, with the functions of benchmark_train.py."""

import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count, product
from pathlib import Path

import torch
from benchmark_train import PARTS as STEP_PARTS
from benchmark_train import Contender, build_contender, build_plain_contender, time_in_turns, time_parts
from gpu_limits import TINY_WORDS, Limits, Model, Row
from torch.profiler import ProfilerActivity, profile

from muown_train.config.compose import load_config
from muown_train.runs.metrics import Metrics
from muown_train.runtime.benchmark import measure_peak_memory, time_call
from muown_train.runtime.distributed import World
from muown_train.runtime.hardware import get_peak_flops
from muown_train.training.build import build_run
from muown_train.training.plan import make_plan


def measure_training(limits: Limits) -> Iterator[Row]:
    """Measure the training of each model beside the plain loop; Muon is a third contender, in the same trainer."""
    for name, model in limits.models.items():
        if limits.left < 60 and not limits.dry_run:  # compiling alone takes that long
            yield {"table": "left out for lack of time", "model": name}
            continue
        with tempfile.TemporaryDirectory() as folder:
            world = World(0, 1, limits.device)
            build = partial(build_contender, world=world)
            contender, run = build(list(model.words), out=f"{folder}/muown")
            others = [build([*model.words, "optim=muon"], out=f"{folder}/muon")]
            contenders = {"plain loop, torch.optim.Muon": build_plain_contender(True, run), "Muown": contender}
            contenders["Muon"] = others[0][0]
            try:
                yield from describe_training(name, contenders, limits)
                yield compare_with_plan(name, model, contender, limits)
                yield from list_kernels(name, contender, limits)
            finally:
                for each in contenders.values():
                    each.loader.close()
                for each_run in (run, others[0][1]):
                    each_run.close()


def describe_training(name: str, contenders: dict[str, Contender], limits: Limits) -> Iterator[Row]:
    """Time the contenders in turns, and yield a row for each."""
    seconds = time_in_turns(contenders, 2 if limits.dry_run else 5)
    first, peak = next(iter(seconds.values())), get_peak_flops(limits.device)
    for contender_name, times in seconds.items():
        contender, step = contenders[contender_name], statistics.median(times)
        parts = time_parts(contender, 1 if limits.dry_run else 2)
        yield {
            "table": f"training step of {name}",
            "": contender_name,
            "tokens/s": contender.tokens / step,
            "speed-up": statistics.median(b / t for b, t in zip(first, times, strict=True)),
            "MFU": contender.flops / step / peak if peak else None,
            "step, ms": step * 1e3,
            "range, ms": f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}",
            **{f"{part}, ms": parts[part] * 1e3 for part in STEP_PARTS},
            "peak memory of a step, GiB": measure_peak_memory(contender.step, contender.device) / 2**30,
        }


def compare_with_plan(name: str, model: Model, contender: Contender, limits: Limits) -> Row:
    """Return what a step takes and what `muown-train plan` estimates for it on an H200."""
    plan = make_plan([*model.words, "data=random", "tokens=1e9"], "H200", 1)
    extra = measure_peak_memory(contender.step, contender.device)
    seconds = statistics.median(time_call(contender.step, contender.device) for _ in range(3))
    state = [t for optimizer in contender.optimizers for s in optimizer.state.values() for t in s.values()]
    return {
        "table": "beside the plan",
        "": name,
        "step, s": seconds,
        "estimated": plan.estimate_seconds(None),
        "peak memory, GiB": (extra + plan.memory.weights + sum(t.nbytes for t in state)) / 2**30,
        "estimated memory": plan.memory.peak / 2**30,
        "reserved by the allocator": torch.cuda.max_memory_reserved() / 2**30 if limits.device.type == "cuda" else None,
    }


def list_kernels(name: str, contender: Contender, limits: Limits, most: int = 10) -> Iterator[Row]:
    """Yield the kernels that take most of a step."""
    if limits.device.type != "cuda":
        return
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        contender.step()
        torch.cuda.synchronize()
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            microseconds[event.name] += event.device_time_total
            calls[event.name] += 1
    total = sum(microseconds.values())
    for kernel, time_taken in microseconds.most_common(most):
        share = time_taken / total
        row = {"table": f"kernels of a step of {name}", "kernel": kernel[:70].replace("|", "/")}
        yield {**row, "ms": time_taken / 1e3, "share": share, "calls": calls[kernel]}


WIDTH_256 = (
    "model.layers=6 model.dim=256 model.heads=4 seq_len=256 micro_batch=64 batch_tokens=16384 tokens=9_961_472 "
    "valid_tokens=250_000"
)
RATES = (2**-7, 2**-8, 2**-6)  # learning rates, in the order in which they are tried


def compare_optimizers(limits: Limits) -> Iterator[Row]:
    """Train width-256 models with each optimizer, three at a time, until the time is up; yield their losses."""
    if limits.data is None:
        data = ["data=stdlib"]
    elif Path(limits.data).is_dir():
        data = ["data=shards", f"data.path={limits.data}"]
    else:
        data = ["data=files", f"data.train={limits.data}"]
    sizes = f"{TINY_WORDS} model.vocab_size=4096 tokens=256 valid_tokens=64" if limits.dry_run else WIDTH_256
    settings = [*data, *sizes.split(), "eval_every=1000000", "save_every=1000000", "log_every=50", "precision=bfloat16"]
    runs = ((optim, rate, seed) for seed in count() for rate, optim in product(RATES, ("muown", "muon", "adamw")))
    if limits.dry_run:
        yield from (train_one(settings, limits.device.type, *next(runs)) for _ in range(3))
        return
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        longest = 0.0
        while limits.left > 1.3 * longest:
            started = time.monotonic()
            yield from pool.starmap(partial(train_one, settings, limits.device.type), [next(runs) for _ in range(3)])
            longest = max(longest, time.monotonic() - started)


def train_one(settings: list[str], device: str, optim: str, rate: float, seed: int) -> Row:
    """Train one model and return its validation loss."""
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [*settings, f"optim={optim}", f"optim.lr={rate}", f"seed={seed}", f"out={folder}", "name=run"]
        run = build_run(load_config(words), World(0, 1, torch.device(device)))
        run.resume()
        outcome = run.train()
        run.close()
        lines = Metrics(run.folder).read()
    losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
    row = {"table": "models of width 256", "": optim, "lr": rate, "seed": seed, "ended": outcome.state}
    speed = "system/tokens_per_second"
    tokens_per_second = statistics.median(line[speed] for line in lines if speed in line)
    return {**row, "steps": lines[-1]["step"], "valid/loss": losses[-1], "tokens/s": tokens_per_second} | {
        "seconds": time.monotonic() - started
    }
