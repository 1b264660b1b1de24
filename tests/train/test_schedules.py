"""The learning rate of each step, by its definition."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import UsageError
from starscope.train.schedules import SHAPES, Schedule


def of(kind: str, **changes: float) -> Schedule:
    values = {"peak": 1.0, "warmup_steps": 10, "decay_steps": 110, "final": 0.1, **changes}
    return Schedule(kind=kind, **values)  # type: ignore[arg-type]


def test_the_schedule_rises_in_a_line_falls_as_a_cosine_and_stays():
    schedule = of("cosine")
    assert schedule == Schedule(1.0, 10, 110, 0.1)  # what one gets without asking
    assert schedule(0) == pytest.approx(0.1)
    assert schedule(9) == schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(110) == schedule(10**6) == pytest.approx(0.1)
    assert Schedule(peak=1.0, warmup_steps=0, decay_steps=5)(0) == 1.0


def test_a_constant_rate_stays_at_its_peak_whatever_the_length():
    assert [of("constant")(step) for step in (9, 10, 60, 110, 10**6)] == [1.0] * 5


def test_a_linear_fall_ends_at_its_final_rate():
    schedule = of("linear")
    assert [schedule(step) for step in (10, 35, 60, 110, 10**6)] == pytest.approx([1.0, 0.775, 0.55, 0.1, 0.1])


def test_warm_up_stable_decay_stays_and_then_falls_over_its_share():
    schedule = of("wsd", decay_share=0.5)  # of 110: from step 55 on
    assert [schedule(step) for step in (10, 54, 55)] == [1.0, 1.0, 1.0]
    assert schedule(55 + 11) == pytest.approx(0.1 + 0.9 * 0.8)
    assert schedule(110) == schedule(10**6) == pytest.approx(0.1)


def periods(schedule: Schedule, steps: int) -> list[int]:
    """The lengths of the periods that end within `steps`, from where the rate rises."""
    rates = [schedule(step) for step in range(schedule.warmup_steps, steps)]
    ends = [i for i in range(1, len(rates)) if rates[i] > rates[i - 1]]
    return [b - a for a, b in pairwise(ends)]


def test_cosine_restarts_rise_again_and_their_periods_lengthen():
    schedule = of("cosine_restarts", restart_growth=2.0)  # 100, 200, 400 steps
    assert schedule(110) == pytest.approx(0.1)
    assert schedule(111) > 0.99
    assert schedule(111 + 199) == pytest.approx(0.1)
    assert schedule(111 + 200) > 0.999
    lengths = periods(of("cosine_restarts", restart_growth=1.1), 2000)
    assert len(lengths) > 5
    assert all(1.05 < b / a < 1.15 for a, b in pairwise(lengths))  # the original's never grew
    assert set(periods(of("cosine_restarts"), 2000)) == {100}


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 5000), st.integers(0, 50), st.integers(51, 900))
def test_every_rate_lies_between_its_ends_after_the_warm_up(kind, step, warmup, decay):
    rate = Schedule(1.0, warmup, decay, 0.25, kind, 1.3)(step)
    assert (0.25 - 1e-9 <= rate <= 1.0 + 1e-9) if step >= warmup else rate == (step + 1) / warmup


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_a_schedule_does_not_know_how_long_one_trains(kind):
    a, b = of(kind), of(kind)
    assert [a(step) for step in range(300)] == [b(step) for step in range(300)]  # a function of the step alone


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warmup_steps": 110}, "expected warm-up to end before"),
        ({"warmup_steps": -1}, "expected warm-up to end before"),
        ({"peak": math.nan}, "expected positive numbers"),
        ({"final": -1.0}, "expected positive numbers"),
        ({"restart_growth": 0.5}, "expected at least 1"),
        ({"decay_share": 0.0}, "expected above 0 and at most 1"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        of("cosine", **changes)


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="'step'; expected constant, linear, cosine, cosine_restarts, wsd"):
        of("step")
