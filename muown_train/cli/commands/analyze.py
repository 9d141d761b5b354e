"""Diagnostics of saved checkpoints: `python scripts/analyze.py spectral runs/NAME --all`.

    spectral           spectral norm, largest row norm and coherence of every matrix and q, k, v block
    effective_rank     normalised effective rank of minibatch gradients: of R for Muown, of W for others
    attention_logits   the largest attention logit of every layer
    gradient_noise     noise terms of Muon and Muown, from two passes over training data; what was cut off goes on

The first three are what `probes=[…]` measures in a run. Results go to RUN/analysis/NAME.jsonl, a line for each
checkpoint and settings; what is there is not measured again. Gradients are of the data that the run was to train on
next, noise of its first batches. Under torchrun the work is shared.
"""

import argparse
import math
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

if TYPE_CHECKING:
    from muown_train.runs.saved_run import SavedRun
    from muown_train.runtime.distributed import World

# of each: name, type, default, what it is
OPTIONS: dict[str, tuple[tuple[str, int | None, str], ...]] = {
    "spectral": (
        ("iterations", None, "of power iteration, which also gives its error (default: exact)"),
        ("quantiles", 0, "so many of the singular values, from the smallest to the largest (default 0)"),
    ),
    "effective_rank": (
        ("gradients", 8, "to take the mean over (default 8)"),
        ("tokens", None, "of a gradient (default the run's batch_tokens)"),
    ),
    "attention_logits": (("rows", 8, "to look at, over all ranks (default 8)"),),
    "gradient_noise": (
        ("batches", None, "first batches of the run to pass over, twice (default: all of its updates)"),
        ("save-every", 50, "batches between two saves of what was summed up (default 50)"),
    ),
}


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, options in OPTIONS.items():
        own = kinds.add_parser(kind)
        own.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
        which = own.add_mutually_exclusive_group()
        which.add_argument("--steps", metavar="A,B,…", help="of the checkpoints (default the newest)")
        which.add_argument("--all", action="store_true", help="all checkpoints there are")
        own.add_argument(
            "--out", type=Path, metavar="DIR", help="results go to DIR/NAME of the run/ (default RUN/analysis)"
        )
        for name, default, meaning in options:
            own.add_argument(f"--{name}", type=int, default=default, help=meaning)
    arguments = parser.parse_args(words)
    arguments.steps = parser.parse_steps(arguments.steps)
    for name in ("batches", "save_every"):
        if getattr(arguments, name, None) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 or more")
    return arguments


def analyze(arguments: argparse.Namespace, here: "World") -> None:
    from muown_train.analysis.checkpoints import FOLDER, Results, chosen, identity
    from muown_train.analysis.gradient_noise import discard

    found = [saved for run in arguments.runs for saved in chosen(run, arguments.steps, arguments.all)]
    for saved in found:
        folder = arguments.out / saved.folder.resolve().name if arguments.out else saved.folder / FOLDER
        results = Results(folder / f"{arguments.kind}.jsonl")
        settings = settings_of(arguments, saved)
        about = {"step": saved.step, "checkpoint": identity(saved), **settings}
        line = here.run_on_main(partial(results.find, about))
        if line is None:
            with alone(folder, arguments.kind, here):
                line = here.run_on_main(partial(results.find, about))  # what was waited for
                if line is None:
                    scratch = folder / f"{arguments.kind}-{saved.step:08d}"
                    line = {**about, **measured(arguments, saved, settings, scratch, here)}
                    here.run_on_main(partial(results.add, line))
                    here.run_on_main(partial(discard, scratch))
        if here.is_main:
            title = f"{saved.folder}, after update {saved.step:,}"
            print("\n".join([title, *table(arguments.kind, {k: v for k, v in line.items() if k not in about})]))
            print(f"{results.path}\n", flush=True)


@contextmanager
def alone(folder: Path, kind: str, here: "World") -> Iterator[None]:
    """Make a folder of results, and wait until no other process measures the same there."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".{kind}.lock")

    def take() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{folder}: another process measures its {kind}, wait for it", file=sys.stderr, flush=True)
            lock.acquire()

    here.run_on_main(take)
    try:
        yield
    finally:
        lock.release()


def settings_of(arguments: argparse.Namespace, saved: "SavedRun") -> dict[str, Any]:
    """What a result depends on besides the checkpoint."""
    names = [name for name, _, _ in OPTIONS[arguments.kind] if name != "save-every"]
    settings = {name: getattr(arguments, name) for name in names}
    if "tokens" in settings:
        settings["tokens"] = settings["tokens"] or saved.config.batch_tokens
    if "batches" in settings and settings["batches"] is None:
        settings["batches"] = updates_of(saved)
    return settings


def updates_of(saved: "SavedRun") -> int:
    """The updates that the run's budget pays for."""
    import torch

    from muown_train.models.language_model import build_model
    from muown_train.training.schedule import build_schedule

    with torch.device("meta"):
        model = build_model(saved.config.model, saved.config.seq_len)
    return build_schedule(saved.config, sum(p.numel() for p in model.parameters()))[0]


def measured(
    arguments: argparse.Namespace, saved: "SavedRun", settings: Mapping[str, Any], scratch: Path, here: "World"
) -> dict[str, float]:
    from muown_train.analysis import probes
    from muown_train.analysis.checkpoints import check_optimizer, identity, subject_of
    from muown_train.analysis.gradient_noise import Noise

    kind = arguments.kind
    if kind in ("effective_rank", "gradient_noise"):
        check_optimizer(saved.opened)
    subject = subject_of(saved, here)
    if kind == "gradient_noise":
        noise = Noise(subject, settings["batches"], scratch, identity(saved), arguments.save_every)
        return noise.measure(progress(saved.step))
    classes: dict[str, Callable[..., Callable[[], dict[str, float]]]] = {
        "spectral": probes.Spectral,
        "effective_rank": probes.EffectiveRank,
        "attention_logits": probes.AttentionLogits,
    }
    return classes[kind](subject, **settings)()


def progress(step: int) -> Callable[[str, int, int], None]:
    """Says on standard error what is done, and how long the rest of a pass takes."""
    from muown_train.runtime.formatting import format_duration

    begun: dict[str, tuple[float, int]] = {}

    def say(what: str, done: int, of: int) -> None:
        now = time.monotonic()
        started, before = begun.setdefault(what, (now, done))
        left = "" if done == before else f", {format_duration((now - started) / (done - before) * (of - done))} left"
        print(f"update {step:,}: {what}, {done:,} of {of:,} batches{left}", file=sys.stderr, flush=True)

    return say


def table(kind: str, numbers: Mapping[str, float]) -> list[str]:
    """A short table of what was found: of the matrices of one name in all layers together."""
    if kind == "attention_logits":
        return [f"  layer {layer:<3} {value:10.4f}" for layer, value in numbers.items()]
    by_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, value in numbers.items():
        name, _, quantity = key.partition("/")
        if "." in name:
            by_kind[without_layer(name)][quantity or "effective rank"].append(value)
    columns = COLUMNS[kind]
    columns = [column for column in columns if any(column[0] in of for of in by_kind.values())]
    width = max(map(len, by_kind)) + 2
    lines = ["  " + " " * width + "".join(f"{title:>16}" for _, title, _ in columns)]
    for name, found in by_kind.items():
        cells = (f"{take(found[key]):16.5g}" if key in found else " " * 16 for key, _, take in columns)
        lines.append(f"  {name:<{width}}" + "".join(cells))
    for which in ("lower_quartile", "median", "upper_quartile"):
        if f"{which}/muon" in numbers:
            cells = (
                f"{numbers[f'{which}/{key}']:16.5g}" if f"{which}/{key}" in numbers else "" for key, _, _ in columns
            )
            lines.append(f"  {which.replace('_', ' '):<{width}}" + "".join(cells))
    return lines


def largest(values: list[float]) -> float:
    """NaN if there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


COLUMNS: dict[str, Sequence[tuple[str, str, Callable[[list[float]], float]]]] = {
    "spectral": (
        ("spectral_norm", "largest norm", largest),
        ("max_row_norm", "largest row", largest),
        ("coherence", "median coher.", statistics.median),
        ("error", "largest error", largest),
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


def without_layer(name: str) -> str:
    """blocks.3.mlp.out.weight -> blocks.*.mlp.out.weight."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def main(words: Sequence[str]) -> None:
    arguments = arguments_of(list(words))
    with report_errors([]):
        from muown_train.runtime.distributed import join_world

        with join_world() as here:
            analyze(arguments, here)
