"""The learning rate of each step: a straight rise over the warm-up, then one of five shapes.

    schedule = Schedule(peak=2e-3, warmup_steps=100, decay_steps=2000, final=2e-4)
    schedule(0), schedule(99), schedule(2000)       # 2e-05, 2e-3, 2e-4

`decay_steps` is the step at which `final` is reached and from which it is kept. It does not follow from how long one
trains: a run that is made longer has the same rates in the steps that it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from starscope.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step, from 0.

    `kind` is a row of `SHAPES`. `restart_growth` is for `cosine_restarts`: each period is so many times as long as the
    one before; the first ends at `decay_steps`. `decay_share` is for `wsd`: the part of `decay_steps` that falls.
    Raises UsageError for what contradicts itself.
    """

    peak: float
    warmup_steps: int
    decay_steps: int
    final: float = 0.0
    kind: str = "cosine"
    restart_growth: float = 1.0
    decay_share: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise UsageError(f"the schedule is {self.kind!r}; expected {', '.join(SHAPES)}.")
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise UsageError(
                f"warm-up takes {self.warmup_steps} steps and decay ends at {self.decay_steps}; "
                "expected warm-up to end before."
            )
        if not (math.isfinite(self.peak) and math.isfinite(self.final) and self.peak > 0 and self.final >= 0):
            raise UsageError(f"the learning rate goes from {self.peak:g} to {self.final:g}; expected positive numbers.")
        if not (math.isfinite(self.restart_growth) and self.restart_growth >= 1):
            raise UsageError(f"periods grow by {self.restart_growth:g}; expected at least 1.")
        if not 0 < self.decay_share <= 1:
            raise UsageError(f"the falling share is {self.decay_share:g}; expected above 0 and at most 1.")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        height = SHAPES[self.kind](self, step - self.warmup_steps)
        return self.final + (self.peak - self.final) * height


def _progress(schedule: Schedule, step: int) -> float:
    return min(1.0, step / (schedule.decay_steps - schedule.warmup_steps))


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _constant(_schedule: Schedule, _step: int) -> float:
    return 1.0


def _linear(schedule: Schedule, step: int) -> float:
    return 1 - _progress(schedule, step)


def _cosine(schedule: Schedule, step: int) -> float:
    return _half_cosine(_progress(schedule, step))


def _cosine_restarts(schedule: Schedule, step: int) -> float:
    """Periods of half a cosine. A period ends on its lowest rate, and the next begins one step down from the peak."""
    length, left = float(schedule.decay_steps - schedule.warmup_steps), float(step)
    while left > length:
        left, length = left - length, length * schedule.restart_growth
    return _half_cosine(left / length)


def _warmup_stable_decay(schedule: Schedule, step: int) -> float:
    falls = schedule.decay_share * schedule.decay_steps  # steps
    left = schedule.decay_steps - (step + schedule.warmup_steps)
    return min(1.0, max(0.0, left / falls))


SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,  # the peak, whatever decay_steps says
    "linear": _linear,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "wsd": _warmup_stable_decay,  # the peak, then a straight fall over the last decay_share of decay_steps
}
