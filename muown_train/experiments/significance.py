"""The significance rule of Track 3 of modded-nanogpt: whether n runs of one setting are below a validation loss.

github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md, rule 3:
(target - mean) sqrt(n) >= 0.004, a one-sided z-test at p < 0.001 that takes 0.0013 for the deviation of a run. The runs
are all that were made, at a step that is the same for all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muown_train.runs.record import RunRecord, read_run

TARGET, MARGIN = 3.28, 0.004
_LEAST = MARGIN - 1e-9  # but for rounding: (3.28 - 3.278) sqrt(4) is 0.004


@dataclass(frozen=True)
class Verdict:
    """Of the losses of n runs."""

    mean: float
    n: int
    statistic: float
    passes: bool
    needed: int | None  # runs to pass with this mean; None where no number does


def judge(losses: Sequence[float], target: float = TARGET) -> Verdict:
    """Apply the rule to validation losses, one of each run."""
    n, mean = len(losses), math.fsum(losses) / len(losses)
    statistic = (target - mean) * math.sqrt(n)
    needed = max(1, math.ceil((_LEAST / (target - mean)) ** 2)) if mean < target else None
    return Verdict(mean, n, statistic, statistic >= _LEAST, needed)


def finished(folder: Path) -> RunRecord:
    """A run that has finished.

    Raises:
        ValueError: it is none, has not, or was never evaluated.
    """
    run = read_run(folder)
    if run.state != "finished":
        raise ValueError(f"{folder} is {run.state}, not finished: the rule is for runs that are")
    if not evaluations(run):
        raise ValueError(f"{folder} has no evaluation in its metrics.jsonl")
    return run


def evaluations(run: RunRecord) -> dict[int, float]:
    """Validation losses by updates done, in their order."""
    steps, losses = run.series("valid/loss")
    return {int(step): float(loss) for step, loss in zip(steps, losses, strict=True)}


def common_step(runs: Sequence[RunRecord], step: int | None = None) -> int:
    """The step to compare at: the one given, or the last of all runs.

    Raises:
        ValueError: the runs end at different steps, two are of one seed or of different settings, or one was not
            evaluated at this step.
    """
    first, last = runs[0], max(evaluations(runs[0]))
    seeds: dict[int, RunRecord] = {}
    for run in runs:
        end = max(evaluations(run))
        if end != last:
            raise ValueError(f"{first.folder} ends at step {last}, {run.folder} at {end}: all must end alike")
        for key in [*first.settings, *run.settings]:
            ours, theirs = first.settings.get(key), run.settings.get(key)
            if ours != theirs:
                raise ValueError(
                    f"{first.folder} has {key}={ours}, {run.folder} has {key}={theirs}: "
                    "the rule is for runs that differ in nothing but the seed"
                )
        if run.seed in seeds:
            raise ValueError(f"{seeds[run.seed].folder} and {run.folder} have the same seed={run.seed}: it counts once")
        seeds[run.seed] = run
    chosen = last if step is None else step
    for run in runs:
        if chosen not in evaluations(run):
            there = ", ".join(map(str, list(evaluations(run))[-5:]))
            raise ValueError(f"{run.folder} was not evaluated at step {chosen}; its last evaluations are at {there}")
    return chosen
