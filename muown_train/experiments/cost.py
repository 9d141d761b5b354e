"""Estimate what an experiment of the paper costs: the plan of each of its settings, and the sum."""

from collections.abc import Iterator, Sequence

import torch

from muown_train.config.budget import compute_batch_rows
from muown_train.config.schema import parse_config
from muown_train.experiments.grid import Grid, GridPoint
from muown_train.experiments.progress import GridPointStatus
from muown_train.models.language_model import build_model
from muown_train.runtime.formatting import format_gib, format_lr
from muown_train.training.optimizers import build_optimizer
from muown_train.training.plan import Plan, describe_parameters, make_plan
from muown_train.training.schedule import build_schedule


def check_runs(points: Sequence[GridPoint], ranks: int) -> None:
    """Build each setting's model (on the meta device), schedule and optimizer once, so that errors come before a run.

    Raises:
        ValueError: a setting is wrong.
    """
    for point, *_ in _group_points(points).values():
        config = parse_config(point.config, point.name)
        compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, ranks)
        with torch.device("meta"):
            model = build_model(config.model, config.seq_len, config.trust)
        build_schedule(config, sum(p.numel() for p in model.parameters()))
        build_optimizer(config.optim, model, config.trust)


def make_plans(
    points: Sequence[GridPoint], device: str, ranks: int, network: float | None = None
) -> dict[tuple[str, object], tuple[Plan, list[GridPoint]]]:
    """Return a plan for each curve (and value of the experiment's further axis), with its runs, which cost the same.

    Raises:
        ValueError: a setting is wrong, or the device is unknown.
    """
    return {
        key: (make_plan(list(group[0].overrides), device, ranks, network), group)
        for key, group in _group_points(points).items()
    }


def _group_points(points: Sequence[GridPoint]) -> dict[tuple[str, object], list[GridPoint]]:
    groups: dict[tuple[str, object], list[GridPoint]] = {}
    for point in points:
        groups.setdefault((point.curve.key, point.value), []).append(point)
    return groups


def estimate_gpu_hours(plan: Plan, mfu: float | None) -> float:
    """Return the GPU hours of a run with its evaluations."""
    return plan.ranks * sum(plan.estimate_hours(mfu))


def describe_costs(
    grid: Grid,
    statuses: Sequence[GridPointStatus],
    device: str,
    ranks: int,
    mfu: float | None,
    network: float | None = None,
) -> Iterator[str]:
    """Yield a paragraph for each setting, and the sum.

    Args:
        mfu, network: see `muown-train plan`.

    Raises:
        ValueError: a setting is wrong, or the device is unknown.
    """
    pending = {each.point for each in statuses if each.needs_training}
    total = left = 0.0
    plans = make_plans([each.point for each in statuses], device, ranks, network)
    for (key, value), (plan, points) in plans.items():
        axis = "" if grid.over is None else f", {grid.over}={value}"
        rates = dict.fromkeys(format_lr(point.lr) for point in points)
        seeds = dict.fromkeys(str(point.seed) for point in points)
        yield f"{key}{axis}: {_count_runs(len(points))}, learning rates {' '.join(rates)}, seeds {' '.join(seeds)}"
        yield from (f"  {line}" for line in describe_parameters(plan))
        peak = plan.memory.peak
        fits = "" if peak <= plan.room else ": does not fit, a smaller micro_batch may"
        yield f"  memory of each {plan.device}: {format_gib(peak)} GiB of {format_gib(plan.room)}{fits}"
        training, evaluating = plan.estimate_hours(mfu)
        each = estimate_gpu_hours(plan, mfu)
        yield f"  a run: {training:,.2f} hours, evaluations {evaluating:,.2f}; {each:,.1f} GPU hours"
        total += each * len(points)
        left += each * sum(point in pending for point in points)
    how = "at the MFU that `muown-train plan` assumes" if mfu is None else f"at an MFU of {mfu:.0%}"
    spent = f"{total:,.1f} GPU hours on {ranks} x {device}, {how}; {left:,.1f} of them to be spent"
    yield f"\n{_count_runs(len(statuses))}: {spent}"
    if grid.gpus and grid.gpus.paper:
        yield f"the paper: {grid.gpus.paper}"


def _count_runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
