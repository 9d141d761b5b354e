"""The significance rule of Track 3 of modded-nanogpt: whether n runs of one setting are below a validation loss.

github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md, rule 3:
(target - mean) sqrt(n) >= 0.004, a one-sided z-test at p < 0.001 that takes 0.0013 for the deviation of a run. The runs
are all that were made, at a step that is the same for all.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from muown_train.config import defines_run

TARGET, MARGIN = 3.28, 0.004
_LEAST = MARGIN - 1e-9  # but for rounding: (3.28 - 3.278) sqrt(4) is 0.004


@dataclass(frozen=True)
class FinishedRun:
    """What the rule needs of a run."""

    folder: Path
    seed: int
    losses: dict[int, float]  # of validation, by updates done
    setting: dict[str, Any]  # dotted keys of what defines the run, but for the seed


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


def read_run(folder: Path) -> FinishedRun:
    """A finished run.

    Raises:
        ValueError: it is none, or its files cannot be read.
    """
    if not (folder / "status.json").exists():
        raise ValueError(f"{folder} is no run's folder: give those that training wrote, such as runs/NAME")
    try:
        status = json.loads((folder / "status.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        state, seed = status["state"], int(config["seed"])
        losses = {int(line["step"]): float(line["valid/loss"]) for line in lines if "valid/loss" in line}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no run that can be read: {error}") from error
    if state != "finished":
        raise ValueError(f"{folder} is {state}, not finished: the rule is for runs that are")
    setting = {key: value for key, value in _dotted(config).items() if key != "seed" and defines_run(key)}
    return FinishedRun(folder, seed, losses, setting)


def common_step(runs: Sequence[FinishedRun], step: int | None = None) -> int:
    """The step to compare at: the one given, or the last of all runs.

    Raises:
        ValueError: the runs end at different steps, two are of one seed or of different settings, or one was not
            evaluated at this step.
    """
    first, last = runs[0], max(runs[0].losses)
    seeds: dict[int, FinishedRun] = {}
    for run in runs:
        if max(run.losses) != last:
            raise ValueError(
                f"{first.folder} ends at step {last}, {run.folder} at {max(run.losses)}: all must end alike"
            )
        if run.seed in seeds:
            raise ValueError(
                f"{seeds[run.seed].folder} and {run.folder} have the same seed={run.seed}: they count once"
            )
        seeds[run.seed] = run
        for key in [*first.setting, *run.setting]:
            ours, theirs = first.setting.get(key), run.setting.get(key)
            if ours != theirs:
                raise ValueError(
                    f"{first.folder} has {key}={ours}, {run.folder} has {key}={theirs}: "
                    "the rule is for runs that differ in nothing but the seed"
                )
    chosen = last if step is None else step
    for run in runs:
        if chosen not in run.losses:
            there = ", ".join(map(str, sorted(run.losses)[-5:]))
            raise ValueError(f"{run.folder} was not evaluated at step {chosen}; its last evaluations are at {there}")
    return chosen


def _dotted(tree: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
