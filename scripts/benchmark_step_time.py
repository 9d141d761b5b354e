"""Time whole steps of Muon and of Muown: `python scripts/benchmark_step_time.py [SETTING …]`, or under torchrun.

Both train the same model on random tokens, in turns, so that what disturbs the machine disturbs both. Under torchrun
they do so twice: with the optimizer replicated, and with its work and state distributed over the ranks
(shard_optimizer). The table has the median and quartiles of a step's time on the main rank, the median of each round's
ratio to Muon's, and the memory of a rank: optimizer state, and the most that a step takes besides what there is between
steps (weights, state and, with several ranks, gradients).

SETTINGs are those of the command line, such as `model=500m`. Ctrl-C ends the rounds and prints what there is.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator

import torch
from benchmark_train import DEFAULT, Contender, build_contender, split_words, time_in_turns
from torch import Tensor

from muown_train.cli.errors import CommandParser, parse_count, report_errors
from muown_train.cli.process import run_script
from muown_train.runtime.benchmark import measure_peak_memory
from muown_train.runtime.distributed import World, join_world
from muown_train.runtime.hardware import get_device_name
from muown_train.training.run import Run

OPTIMIZERS = ("muon", "muown")
COMPARED = ("optim", "shard_optimizer")  # keys that decide what is compared


def build_contenders(settings: list[str], folder: str, world: World) -> tuple[dict[str, Contender], list[Run]]:
    """Return Muon and Muown with these settings, with several ranks both replicated and distributed, and their runs."""
    for setting in settings:
        if setting.lstrip("+").split("=")[0] in COMPARED:
            raise ValueError(f"{setting} has no effect here: it is what is compared")
    contenders: dict[str, Contender] = {}
    runs: list[Run] = []
    for where in ("replicated", "distributed") if world.size > 1 else ("one rank",):
        for optimizer in OPTIMIZERS:
            own = [f"optim={optimizer}", f"shard_optimizer={'node' if where == 'distributed' else 'none'}"]
            contender, run = build_contender([*settings, *own], f"{folder}/{len(runs)}", world)
            contenders[f"{optimizer}, {where}"] = contender
            runs.append(run)
    return contenders, runs


def count_state_bytes(contender: Contender) -> int:
    """Return the bytes of optimizer state that a contender keeps on this rank."""
    states = [state for optimizer in contender.optimizers for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def format_table(contenders: dict[str, Contender], seconds: dict[str, list[float]]) -> Iterator[str]:
    """Yield the lines of the table as Markdown, and measure peak memory for it."""
    yield "| | step, ms | quartiles, ms | ratio to Muon | state, MiB | peak memory, MiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, contender in contenders.items():
        times = [1e3 * t for t in seconds[name]]
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        of_muon = seconds[name.replace("muown", "muon")]
        ratio = statistics.median(t / b for t, b in zip(seconds[name], of_muon, strict=True))
        peak = measure_peak_memory(contender.step, contender.device) / 2**20
        yield (
            f"| {name} | {median:.1f} | {lower:.1f} to {upper:.1f} | {ratio:.3f} "
            f"| {count_state_bytes(contender) / 2**20:,.1f} | {peak:,.0f} |"
        )


def compare(settings: list[str], rounds: int, folder: str, world: World) -> None:
    """Time the contenders in turns and print the table on the main rank."""
    contenders, runs = build_contenders(settings, folder, world)
    try:
        seconds = time_in_turns(contenders, rounds, least=2)  # fewer have no quartiles
        count = min(map(len, seconds.values()))
        tokens = runs[0].config.batch_tokens
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        heading = (
            f"{world.size} x {get_device_name(world.device)}, {torch.get_num_threads()} threads a rank, torch "
            f"{torch.__version__}; {parameters:,} parameters, {tokens:,} tokens a step, {count}"
            " rounds\n"
        )
        for line in (heading, *format_table(contenders, seconds)):  # every rank takes the steps of the table
            if world.is_main:
                print(line, flush=True)
    finally:
        for run in runs:
            run.close()


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"settings of both (default {DEFAULT})")
    parser.add_argument("--rounds", type=parse_count(2), default=21, help="steps of each (default 21)")
    arguments = parser.parse_args()
    devices = [word.removeprefix("device=") for word in arguments.settings if word.startswith("device=")]
    with report_errors(arguments.settings), join_world(device_name=(devices or ["auto"])[-1]) as world:
        folder = world.run_on_main(tempfile.mkdtemp)
        try:
            compare(arguments.settings or split_words(DEFAULT), arguments.rounds, folder, world)
        finally:
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_script(main)
