"""When a run has converged: three tests on the training loss, those of llama.cpp's Adam, each off unless asked for.

test = Convergence(EarlyStop(max_no_improvement=100))
why = test(loss)        # a sentence, once the run should end; "" before
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starscope.errors import UsageError


@dataclass(frozen=True)
class EarlyStop:
    """Which tests are made. Losses are those of single steps, in nats a token.

    `tolerance`: stop when a step changes the loss by less than this share of it (0: never). `past` and `delta`: stop
    when the loss is within the share `delta` of what it was `past` steps before (past 0: never). `max_no_improvement`:
    stop after so many steps in a row without a new lowest loss (0: never).
    """

    tolerance: float = 0.0
    past: int = 0
    delta: float = 1e-5
    max_no_improvement: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise UsageError(f"early stopping has {name} {value}; expected no negative number.")


class Convergence:
    """The tests over the losses of one run. `state` is what a checkpoint holds."""

    def __init__(self, asked: EarlyStop) -> None:
        self.asked = asked
        self._recent: list[float] = []  # the last max(past, 1) losses
        self._lowest: float | None = None
        self._waited = 0  # steps since the lowest loss

    def __call__(self, loss: float) -> str:
        asked, why = self.asked, ""
        if self._recent and abs(loss - self._recent[-1]) < asked.tolerance * loss:
            why = f"a step changed the loss by less than {asked.tolerance:g} of it"
        if 0 < asked.past <= len(self._recent) and abs(self._recent[-asked.past] - loss) < asked.delta * loss:
            why = f"the loss is within {asked.delta:g} of what it was {asked.past} steps before"
        self._recent = [*self._recent, loss][-max(asked.past, 1) :]
        if self._lowest is None or loss < self._lowest:
            self._lowest, self._waited = loss, 0
        else:
            self._waited += 1
            if 0 < asked.max_no_improvement <= self._waited:
                why = f"no lower loss in {self._waited} steps"
        return why

    @property
    def state(self) -> dict[str, Any]:
        return {"recent": self._recent, "lowest": self._lowest, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._recent, self._lowest = [float(loss) for loss in state["recent"]], state["lowest"]
        self._waited = int(state["waited"])
