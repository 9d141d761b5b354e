"""Time one step of training, configurations side by side: `python scripts/benchmark_train.py [CONFIG …]`.

A CONFIG is one argument with settings as the command line takes them, such as "model=124m compile=true". All train on
random tokens, in turns, so that what disturbs the machine disturbs all of them. The table has tokens per second, the
median of each round's ratio to the first contender, how the time of a step is split, the most memory that a step takes
besides what there is between steps (weights, optimizer state and, with several ranks, gradients), and the part of the
machine's measured matrix rate that is reached. The split is measured on steps of their own, on GPUs with waits between
the parts.

With `--against torch` the first contender is a plain PyTorch loop with the sizes of the first CONFIG (plain_gpt.py), in
float32 and not compiled; with `--against torch-fast` it has bfloat16 autocast and torch.compile. Both may be given.
Under torchrun the configurations train on all ranks together: tokens are those of all ranks; the split is that of the
main rank, where the messages of a sharded optimizer count as rest. Ctrl-C ends the rounds and prints what there is.
"""

import argparse
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from plain_gpt import PlainGPT, make_plain_step
from torch import Tensor

from muown_train.cli.errors import CommandParser, parse_count, report_errors
from muown_train.cli.process import run_script
from muown_train.config.compose import load_config
from muown_train.config.overrides import check_overrides
from muown_train.data.loader import Loader
from muown_train.data.random_tokens import RandomRows
from muown_train.models.gpt import GPT
from muown_train.runtime.benchmark import measure_peak_memory, read_clock, time_call
from muown_train.runtime.distributed import World, join_world
from muown_train.runtime.hardware import get_device_name
from muown_train.training.build import build_run
from muown_train.training.run import Run

# width 256, 6 layers, vocabulary 4096, a step of one micro-batch of 16 x 256 tokens, as in docs/performance.md
DEFAULT = "model.dim=256 model.layers=6 seq_len=256 micro_batch=16 batch_tokens=4096"
SIZES = (512, 2048)  # rows and columns of the matrices whose product gives the rate of a slow machine, and of others
FIXED = ("data", "out", "name", "tracking")  # keys that may not be given
PARTS = ("data", "forward", "backward", "optimizer", "rest")


@dataclass
class Contender:
    """One way to train: `step` takes a step with these optimizers on rows of this loader."""

    step: Callable[[], Any]
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    tokens: int  # tokens of a step
    flops: float  # operations of a step on this rank
    autocast: bool
    device: torch.device


def build_contender(settings: list[str], out: str, world: World) -> tuple[Contender, Run]:
    """Return the trainer of a configuration, as the command line would make it, as a contender, and its run.

    Raises:
        SystemExit: a setting is wrong.
    """
    with report_errors(settings):
        check_overrides(settings)
        for word in settings:
            if word.lstrip("+").split("=")[0].split(".")[0] in FIXED:
                raise ValueError(f"{word} has no effect here: all configurations train on random tokens, in no folder")
        run = build_run(load_config([*settings, "data=random", f"out={out}", "name=run"]), world)
    trainer, tokens = run.trainer, run.config.batch_tokens
    flops = run.model.flops_per_token() * tokens / world.size
    autocast = trainer.settings.autocast
    return Contender(
        trainer.train_step, trainer.optimizer.optimizers, trainer.loader, tokens, flops, autocast, world.device
    ), run


def build_plain_contender(fast: bool, run: Run) -> Contender:
    """Return the plain loop with the sizes of a run as a contender."""
    gpt, config, device = run.model, run.config, run.trainer.world.device
    if not isinstance(gpt, GPT):
        raise ValueError(f"--against torch compares with GPT, not with {type(gpt).__name__}")
    block = gpt.blocks[0]
    sizes = (gpt.vocab_size, gpt.layers, gpt.dim, block.attention.heads, block.mlp.out.in_features, gpt.seq_len)
    model = PlainGPT(*sizes).to(device)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in gpt.parameters())
    rows = RandomRows(gpt.vocab_size, config.seq_len, config.seed)
    loader = Loader(rows, config.batch_tokens // config.seq_len)
    called = torch.compile(model) if fast else model
    step, optimizers = make_plain_step(called, lambda: next(loader).tokens, config.micro_batch, autocast=fast)
    return Contender(
        step, optimizers, loader, config.batch_tokens, gpt.flops_per_token() * config.batch_tokens, fast, device
    )


def time_parts(contender: Contender, steps: int) -> dict[str, float]:
    """Return the median seconds of each part of a step.

    Forward is everything from the data, or from the backward pass before, to the next backward pass. The rest is what
    lies between the last backward pass and the optimizer (clipping), and after the optimizer.
    """
    spent: dict[str, float] = defaultdict(float)
    last = 0.0

    def lap(part: str) -> None:
        nonlocal last
        now = read_clock(contender.device)
        spent[part] += now - last
        last = now

    def wrap(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            lap(before)
            result = function(*arguments, **keywords)
            lap(after)
            return result

        return call

    seconds = defaultdict(list)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Loader, "__next__", wrap(Loader.__next__, "data", "data")))
        stack.enter_context(patch.object(torch.Tensor, "backward", wrap(torch.Tensor.backward, "forward", "backward")))
        for optimizer in contender.optimizers:
            stack.enter_context(patch.object(optimizer, "step", wrap(optimizer.step, "rest", "optimizer")))
        for _ in range(steps):
            spent.clear()
            last = read_clock(contender.device)
            contender.step()
            lap("rest")
            for part in PARTS:
                seconds[part].append(spent[part])
    return {part: statistics.median(seconds[part]) for part in PARTS}


def make_product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that multiplies square matrices, at the rate of the machine's matrix units."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def choose_product_size(device: torch.device) -> int:
    """Return the size of the products: a CPU without bfloat16 units takes seconds for a large one."""
    small, large = SIZES
    multiply = make_product(small, torch.bfloat16, device)
    time_call(multiply, device)  # warms the caches
    return large if time_call(multiply, device) < 0.01 else small


def time_in_turns(
    contenders: dict[str, Contender], rounds: int, least: int = 1, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each contender's step in each round; two steps of each before do not count.

    Ctrl-C ends the rounds, and ends everything where fewer than `least` rounds are whole.

    Args:
        before: is called at the beginning of each round.
    """
    for name, contender in contenders.items():
        started = time.perf_counter()
        for _ in range(2):  # afterwards everything is compiled and the caches are warm
            contender.step()
        say(f"{name}: the first two steps took {time.perf_counter() - started:.1f} s")
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            before()
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seconds[name].append(time_call(contenders[name].step, contenders[name].device))
    except KeyboardInterrupt:
        whole = min(map(len, seconds.values()))
        if whole < least:
            raise
        say(f"interrupted: the table has {whole} round{'s' * (whole > 1)}")
        seconds = {name: times[:whole] for name, times in seconds.items()}
    return seconds


def measure(
    contenders: dict[str, Contender], rounds: int, size: int
) -> tuple[dict[str, list[float]], dict[bool, float]]:
    """Return the seconds of each round's steps, and the FLOP/s of products in bfloat16 (true) and float32 (false).

    Args:
        size: rows and columns of the matrices of the products.
    """
    device = next(iter(contenders.values())).device
    products = {True: make_product(size, torch.bfloat16, device), False: make_product(size, torch.float32, device)}
    rates: dict[bool, list[float]] = {low: [] for low in products}

    def measure_rates() -> None:
        for low, multiply in products.items():
            time_call(multiply, device)  # warms the caches
            rates[low].append(2 * size**3 / time_call(multiply, device))

    seconds = time_in_turns(contenders, rounds, before=measure_rates)
    return seconds, {low: statistics.median(measured) for low, measured in rates.items() if measured}


def format_table(contenders: dict[str, Contender], rounds: int) -> Iterator[str]:
    """Measure the contenders and yield the lines of the table as Markdown."""
    size = choose_product_size(next(iter(contenders.values())).device)
    seconds, rates = measure(contenders, rounds, size)
    if rounds:
        yield (
            f"products of {size} x {size} matrices: {rates[False] / 1e12:.2f} TFLOP/s in float32, "
            f"{rates[True] / 1e12:.2f} in bfloat16\n"
        )
    timed = ("tokens/s", "speed-up", "step, ms", *PARTS, "of matrix rate") if rounds else ()
    columns = ("", *timed, "peak memory, MiB")
    yield "| " + " | ".join(columns) + " |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    for name, contender in contenders.items():
        cells = [name]
        if rounds:
            cells += format_timings(contender, seconds[name], next(iter(seconds.values())), rates[contender.autocast])
        cells.append(f"{measure_peak_memory(contender.step, contender.device) / 2**20:,.0f}")
        yield "| " + " | ".join(cells) + " |"


def format_timings(contender: Contender, times: list[float], first: list[float], rate: float) -> list[str]:
    """Return the cells of a contender whose steps took `times`, in rounds in which those of the first took `first`."""
    step = statistics.median(times)
    faster = statistics.median(b / t for b, t in zip(first, times, strict=True))
    parts = time_parts(contender, max(1, len(times) // 2))
    cells = [f"{contender.tokens / step:,.0f}", f"{faster:.2f}", f"{step * 1e3:.1f}"]
    cells += [f"{parts[part] * 1e3:.1f}" for part in PARTS]
    return [*cells, f"{contender.flops / step / rate:.0%}"]


def say(sentence: str) -> None:
    """Print progress on standard error, beside the result; on the main rank."""
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr, flush=True)


def split_words(settings: str) -> list[str]:
    """Return the settings in one argument, as a shell would take them apart."""
    try:
        return shlex.split(settings)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{settings!r}: {error}") from None


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "configs", nargs="*", default=[[]], type=split_words, metavar="CONFIG", help="settings in one argument"
    )
    parser.add_argument(
        "--common", default=DEFAULT, type=split_words, help=f"settings of all, before their own (default {DEFAULT!r})"
    )
    parser.add_argument(
        "--against", action="append", choices=("torch", "torch-fast"), default=[], help="compare with a plain loop"
    )
    parser.add_argument(
        "--rounds", type=parse_count(0), default=11, help="steps of each (default 11); 0 measures memory alone"
    )
    parser.add_argument("--threads", type=parse_count(most=1024), help="number of threads (default all cores)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    devices = [word.removeprefix("device=") for word in arguments.common if word.startswith("device=")]
    with report_errors([]), join_world(device_name=(devices or ["auto"])[-1]) as world:
        if world.size > 1 and arguments.against:
            parser.error("--against is for one process: leave torchrun out")
        folder = world.run_on_main(tempfile.mkdtemp)
        try:
            compare(arguments, folder, world)
        finally:
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)


def compare(arguments: argparse.Namespace, folder: str, world: World) -> None:
    """Build and measure the contenders, and print the table on the main rank."""
    lines = [
        f"{get_device_name(world.device)}, {world.size} x {torch.get_num_threads()} threads, torch {torch.__version__}"
    ]
    runs: list[Run] = []
    contenders: dict[str, Contender] = {}
    try:
        for i, config in enumerate(arguments.configs):
            contender, run = build_contender([*arguments.common, *config], f"{folder}/{i}", world)
            if not runs:
                contenders |= {name: build_plain_contender(name == "torch-fast", run) for name in arguments.against}
            runs.append(run)
            name = " ".join(config) or "default"
            contenders[name if name not in contenders else f"{name} ({i + 1})"] = contender
        for line in chain(lines, format_table(contenders, arguments.rounds)):
            if world.is_main:
                print(line, flush=True)
    finally:
        for contender in contenders.values():
            contender.loader.close()
        for run in runs:
            run.close()


if __name__ == "__main__":
    run_script(main)
