"""Significance: of differences between two settings, seed by seed, and the rule of Track 3 of modded-nanogpt.

**Paired differences.** Runs of one seed have the same data order, and those of one model the same first weights, so two
settings are compared seed by seed. The interval of the mean difference is Student's, at 95 %.

**Track 3** has a rule that says whether n runs of one setting are below a loss:
github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md, rule 3:
(target - mean) sqrt(n) >= 0.004, a one-sided z-test at p < 0.001 that takes 0.0013 for the deviation of a run. The runs
must be all that were made, and are compared at the same step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muown_train.experiments.report.tables import mean_and_deviation
from muown_train.runs.record import RunRecord, read_run

TARGET, MARGIN = 3.28, 0.004
_LEAST = MARGIN - 1e-9  # (3.28 - 3.278) sqrt(4) is 0.004 but for rounding
# Student's t that 2.5 % exceed, for 1, 2, … degrees of freedom; for more than 30 the last is a little too large
_STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class PairedDifference:
    """The difference between two settings over seeds that both have, and what it says of the claim that it is below 0.

    Args:
        mean: the mean difference.
        deviation: the sample's standard deviation (n - 1); None for a single seed.
        n: the number of seeds.
        diverged: the number of seeds for which a run diverged, which has no loss to compare.
    """

    mean: float
    deviation: float | None
    n: int
    diverged: int = 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None for a single seed, which says nothing of others."""
        if self.deviation is None:
            return None
        half = _STUDENT_T[min(self.n - 1, len(_STUDENT_T)) - 1] * self.deviation / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> str:
        """`held` where the interval is below 0, `not held` where it is above 0, and otherwise `undecided`.

        It is undecided too where a run diverged, since the other seeds are a choice then.
        """
        if self.interval is None or self.diverged:
            return "undecided"
        low, high = self.interval
        return "held" if high < 0 else "not held" if low > 0 else "undecided"


def compare_seeds(
    lower: Mapping[int, float], higher: Mapping[int, float], diverged: int = 0
) -> PairedDifference | None:
    """Return the difference lower - higher of numbers by seed; None where no seed has both."""
    differences = [value - higher[seed] for seed, value in lower.items() if seed in higher]
    return PairedDifference(*mean_and_deviation(differences), len(differences), diverged) if differences else None


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
