"""Time whole updates of Muon and of Muown: `python scripts/benchmark_step_time.py [SETTING …]`, or under torchrun.

Both train the same model on random tokens, in turns, so that what disturbs the machine disturbs both; under torchrun
once with the optimizer replicated and once with its work and state distributed over the ranks (shard_optimizer).
Printed are the median and quartiles of an update's time on the main rank, the median of each round's ratio to Muon's,
and the memory of a rank: optimizer state, and what an update takes at most besides what there is between updates
(weights, state and, of several ranks, gradients).
SETTINGs are those of the command line, such as `model=500m`. Ctrl-C ends the rounds and prints what there is.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator

import torch
from benchmark_train import DEFAULT, Contender, in_turns, ours, words
from torch import Tensor

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.cli.process import run_script
from muown_train.runtime.benchmark import measure_peak_memory
from muown_train.runtime.distributed import World, join_world
from muown_train.runtime.hardware import get_device_name
from muown_train.training.run import Run

OPTIMIZERS = ("muon", "muown")
OURS = ("optim", "shard_optimizer")  # keys that are compared here


def contenders_of(settings: list[str], folder: str, here: World) -> tuple[dict[str, Contender], list[Run]]:
    """Muon and Muown with these settings, with several ranks replicated and distributed."""
    for setting in settings:
        if setting.lstrip("+").split("=")[0] in OURS:
            raise ValueError(f"{setting} has no effect here: it is what is compared")
    found: dict[str, Contender] = {}
    runs: list[Run] = []
    for where in ("replicated", "distributed") if here.size > 1 else ("one rank",):
        for optimizer in OPTIMIZERS:
            own = [f"optim={optimizer}", f"shard_optimizer={str(where == 'distributed').lower()}"]
            contender, run = ours([*settings, *own], f"{folder}/{len(runs)}", here)
            found[f"{optimizer}, {where}"] = contender
            runs.append(run)
    return found, runs


def state_bytes(contender: Contender) -> int:
    """What the optimizers of a contender keep on this rank."""
    states = [state for optimizer in contender.optimizers for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def table(contenders: dict[str, Contender], found: dict[str, list[float]]) -> Iterator[str]:
    """The measurement as Markdown."""
    yield "| | update, ms | quartiles, ms | ratio to Muon | state, MiB | peak memory, MiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, contender in contenders.items():
        times = [1e3 * t for t in found[name]]
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        of_muon = found[name.replace("muown", "muon")]
        ratio = statistics.median(t / b for t, b in zip(found[name], of_muon, strict=True))
        peak = measure_peak_memory(contender.step, contender.device) / 2**20
        yield (
            f"| {name} | {median:.1f} | {lower:.1f} to {upper:.1f} | {ratio:.3f} "
            f"| {state_bytes(contender) / 2**20:,.1f} | {peak:,.0f} |"
        )


def compare(settings: list[str], rounds: int, folder: str, here: World) -> None:
    contenders, runs = contenders_of(settings, folder, here)
    try:
        found = in_turns(contenders, rounds, least=2)  # quartiles of fewer are none
        count = min(map(len, found.values()))
        tokens = runs[0].config.batch_tokens
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        about = (
            f"{here.size} x {get_device_name(here.device)}, {torch.get_num_threads()} threads a rank, torch "
            f"{torch.__version__}; {parameters:,} parameters, {tokens:,} tokens an update, {count}"
            " rounds\n"
        )
        for line in (about, *table(contenders, found)):  # every rank makes the updates of the table
            if here.is_main:
                print(line, flush=True)
    finally:
        for run in runs:
            run.close()


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"by default {DEFAULT}")
    parser.add_argument("--rounds", type=int, default=21, help="updates of each (default 21)")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds} must be 2 or more")
    with report_errors(arguments.settings), join_world() as here:
        folder = here.run_on_main(tempfile.mkdtemp)
        try:
            compare(arguments.settings or words(DEFAULT), arguments.rounds, folder, here)
        finally:
            if here.is_main:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_script(main)
