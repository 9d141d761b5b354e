"""What an experiment of the paper will cost: the plan of each of its settings, and the sum."""

from collections.abc import Iterator, Sequence

import torch

from muown_train.config.budget import compute_batch_rows
from muown_train.config.schema import parse_config
from muown_train.experiments.grid import Grid, GridPoint
from muown_train.experiments.progress import GridPointStatus
from muown_train.models.language_model import build_model
from muown_train.runtime.formatting import format_gib, format_lr
from muown_train.training.optimizers import build_optimizer
from muown_train.training.plan import Plan, hours, needed_memory, of_parameters, planned
from muown_train.training.schedule import build_schedule


def check_runs(points: Sequence[GridPoint], ranks: int) -> None:
    """Make each setting's model (without numbers), schedule and optimizer once, so that what cannot be is said now.

    Raises:
        ValueError: it is.
    """
    for point, *_ in _alike(points).values():
        config = parse_config(point.config, point.name)
        compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, ranks)
        with torch.device("meta"):
            model = build_model(config.model, config.seq_len, config.trust)
        build_schedule(config, sum(p.numel() for p in model.parameters()))
        build_optimizer(config.optim, model, config.trust)


def plans(
    points: Sequence[GridPoint], device: str, ranks: int
) -> dict[tuple[str, object], tuple[Plan, list[GridPoint]]]:
    """A plan for each series (and value of the experiment's further axis), with its runs, whose costs are the same.

    Raises:
        ValueError: a setting that cannot be, or a device that is not known.
    """
    return {key: (planned(list(of[0].overrides), device, ranks), of) for key, of in _alike(points).items()}


def _alike(points: Sequence[GridPoint]) -> dict[tuple[str, object], list[GridPoint]]:
    found: dict[tuple[str, object], list[GridPoint]] = {}
    for point in points:
        found.setdefault((point.curve.key, point.value), []).append(point)
    return found


def gpu_hours(plan: Plan, mfu: float | None) -> float:
    """Of a run, its evaluations with it."""
    return plan.ranks * sum(hours(plan, mfu))


def plan_lines(
    grid: Grid, statuses: Sequence[GridPointStatus], device: str, ranks: int, mfu: float | None
) -> Iterator[str]:
    """A paragraph for each setting, and the sum."""
    pending = {each.point for each in statuses if each.needs_training}
    total = left = 0.0
    for (key, value), (plan, points) in plans([each.point for each in statuses], device, ranks).items():
        axis = "" if grid.over is None else f", {grid.over}={value}"
        rates = dict.fromkeys(format_lr(point.lr) for point in points)
        seeds = dict.fromkeys(str(point.seed) for point in points)
        yield f"{key}{axis}: {_runs(len(points))}, learning rates {' '.join(rates)}, seeds {' '.join(seeds)}"
        yield from (f"  {line}" for line in of_parameters(plan))
        needed = needed_memory(plan)
        memory = f"{format_gib(needed.peak)} GiB of {format_gib(plan.room)}"
        fits = "" if needed.peak <= plan.room else ": does not fit, a smaller micro_batch may"
        yield f"  memory of each {plan.device}: {memory}{fits}"
        training, evaluating = hours(plan, mfu)
        each = gpu_hours(plan, mfu)
        yield f"  a run: {training:,.2f} hours, evaluations {evaluating:,.2f}; {each:,.1f} GPU hours"
        total += each * len(points)
        left += each * sum(point in pending for point in points)
    how = "by a roofline (see scripts/plan.py)" if mfu is None else f"at an MFU of {mfu:.0%}"
    spent = f"{total:,.1f} GPU hours on {ranks} x {device}, {how}; {left:,.1f} of them to be spent"
    yield f"\n{_runs(len(statuses))}: {spent}"
    if grid.gpus and grid.gpus.paper:
        yield f"the paper: {grid.gpus.paper}"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
