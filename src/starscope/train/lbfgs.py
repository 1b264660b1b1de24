"""L-BFGS, for models and data so small that a batch says enough about the loss: steps by line search, no rate to set.

The method is torch's, with the constants of llama.cpp's: six pairs of history, at most 20 tries a line search, strong
Wolfe conditions. Its history ends with each batch: the gradients of two batches differ by more than the step between
them. So there is nothing of it to save, and a run resumes with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from starscope.train.parameters import Parameters

HISTORY = 6  # pairs of steps and changes of the gradient
TRIES = 20  # evaluations of the loss in an iteration, at most


def lbfgs_step(parameters: Parameters, loss: Callable[[], float], iterations: int) -> tuple[float, float]:
    """`iterations` of L-BFGS on one batch. `loss()` evaluates it and sets the gradients.

    Returns the loss and the gradient's norm before the first of them. The parameters are left as they are when either
    is no finite number.
    """
    first: list[float] = []

    def closure() -> Tensor:
        value = loss()
        if not first:
            norm = float(parameters.gradients.norm())
            first.extend((value, norm))
            if not (math.isfinite(value) and math.isfinite(norm)):
                raise _NotFiniteError
        return torch.tensor(value, dtype=torch.float64)

    optimizer = torch.optim.LBFGS(
        list(parameters.leaves),
        max_iter=iterations,
        max_eval=iterations * TRIES,
        history_size=HISTORY,
        tolerance_grad=0.0,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    with suppress(_NotFiniteError):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return first[0], first[1]


class _NotFiniteError(Exception):
    """The first evaluation gave no number: there is no direction to go."""
