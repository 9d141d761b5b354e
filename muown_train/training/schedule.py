"""Learning-rate schedules: pure functions (step, steps) -> multiplier of the base learning rate.

`step` counts from 0, the first step; `steps` is the number of steps of the run. Warm-up and cool-down are given as
fractions of the run, so that one setting serves every budget. The first step has a non-zero rate, and the rate after
the last step would be zero (or `final`).
"""

import math

from muown_train.config.budget import compute_steps
from muown_train.config.checks import check_int, is_number
from muown_train.config.instantiate import bind_target
from muown_train.config.schema import RunConfig, Schedule


def build_schedule(config: RunConfig, parameters: int) -> tuple[int, Schedule]:
    """Return the number of steps that the budget pays for, and the schedule of the learning rate over them.

    A run that continues another's checkpoint counts the steps done there as well.

    Args:
        parameters: the number of the model's parameters, for a budget in tokens per parameter.
    """
    steps = compute_steps(config.tokens, config.tokens_per_parameter, parameters, config.batch_tokens)
    schedule = bind_target(config.schedule, "schedule", ["step", "steps"], config.trust)
    steps += check_int("schedule.start", schedule.keywords.get("start") or 0, 0)
    schedule(0, steps)  # finds an impossible setting now
    return steps, schedule


def _check(step: int, steps: int, **fractions: float) -> None:
    assert 0 <= step < steps, (step, steps)
    for name, value in fractions.items():
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"schedule.{name}={value!r} must be a fraction of the run in [0, 1]")


def _warm_up(step: int, steps: int) -> float:
    """Return the multiplier of a linear warm-up over so many steps."""
    return min(1.0, (step + 1) / steps) if steps else 1.0


def wsd(step: int, steps: int, warmup: float = 0.02, cooldown: float = 0.2) -> float:
    """Warm up linearly, stay constant, decay linearly (WSD, Hu et al. 2024; the paper's schedule).

    Raises:
        ValueError: a fraction is outside [0, 1], or their sum is above 1.
    """
    _check(step, steps, warmup=warmup, cooldown=cooldown)
    if warmup + cooldown > 1:
        raise ValueError(f"schedule.warmup={warmup} and schedule.cooldown={cooldown} together exceed the run")
    down = round(cooldown * steps)
    return min(_warm_up(step, round(warmup * steps)), (steps - step) / (down + 1))


def cosine(step: int, steps: int, warmup: float = 0.02, final: float = 0.0) -> float:
    """Warm up linearly, then follow half a cosine down to `final`, reached one step after the last.

    Raises:
        ValueError: a fraction is outside [0, 1].
    """
    _check(step, steps, warmup=warmup, final=final)
    up = round(warmup * steps)
    if step < up:
        return _warm_up(step, up)
    progress = (step - up + 1) / (steps - up + 1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def decay_from(step: int, steps: int, start: int | None = None, level: float = 1.0) -> float:
    """Decay linearly from `level`, like the cool-down of `wsd`, in a run that continues a checkpoint of another.

    Args:
        start: the number of steps that the checkpoint had done, which is the first step of this run. Before it, the
            multiplier is `level`.
        level: the multiplier of the last step before the checkpoint.

    Raises:
        ValueError: `start` is missing, which comes from the setting `checkpoint`.
    """
    _check(step, steps)
    if start is None:
        raise ValueError("schedule=decay_from needs checkpoint=runs/NAME, or one of NAME's checkpoints, to go on from")
    return level * min(1.0, (steps - step) / (steps - start + 1))


def constant(step: int, steps: int, warmup: float = 0.02) -> float:
    """Warm up linearly, then stay at 1.

    Raises:
        ValueError: a fraction is outside [0, 1].
    """
    _check(step, steps, warmup=warmup)
    return _warm_up(step, round(warmup * steps))


def power_cooldown(
    step: int, steps: int, cooldown: float = 0.7, power: float = 1.0, horizon: int | None = None
) -> float:
    """Stay at 1, then fall as ((1 - p) / cooldown)^power with p = step / horizon, without warm-up, as modded-nanogpt.

    Args:
        cooldown: the fraction of the horizon over which the rate falls.
        power: the exponent; 1 falls linearly.
        horizon: the steps of the schedule, by default those of the run. A horizon beyond the end of the run keeps the
            rate from coming near zero.

    Raises:
        ValueError: a fraction is outside [0, 1], the power is below 0, or the horizon is shorter than the run.
    """
    _check(step, steps, cooldown=cooldown)
    if power < 0:
        raise ValueError(f"schedule.power={power!r} must be a number of at least 0")
    if horizon is not None and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < steps):
        raise ValueError(f"schedule.horizon={horizon!r} must be the run's {steps} steps or more, or null")
    left = 1 - step / (horizon or steps)
    return 1.0 if left > cooldown else (left / cooldown) ** power
