"""What an experiment of the paper will cost: the plan of each of its settings, and the sum."""

from collections.abc import Iterator, Sequence

import torch

from muown_train.config.budget import compute_batch_rows
from muown_train.config.schema import parse_config
from muown_train.experiments.grid import Cell, Experiment
from muown_train.experiments.progress import Found
from muown_train.models.language_model import build_model
from muown_train.runtime.formatting import format_gib, format_lr
from muown_train.training.optimizers import build_optimizer
from muown_train.training.plan import Plan, hours, needed_memory, of_parameters, planned
from muown_train.training.schedule import build_schedule


def check_runs(cells: Sequence[Cell], ranks: int) -> None:
    """Make each setting's model (without numbers), schedule and optimizer once, so that what cannot be is said now.

    Raises:
        ValueError: it is.
    """
    for cell, *_ in _alike(cells).values():
        config = parse_config(cell.config, cell.name)
        compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, ranks)
        with torch.device("meta"):
            model = build_model(config.model, config.seq_len, config.trust)
        build_schedule(config, sum(p.numel() for p in model.parameters()))
        build_optimizer(config.optim, model, config.trust)


def plans(cells: Sequence[Cell], device: str, ranks: int) -> dict[tuple[str, object], tuple[Plan, list[Cell]]]:
    """A plan for each series (and value of the experiment's further axis), with its runs, whose costs are the same.

    Raises:
        ValueError: a setting that cannot be, or a device that is not known.
    """
    return {key: (planned(list(of[0].overrides), device, ranks), of) for key, of in _alike(cells).items()}


def _alike(cells: Sequence[Cell]) -> dict[tuple[str, object], list[Cell]]:
    found: dict[tuple[str, object], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.series.key, cell.value), []).append(cell)
    return found


def gpu_hours(plan: Plan, mfu: float | None) -> float:
    """Of a run, its evaluations with it."""
    return plan.ranks * sum(hours(plan, mfu))


def plan_lines(
    experiment: Experiment, found: Sequence[Found], device: str, ranks: int, mfu: float | None
) -> Iterator[str]:
    """A paragraph for each setting, and the sum."""
    wanted = {each.cell for each in found if each.wanted}
    total = left = 0.0
    for (key, value), (plan, cells) in plans([each.cell for each in found], device, ranks).items():
        axis = "" if experiment.over is None else f", {experiment.over}={value}"
        rates, seeds = dict.fromkeys(format_lr(cell.lr) for cell in cells), dict.fromkeys(str(cell.seed) for cell in cells)
        yield f"{key}{axis}: {_runs(len(cells))}, learning rates {' '.join(rates)}, seeds {' '.join(seeds)}"
        yield from (f"  {line}" for line in of_parameters(plan))
        needed = needed_memory(plan)
        memory = f"{format_gib(needed.peak)} GiB of {format_gib(plan.room)}"
        fits = "" if needed.peak <= plan.room else ": does not fit, a smaller micro_batch may"
        yield f"  memory of each {plan.device}: {memory}{fits}"
        training, evaluating = hours(plan, mfu)
        each = gpu_hours(plan, mfu)
        yield f"  a run: {training:,.2f} hours, evaluations {evaluating:,.2f}; {each:,.1f} GPU hours"
        total += each * len(cells)
        left += each * sum(cell in wanted for cell in cells)
    how = "by a roofline (see scripts/plan.py)" if mfu is None else f"at an MFU of {mfu:.0%}"
    yield f"\n{_runs(len(found))}: {total:,.1f} GPU hours on {ranks} x {device}, {how}; {left:,.1f} of them to be spent"
    if experiment.gpus and experiment.gpus.paper:
        yield f"the paper: {experiment.gpus.paper}"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
