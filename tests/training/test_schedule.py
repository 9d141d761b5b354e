"""Schedules: pure functions of the step, with the shape that their names promise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.training.schedule import constant, cosine, power_cooldown, wsd

fractions = st.floats(0, 0.5)


@given(st.integers(1, 3000), fractions, fractions)
def test_every_step_moves_and_none_exceeds_the_base(steps, warmup, cooldown):
    for values in (
        [wsd(t, steps, warmup, cooldown) for t in range(steps)],
        [cosine(t, steps, warmup) for t in range(steps)],
        [constant(t, steps, warmup) for t in range(steps)],
    ):
        assert all(0 < value <= 1 for value in values)


@given(st.integers(1, 3000), st.floats(0, 0.3), st.floats(0.3, 0.7))
def test_the_last_step_is_the_smallest(steps, warmup, cooldown):
    values = [wsd(t, steps, warmup, cooldown) for t in range(steps)]
    assert values[-1] == min(values)
    values = [cosine(t, steps, warmup) for t in range(steps)]
    assert round(warmup * steps) > steps / 4 or values[-1] == min(values)


def test_the_papers_schedule():
    values = [wsd(t, 1000) for t in range(1000)]
    assert values[0] == 1 / 20 and values[19] == 1 and values[18] < 1  # 2 % up
    assert values[799:801] == [1, 200 / 201] and values[-1] == pytest.approx(1 / 201)  # 20 % down
    assert all(values[t] == 1 for t in range(19, 800))


def test_cosine_is_half_way_in_the_middle_and_ends_at_final():
    values = [cosine(t, 999, warmup=0.0, final=0.1) for t in range(999)]
    assert values[499] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.999)))


def test_a_power_cooldown_is_that_of_modded_nanogpt():
    values = [power_cooldown(t, 3250) for t in range(3250)]
    assert values[:976] == [1.0] * 976 and values[976] == pytest.approx((3250 - 976) / 2275)
    assert values[-1] == pytest.approx(1 / 2275)
    longer = [power_cooldown(t, 3075, 0.7, 0.9, horizon=3165) for t in range(3075)]
    assert longer[949] == 1 and longer[3000] == pytest.approx((165 / 3165 / 0.7) ** 0.9)
    assert longer[-1] == pytest.approx((91 / 3165 / 0.7) ** 0.9)
    assert longer == sorted(longer, reverse=True)
    assert {power_cooldown(t, 10, cooldown=0.0) for t in range(10)} == {1.0}


def test_fractions_do_not_depend_on_the_budget():
    for steps in (100, 1000, 10000):
        assert sum(wsd(t, steps) for t in range(steps)) / steps == pytest.approx(0.89, abs=0.006)


@pytest.mark.parametrize(
    "call, part",
    [
        (lambda: wsd(0, 10, warmup=20), "schedule.warmup=20"),
        (lambda: wsd(0, 10, cooldown=-0.1), "schedule.cooldown=-0.1"),
        (lambda: wsd(0, 10, warmup=0.6, cooldown=0.6), "exceed"),
        (lambda: cosine(0, 10, final=2), "schedule.final=2"),
        (lambda: constant(0, 10, warmup="2%"), "schedule.warmup='2%'"),
        (lambda: power_cooldown(0, 10, cooldown=70), "schedule.cooldown=70"),
        (lambda: power_cooldown(0, 10, power=-1), "schedule.power=-1"),
        (lambda: power_cooldown(0, 10, horizon=9), "schedule.horizon=9 must be the run's 10 steps or more"),
        (lambda: power_cooldown(0, 10, horizon=1.5), "schedule.horizon=1.5"),
    ],
)
def test_impossible_fractions(call, part):
    with pytest.raises(ValueError, match=part):
        call()
