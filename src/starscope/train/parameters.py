"""All weights of a model in one row, matrices before vectors, and all their gradients in another.

What is done to every weight is then done once: AdamW, the gradient's norm, clipping, setting to zero. Each weight stays
the tensor that it was, and its numbers lie in the row:

    parameters = Parameters(engine.parameters)
    parameters.gradients.norm()
    parameters.part(parameters.values, "norm.weight")       # the same numbers as engine.parameters["norm.weight"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16  # numbers: each weight begins at a multiple of 64 bytes


class Parameters:
    """`values` and `gradients` are float `[numbers]`; between two weights some stay 0. `leaves` are what to optimise:
    all matrices as one tensor and all vectors as another, whose gradients are parts of `gradients`.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        """Moves the numbers of `named` here: their tensors become views, ask for gradients and have zero ones."""
        order = sorted(named, key=lambda name: named[name].dim() < 2)
        self._shapes = {name: named[name].shape for name in order}
        self._starts, end, matrices = {}, 0, 0
        for name in order:
            self._starts[name] = end
            end += -(-named[name].numel() // ALIGNMENT) * ALIGNMENT
            matrices = end if named[name].dim() >= 2 else matrices
        like = next(iter(named.values()))
        self.values, self.gradients = (torch.zeros(end, dtype=like.dtype, device=like.device) for _ in range(2))
        for name, parameter in named.items():
            place = self.part(self.values, name)
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.requires_grad_()
            parameter.grad = self.part(self.gradients, name)
        self._matrices = matrices
        self.leaves = self.split(self.values)
        for leaf, gradient in zip(self.leaves, self.split(self.gradients), strict=True):
            leaf.requires_grad_()
            leaf.grad = gradient

    def split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """A row like `values` in two: the numbers of all matrices, and those of all vectors."""
        return row[: self._matrices].detach(), row[self._matrices :].detach()

    def part(self, row: Tensor, name: str) -> Tensor:
        """The numbers of one weight, in its shape, in a row like `values`."""
        start, shape = self._starts[name], self._shapes[name]
        return row[start : start + math.prod(shape)].view(shape)
