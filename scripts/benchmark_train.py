"""Time one update of training, configurations side by side: `python scripts/benchmark_train.py [CONFIG …]`.

A CONFIG is one argument of settings as the command line takes them, such as "model=124m compile=true". All train on
random tokens, in turns, so that what disturbs the machine disturbs all of them. Printed are tokens per second, the
median of each round's ratio to the first contender, how the time of an update is split, the memory that an update
takes at most besides what there is between updates (weights, optimizer state and, of several ranks, gradients), and
which part of the machine's measured matrix rate is reached. The split is measured on updates of their own, on GPUs with
waits between the parts.

With `--against torch` the first contender is a plain PyTorch loop of the sizes of the first CONFIG (plain_gpt.py), in
float32 and not compiled; `--against torch-fast` the same with bfloat16 autocast and torch.compile. Both may be given.
Under torchrun the configurations train on all ranks together; tokens are those of all, the split is that of the main
one, where what a sharded optimizer sends counts as rest. Ctrl-C ends the rounds and prints what there is.
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
from plain_gpt import PlainGPT, plain_step
from torch import Tensor

from muown_train.cli.errors import CommandParser, report_errors
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

# of the targets: width 256, 6 layers, vocabulary 4096, an update of one micro-batch of 16 x 256 tokens
DEFAULT = "model.dim=256 model.layers=6 seq_len=256 micro_batch=16 batch_tokens=4096"
SIZE = 2048  # of the matrices whose product gives the machine's rate
FIXED = ("data", "out", "name", "tracking")  # keys that cannot be given
PARTS = ("data", "forward", "backward", "optimizer", "rest")


@dataclass
class Contender:
    """One way to train: `step` makes an update with these optimizers on rows of this loader."""

    step: Callable[[], Any]
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    tokens: int  # of an update
    flops: float  # of an update, on this rank
    autocast: bool
    device: torch.device


def ours(settings: list[str], out: str, here: World) -> tuple[Contender, Run]:
    """The trainer of a configuration, as the command line would make it.

    Raises:
        ValueError: a setting that cannot be.
    """
    with report_errors(settings):
        check_overrides(settings)
        for word in settings:
            if word.lstrip("+").split("=")[0].split(".")[0] in FIXED:
                raise ValueError(f"{word} has no effect here: all configurations train on random tokens, in no folder")
        run = build_run(load_config([*settings, "data=random", f"out={out}", "name=run"]), here)
    trainer, tokens = run.trainer, run.config.batch_tokens
    flops = run.model.flops_per_token() * tokens / here.size
    autocast = trainer.settings.autocast
    return Contender(
        trainer.train_step, trainer.optimizer.optimizers, trainer.loader, tokens, flops, autocast, here.device
    ), run


def plain(fast: bool, run: Run) -> Contender:
    """The plain loop with the sizes of a run."""
    gpt, top, device = run.model, run.config, run.trainer.world.device
    if not isinstance(gpt, GPT):
        raise ValueError(f"--against torch compares with GPT, not with {type(gpt).__name__}")
    block = gpt.blocks[0]
    sizes = (gpt.vocab_size, gpt.layers, gpt.dim, block.attention.heads, block.mlp.out.in_features, gpt.seq_len)
    model = PlainGPT(*sizes).to(device)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in gpt.parameters())
    rows = RandomRows(gpt.vocab_size, top.seq_len, top.seed)
    loader = Loader(rows, top.batch_tokens // top.seq_len)
    called = torch.compile(model) if fast else model
    step, optimizers = plain_step(called, lambda: next(loader).tokens, top.micro_batch, autocast=fast)
    return Contender(step, optimizers, loader, top.batch_tokens, gpt.flops_per_token() * top.batch_tokens, fast, device)


def split(contender: Contender, updates: int) -> dict[str, float]:
    """Median seconds of each part of an update.

    Forward is all from the data, or the backward pass before, to the backward pass; what lies between the last
    backward pass and the optimizer (clipping) and after the optimizer is the rest.
    """
    spent: dict[str, float] = defaultdict(float)
    last = 0.0

    def lap(part: str) -> None:
        nonlocal last
        here = read_clock(contender.device)
        spent[part] += here - last
        last = here

    def lapped(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            lap(before)
            result = function(*arguments, **keywords)
            lap(after)
            return result

        return call

    found = defaultdict(list)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Loader, "__next__", lapped(Loader.__next__, "data", "data")))
        stack.enter_context(
            patch.object(torch.Tensor, "backward", lapped(torch.Tensor.backward, "forward", "backward"))
        )
        for optimizer in contender.optimizers:
            stack.enter_context(patch.object(optimizer, "step", lapped(optimizer.step, "rest", "optimizer")))
        for _ in range(updates):
            spent.clear()
            last = read_clock(contender.device)
            contender.step()
            lap("rest")
            for part in PARTS:
                found[part].append(spent[part])
    return {part: statistics.median(found[part]) for part in PARTS}


def product(dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A product of square matrices, whose rate is that of the machine's matrix units."""
    a, b = (torch.randn(SIZE, SIZE, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def in_turns(
    contenders: dict[str, Contender], rounds: int, least: int = 1, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each round's update of each, after two that do not count; `before` begins a round.

    Ctrl-C ends the rounds, or all where fewer than `least` are whole.
    """
    for name, contender in contenders.items():
        started = time.perf_counter()
        for _ in range(2):  # compiled, and the caches warm
            contender.step()
        say(f"{name}: the first two updates took {time.perf_counter() - started:.1f} s")
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            before()
            for name in names[i % len(names) :] + names[: i % len(names)]:
                found[name].append(time_call(contenders[name].step, contenders[name].device))
    except KeyboardInterrupt:
        whole = min(map(len, found.values()))
        if whole < least:
            raise
        say(f"interrupted: the table is of {whole} round{'s' * (whole > 1)}")
        found = {name: times[:whole] for name, times in found.items()}
    return found


def measure(contenders: dict[str, Contender], rounds: int) -> tuple[dict[str, list[float]], dict[bool, float]]:
    """Seconds of each round's update, in turns, and FLOP/s of products in float32 and (true) bfloat16 between them."""
    device = next(iter(contenders.values())).device
    products = {True: product(torch.bfloat16, device), False: product(torch.float32, device)}
    rates: dict[bool, list[float]] = {low: [] for low in products}

    def multiplied() -> None:
        for low, multiply in products.items():
            time_call(multiply, device)  # the caches warm
            rates[low].append(2 * SIZE**3 / time_call(multiply, device))

    found = in_turns(contenders, rounds, before=multiplied)
    return found, {low: statistics.median(measured) for low, measured in rates.items() if measured}


def table(contenders: dict[str, Contender], rounds: int) -> Iterator[str]:
    """The measurement as Markdown."""
    found, rates = measure(contenders, rounds)
    if rounds:
        yield (
            f"products of {SIZE} x {SIZE} matrices: {rates[False] / 1e12:.2f} TFLOP/s in float32, "
            f"{rates[True] / 1e12:.2f} in bfloat16\n"
        )
    timed = ("tokens/s", "speed-up", "update, ms", *PARTS, "of matrix rate") if rounds else ()
    columns = ("", *timed, "peak memory, MiB")
    yield "| " + " | ".join(columns) + " |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    for name, contender in contenders.items():
        cells = [name]
        if rounds:
            cells += timings(contender, found[name], next(iter(found.values())), rates[contender.autocast])
        cells.append(f"{measure_peak_memory(contender.step, contender.device) / 2**20:,.0f}")
        yield "| " + " | ".join(cells) + " |"


def timings(contender: Contender, times: list[float], first: list[float], rate: float) -> list[str]:
    """The cells of a contender whose updates took `times`, in the rounds in which those of the first took `first`."""
    update = statistics.median(times)
    faster = statistics.median(b / t for b, t in zip(first, times, strict=True))
    parts = split(contender, max(1, len(times) // 2))
    cells = [f"{contender.tokens / update:,.0f}", f"{faster:.2f}", f"{update * 1e3:.1f}"]
    cells += [f"{parts[part] * 1e3:.1f}" for part in PARTS]
    return [*cells, f"{contender.flops / update / rate:.0%}"]


def say(sentence: str) -> None:
    """Progress, beside the result."""
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr, flush=True)


def words(settings: str) -> list[str]:
    """The settings of one argument, as a shell would take them apart."""
    try:
        return shlex.split(settings)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{settings!r}: {error}") from None


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "configs", nargs="*", default=[[]], type=words, metavar="CONFIG", help="settings in one argument"
    )
    parser.add_argument(
        "--common", default=DEFAULT, type=words, help=f"settings of all, before their own; by default {DEFAULT!r}"
    )
    parser.add_argument("--against", action="append", choices=("torch", "torch-fast"), default=[], help="a plain loop")
    parser.add_argument("--rounds", type=int, default=11, help="updates of each (default 11); 0: only memory")
    parser.add_argument("--threads", type=int, help="by default all cores")
    arguments = parser.parse_args()
    if arguments.rounds < 0:
        parser.error(f"--rounds {arguments.rounds} must be 0 or more")
    if arguments.threads is not None:
        if arguments.threads < 1:
            parser.error(f"--threads {arguments.threads} must be 1 or more")
        torch.set_num_threads(arguments.threads)
    with join_world() as here:
        if here.size > 1 and arguments.against:
            parser.error("--against is for one process: leave torchrun out")
        folder = here.run_on_main(tempfile.mkdtemp)
        try:
            compare(arguments, folder, here)
        finally:
            if here.is_main:
                shutil.rmtree(folder, ignore_errors=True)


def compare(arguments: argparse.Namespace, folder: str, here: World) -> None:
    """Measure, and print the table on the main rank."""
    lines = [
        f"{get_device_name(here.device)}, {here.size} x {torch.get_num_threads()} threads, torch {torch.__version__}"
    ]
    runs: list[Run] = []
    contenders: dict[str, Contender] = {}
    try:
        for i, config in enumerate(arguments.configs):
            contender, run = ours([*arguments.common, *config], f"{folder}/{i}", here)
            if not runs:
                contenders |= {name: plain(name == "torch-fast", run) for name in arguments.against}
            runs.append(run)
            name = " ".join(config) or "default"
            contenders[name if name not in contenders else f"{name} ({i + 1})"] = contender
        for line in chain(lines, table(contenders, arguments.rounds)):
            if here.is_main:
                print(line, flush=True)
    finally:
        for contender in contenders.values():
            contender.loader.close()
        for run in runs:
            run.close()


if __name__ == "__main__":
    run_script(main)
