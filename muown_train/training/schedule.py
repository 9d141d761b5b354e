"""Learning-rate schedules: pure functions (step, steps) -> multiplier of the base learning rate.

`step` counts from 0, the first update; `steps` is the number of updates of the run. Warm-up and cool-down are given
as fractions of the run, so that one setting serves every budget. The first update has a non-zero rate, and the rate
after the last update would be zero (or `final`).
"""

import math

from muown_train.config.budget import compute_steps
from muown_train.config.checks import check_int
from muown_train.config.instantiate import bind_target
from muown_train.config.schema import RunConfig, Schedule


def build_schedule(config: RunConfig, parameters: int) -> tuple[int, Schedule]:
    """Return the number of steps that the budget pays for, and the schedule of the learning rate over them.

    A run that goes on from another's checkpoint counts the steps done there as well.

    Args:
        parameters: of the model, for a budget in tokens per parameter.
    """
    steps = compute_steps(config.tokens, config.tokens_per_parameter, parameters, config.batch_tokens)
    schedule = bind_target(config.schedule, "schedule", ["step", "steps"], config.trust)
    steps += check_int("schedule.start", schedule.keywords.get("start") or 0, 0)
    schedule(0, steps)  # finds an impossible setting now
    return steps, schedule


def _check(step: int, steps: int, **fractions: float) -> None:
    assert 0 <= step < steps, (step, steps)
    for name, value in fractions.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"schedule.{name}={value!r} must be a fraction of the run in [0, 1]")


def _warmup(step: int, updates: int) -> float:
    return min(1.0, (step + 1) / updates) if updates else 1.0


def wsd(step: int, steps: int, warmup: float = 0.02, cooldown: float = 0.2) -> float:
    """Warm-up, stable, decay (Hu et al. 2024; the paper's schedule): linear up, constant, linear down.

    Raises:
        ValueError: a fraction outside [0, 1], or a sum above 1.
    """
    _check(step, steps, warmup=warmup, cooldown=cooldown)
    if warmup + cooldown > 1:
        raise ValueError(f"schedule.warmup={warmup} and schedule.cooldown={cooldown} together exceed the run")
    down = round(cooldown * steps)
    return min(_warmup(step, round(warmup * steps)), (steps - step) / (down + 1))


def cosine(step: int, steps: int, warmup: float = 0.02, final: float = 0.0) -> float:
    """Linear warm-up, then half a cosine down to `final`, reached one update after the last.

    Raises:
        ValueError: a fraction outside [0, 1].
    """
    _check(step, steps, warmup=warmup, final=final)
    up = round(warmup * steps)
    if step < up:
        return _warmup(step, up)
    progress = (step - up + 1) / (steps - up + 1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def decay_from(step: int, steps: int, start: int | None = None, level: float = 1.0) -> float:
    """From `level` linearly down, as the cool-down of `wsd`: the decay of a run from a checkpoint of another.

    Args:
        start: updates that the checkpoint had done; the first of this run is that one. Before, the rate is level.
        level: multiplier of the last update before.

    Raises:
        ValueError: there is no start, which comes from `checkpoint`.
    """
    _check(step, steps)
    if start is None:
        raise ValueError("schedule=decay_from needs checkpoint=runs/NAME, or one of NAME's checkpoints, to go on from")
    return level * min(1.0, (steps - step) / (steps - start + 1))


def constant(step: int, steps: int, warmup: float = 0.02) -> float:
    """Linear warm-up, then 1.

    Raises:
        ValueError: a fraction outside [0, 1].
    """
    _check(step, steps, warmup=warmup)
    return _warmup(step, round(warmup * steps))


def power_cooldown(
    step: int, steps: int, cooldown: float = 0.7, power: float = 1.0, horizon: int | None = None
) -> float:
    """1, then ((1 - p) / cooldown)^power with p = step / horizon: no warm-up, in the manner of modded-nanogpt.

    Args:
        cooldown: the fraction of the horizon that the rate falls over.
        power: 1 falls linearly.
        horizon: updates of the schedule, which may be longer than the run: then the rate does not come near zero. None
            for those of the run.

    Raises:
        ValueError: a fraction outside [0, 1], a power below 0, or a horizon shorter than the run.
    """
    _check(step, steps, cooldown=cooldown)
    if power < 0:
        raise ValueError(f"schedule.power={power!r} must be a number of at least 0")
    if horizon is not None and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < steps):
        raise ValueError(f"schedule.horizon={horizon!r} must be the run's {steps} updates or more, or null")
    left = 1 - step / (horizon or steps)
    return 1.0 if left > cooldown else (left / cooldown) ** power
