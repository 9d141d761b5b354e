"""The significance rule of Track 3 of modded-nanogpt, which says whether n runs of one setting are below a loss.

github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md, rule 3:
(target - mean) sqrt(n) >= 0.004, a one-sided z-test at p < 0.001 that takes 0.0013 for the deviation of a run. The runs
must be all that were made, and are compared at the same step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muown_train.runs.record import RunRecord, read_run

TARGET, MARGIN = 3.28, 0.004
_LEAST = MARGIN - 1e-9  # (3.28 - 3.278) sqrt(4) is 0.004 but for rounding


@dataclass(frozen=True)
class Verdict:
    """The judgement of the rule on the losses of n runs."""

    mean: float
    n: int
    statistic: float
    passes: bool
    needed: int | None  # number of runs that would pass with this mean; None if no number would


def judge_losses(losses: Sequence[float], target: float = TARGET) -> Verdict:
    """Apply the rule to validation losses, one of each run."""
    n, mean = len(losses), math.fsum(losses) / len(losses)
    statistic = (target - mean) * math.sqrt(n)
    needed = max(1, math.ceil((_LEAST / (target - mean)) ** 2)) if mean < target else None
    return Verdict(mean, n, statistic, statistic >= _LEAST, needed)


def read_finished_run(folder: Path) -> RunRecord:
    """Return a run that has finished.

    Raises:
        ValueError: the folder is no run's, or the run has not finished or was never evaluated.
    """
    run = read_run(folder)
    if run.state != "finished":
        raise ValueError(f"{folder} is {run.state}, not finished: the rule is for runs that are")
    if not get_valid_losses(run):
        raise ValueError(f"{folder} has no evaluation in its metrics.jsonl")
    return run


def get_valid_losses(run: RunRecord) -> dict[int, float]:
    """Return the validation losses of a run by step, in the order of steps."""
    steps, losses = run.series("valid/loss")
    return {int(step): float(loss) for step, loss in zip(steps, losses, strict=True)}


def find_common_step(runs: Sequence[RunRecord], step: int | None = None) -> int:
    """Return the step to compare runs at: the given one, or the last of all runs.

    Raises:
        ValueError: the runs end at different steps, two have the same seed or different settings, or one was not
            evaluated at this step.
    """
    first, last = runs[0], max(get_valid_losses(runs[0]))
    seeds: dict[int, RunRecord] = {}
    for run in runs:
        end = max(get_valid_losses(run))
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
    common = last if step is None else step
    for run in runs:
        losses = get_valid_losses(run)
        if common not in losses:
            there = ", ".join(map(str, list(losses)[-5:]))
            raise ValueError(f"{run.folder} was not evaluated at step {common}; its last evaluations are at {there}")
    return common
