"""Early stopping by past, delta and no improvement, as llama.cpp's Adam had it; and it survives a resume."""

from __future__ import annotations

import json

import pytest

from starscope.errors import UsageError
from starscope.train.stopping import Convergence, EarlyStop


def stops_at(asked: EarlyStop, losses: list[float]) -> tuple[int, str] | None:
    """The step whose loss ends the run, and why."""
    test = Convergence(asked)
    for step, loss in enumerate(losses):
        if why := test(loss):
            return step, why
    return None


FALLING = [10.0 / (step + 1) for step in range(50)]


def test_nothing_stops_unless_asked_for():
    assert stops_at(EarlyStop(), [1.0] * 1000) is None


def test_a_change_below_the_tolerance_stops():
    assert stops_at(EarlyStop(tolerance=1e-3), [3.0, 2.0, 1.999, 1.0]) == (
        2,
        "a step changed the loss by less than 0.001 of it",
    )
    assert stops_at(EarlyStop(tolerance=1e-3), FALLING) is None


def test_a_loss_like_the_one_some_steps_before_stops():
    losses = [5.0, 3.0, 4.0, 3.5, 3.0001]  # three steps before: 3.0
    assert stops_at(EarlyStop(past=3, delta=1e-3), losses) == (
        4,
        "the loss is within 0.001 of what it was 3 steps before",
    )
    assert stops_at(EarlyStop(past=3, delta=1e-5), losses) is None
    assert stops_at(EarlyStop(past=2, delta=1e-3), losses) is None


def test_so_many_steps_without_a_lowest_loss_stop():
    losses = [5.0, 4.0, 4.0, 4.5, 3.9, 4.0, 4.1, 3.9, 1.0]
    assert stops_at(EarlyStop(max_no_improvement=3), losses) == (7, "no lower loss in 3 steps")
    assert stops_at(EarlyStop(max_no_improvement=4), losses) is None


@pytest.mark.parametrize("cut", range(8))
def test_the_tests_go_on_from_a_checkpoint_as_if_never_stopped(cut):
    losses = [5.0, 4.0, 4.0, 4.5, 3.9, 4.0, 4.1, 3.9, 1.0]
    asked = EarlyStop(past=3, delta=1e-9, max_no_improvement=3)
    before, after = Convergence(asked), Convergence(asked)
    said = [before(loss) for loss in losses[:cut]]
    after.restore(json.loads(json.dumps(before.state)))
    said += [after(loss) for loss in losses[cut:]]
    whole = Convergence(asked)
    assert said == [whole(loss) for loss in losses]


def test_negative_numbers_are_refused():
    with pytest.raises(UsageError, match="expected no negative number"):
        EarlyStop(past=-1)
    with pytest.raises(UsageError, match="early stopping has tolerance nan; expected no negative number"):
        EarlyStop(tolerance=float("nan"))
