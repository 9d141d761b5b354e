"""Diagnostics of saved checkpoints: `muown-train analyze spectral runs/NAME --all`.

    spectral           spectral norm, largest row norm and coherence of every matrix and q, k, v block
    effective_rank     normalised effective rank of minibatch gradients: of R for Muown, of W for others
    attention_logits   the largest attention logit of every layer
    copying            losses on random tokens that come twice, and early and late in rows of the validation text
    gradient_noise     noise terms of Muon and Muown, from two passes over training data; an interrupted
                       measurement continues when the same command is given again

The first four are what `probes=[…]` measures during a run. Results go to RUN/analysis/NAME.jsonl, one line for each
checkpoint and settings; a result that is already there is shown and not measured again. Gradients are taken on the
data that the run was to train on next, gradient noise on the first batches of the run. Under torchrun the ranks share
the work.
"""

import argparse
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.config.compose import CONFIG_DIR
from muown_train.runtime.formatting import escape_controls

if TYPE_CHECKING:
    from muown_train.runs.saved_run import SavedRun
    from muown_train.runtime.distributed import World

Option = tuple[str, int | None, str]  # name, default and meaning
# their options are the settings in configs/probes/
PROBES = ("spectral", "effective_rank", "attention_logits", "copying")
NOISE_OPTIONS: tuple[Option, ...] = (
    ("batches", None, "how many of the run's first batches to pass over, twice (default: as many as it has steps)"),
    ("save-every", 50, "batches between two saves of the sums so far (default 50)"),
)


def read_options(kind: str) -> tuple[Option, ...]:
    """Return the options of a measurement; those of a probe are read from its configuration and the comments there."""
    if kind not in PROBES:
        return NOISE_OPTIONS
    text = (CONFIG_DIR / "probes" / f"{kind}.yaml").read_text()
    settings = re.findall(r"^  ([a-z]+): *(\S+) *# *(.*)$", text, re.MULTILINE)
    return tuple(
        (name, None if default == "null" else int(default), f"{meaning} (default {default})")
        for name, default, meaning in settings
    )


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the arguments of the command line, or end the process with a sentence on a wrong one."""
    parser = CommandParser(__doc__)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind in (*PROBES, "gradient_noise"):
        own = kinds.add_parser(kind)
        own.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
        which = own.add_mutually_exclusive_group()
        which.add_argument("--steps", metavar="A,B,…", help="steps of the checkpoints (default the newest checkpoint)")
        which.add_argument("--all", action="store_true", help="measure all checkpoints of the run")
        own.add_argument(
            "--out", type=Path, metavar="DIR", help="write results to DIR/NAME_OF_RUN/ (default RUN/analysis)"
        )
        own.add_argument("--device", default="auto", help="cpu or cuda (default GPUs if there are some)")
        for name, default, meaning in read_options(kind):
            own.add_argument(f"--{name}", type=int, default=default, help=meaning)
    arguments = parser.parse_args(words)
    arguments.steps = parser.parse_steps(arguments.steps)
    for name in ("batches", "save_every"):
        value = vars(arguments).get(name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be 1 or more")
    return arguments


def analyze(arguments: argparse.Namespace, world: "World") -> None:
    """Measure each checkpoint that has no result yet, and print the results of all."""
    from muown_train.analysis.checkpoints import Results, check_results_folder, identify_checkpoint, open_checkpoints
    from muown_train.analysis.gradient_noise import discard_scratch

    checkpoints = [saved for run in arguments.runs for saved in open_checkpoints(run, arguments.steps, arguments.all)]
    for saved in checkpoints:
        folder = arguments.out / saved.folder.resolve().name if arguments.out else check_results_folder(saved.folder)
        results = Results(folder / f"{arguments.kind}.jsonl")
        settings = collect_settings(arguments, saved)
        key = {"step": saved.step, "checkpoint": identify_checkpoint(saved), **settings}
        line = world.run_on_main(partial(results.find, key))
        if line is None:
            with lock_results(folder, arguments.kind, world):
                line = world.run_on_main(partial(results.find, key))  # another process may have measured it meanwhile
                if line is None:
                    scratch = folder / f"{arguments.kind}-{saved.step:08d}"
                    line = {**key, **measure(arguments, saved, settings, scratch, world)}
                    world.run_on_main(partial(results.add, line))
                    world.run_on_main(partial(discard_scratch, scratch))
        if world.is_main:
            title = f"{saved.folder}, after step {saved.step:,}"
            numbers = {k: v for k, v in line.items() if k not in key and isinstance(v, float)}
            table = format_table(arguments.kind, numbers)
            print(escape_controls("\n".join([title, *table, f"{results.path}\n"])), flush=True)


@contextmanager
def lock_results(folder: Path, kind: str, world: "World") -> Iterator[None]:
    """Make a folder of results, and wait until no other process takes the same measurement there."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".{kind}.lock")

    def acquire() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{folder}: another process measures its {kind}, wait for it", file=sys.stderr, flush=True)
            lock.acquire()

    world.run_on_main(acquire)
    try:
        yield
    finally:
        lock.release()


def collect_settings(arguments: argparse.Namespace, saved: "SavedRun") -> dict[str, Any]:
    """Return what a result depends on besides the checkpoint."""
    names = [name for name, _, _ in read_options(arguments.kind) if name != "save-every"]
    settings = {name: vars(arguments)[name] for name in names}
    if "tokens" in settings:
        settings["tokens"] = settings["tokens"] or saved.config.batch_tokens
    if "batches" in settings and settings["batches"] is None:
        settings["batches"] = count_steps(saved)
    return settings


def count_steps(saved: "SavedRun") -> int:
    """Return the number of steps that the run's budget of tokens allows."""
    import torch

    from muown_train.models.language_model import build_model
    from muown_train.training.schedule import build_schedule

    with torch.device("meta"):
        model = build_model(saved.config.model, saved.config.seq_len)
    return build_schedule(saved.config, sum(p.numel() for p in model.parameters()))[0]


def measure(
    arguments: argparse.Namespace, saved: "SavedRun", settings: Mapping[str, Any], scratch: Path, world: "World"
) -> dict[str, float]:
    """Measure one checkpoint; a collective call.

    Args:
        scratch: see `GradientNoise`.
    """
    from muown_train.analysis import probes
    from muown_train.analysis.checkpoints import check_optimizer_state, identify_checkpoint, make_context
    from muown_train.analysis.gradient_noise import GradientNoise

    kind = arguments.kind
    if kind in ("effective_rank", "gradient_noise"):
        check_optimizer_state(saved.opened)
    context = make_context(saved, world)
    if kind == "gradient_noise":
        identity = identify_checkpoint(saved)
        noise = GradientNoise(context, settings["batches"], scratch, identity, arguments.save_every)
        return noise.measure(make_reporter(saved.step))
    classes: dict[str, Callable[..., Callable[[], dict[str, float]]]] = {
        "spectral": probes.Spectral,
        "effective_rank": probes.EffectiveRank,
        "attention_logits": probes.AttentionLogits,
        "copying": probes.Copying,
    }
    return classes[kind](context, **settings)()


def make_reporter(step: int) -> Callable[[str, int, int], None]:
    """Return a function that says on standard error how many batches are done and how long the rest of a pass takes."""
    from muown_train.runtime.formatting import format_duration

    starts: dict[str, tuple[float, int]] = {}

    def report(name: str, done: int, total: int) -> None:
        now = time.monotonic()
        started, before = starts.setdefault(name, (now, done))
        left = ""
        if done > before:
            left = f", {format_duration((now - started) / (done - before) * (total - done))} left"
        print(f"step {step:,}: {name}, {done:,} of {total:,} batches{left}", file=sys.stderr, flush=True)

    return report


def format_table(kind: str, numbers: Mapping[str, float]) -> list[str]:
    """Return a short table of a result, in which the matrices of one name in all layers share a row."""
    if kind == "attention_logits":
        return [f"  layer {layer:<3} {value:10.4f}" for layer, value in numbers.items()]
    if kind == "copying":
        return [f"  {name.replace('_', ' '):<20}{value:8.4f}" for name, value in numbers.items()]
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, value in numbers.items():
        name, _, quantity = key.partition("/")
        if "." in name:
            every_layer = ".".join("*" if part.isdigit() else part for part in name.split("."))
            rows[every_layer][quantity or "effective rank"].append(value)
    columns = [column for column in COLUMNS[kind] if any(column[0] in quantities for quantities in rows.values())]
    width = max(map(len, rows), default=0) + 2
    lines = ["  " + " " * width + "".join(f"{title:>16}" for _, title, _ in columns)]
    for name, quantities in rows.items():
        cells = (f"{take(quantities[key]):16.5g}" if key in quantities else " " * 16 for key, _, take in columns)
        lines.append(f"  {name:<{width}}" + "".join(cells))
    for which in ("lower_quartile", "median", "upper_quartile"):
        if f"{which}/muon" in numbers:
            cells = (
                f"{numbers[f'{which}/{key}']:16.5g}" if f"{which}/{key}" in numbers else "" for key, _, _ in columns
            )
            lines.append(f"  {which.replace('_', ' '):<{width}}" + "".join(cells))
    return lines


def find_largest(values: list[float]) -> float:
    """Return the largest value, or NaN if there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


COLUMNS: dict[str, Sequence[tuple[str, str, Callable[[list[float]], float]]]] = {
    "spectral": (
        ("spectral_norm", "largest norm", find_largest),
        ("max_row_norm", "largest row", find_largest),
        ("coherence", "median coher.", statistics.median),
        ("error", "largest error", find_largest),
    ),
    "effective_rank": (
        ("effective rank", "mean", statistics.fmean),
        ("effective rank", "least", min),
        ("effective rank", "largest", max),
    ),
    "gradient_noise": (
        ("muon", "Muon (median)", statistics.median),
        ("muown", "Muown (median)", statistics.median),
        ("muon/muown", "Muon / Muown", statistics.median),
    ),
}


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    arguments = parse_arguments(list(words))
    with report_errors([]):
        from muown_train.runtime.distributed import join_world

        with join_world(device_name=arguments.device) as world:
            analyze(arguments, world)
