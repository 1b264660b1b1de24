"""How a model starts and how it learns: initial weights and AdamW with decoupled decay.

Matrices start as normal(0, 0.02), those that write into the residual stream divided by sqrt(2 · num_layers), so that
its variance does not grow with depth; norms start as the identity and biases at 0. The first loss is then close to
ln(vocab_size). Decay pulls matrices towards 0, never norms and biases.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from starscope.errors import UsageError
from starscope.graph import Graph
from starscope.train.parameters import Parameters

INITIAL_DEVIATION = 0.02
INITS = ("scaled", "xavier")
MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8  # added to the root of the second moment


def residual_projections(graph: Graph) -> frozenset[str]:
    """The weights of linear layers whose output is added to the residual stream, read off the graph."""
    adds = {op.index for op in graph.ops if op.kind == "add"}
    linears = (op for op in graph.ops if op.kind == "linear")
    return frozenset(op.weights[0] for op in linears if adds.intersection(graph.consumers[op.outputs[0]]))


def initial_weights(graph: Graph, seed: int, init: str = "scaled") -> dict[str, np.ndarray]:
    """Float32 arrays for every tensor of the model, tied ones left out.

    `init`: `scaled` as above, or `xavier`: matrices as normal numbers cut to [-1, 1], divided by sqrt(rows + columns).
    UsageError for another one.
    """
    if init not in INITS:
        raise UsageError(f"the initial weights are {init!r}; expected {' or '.join(INITS)}.")
    generator = torch.Generator().manual_seed(seed)
    inward = residual_projections(graph)
    made: dict[str, np.ndarray] = {}
    for slot in graph.family.slots(graph.hp):
        if slot.tied_to:
            continue
        if slot.made:
            made[slot.name] = slot.made()
            continue
        if len(slot.shape) == 1:
            made[slot.name] = np.full(slot.shape, 0.0 if slot.name.endswith(".bias") else 1.0, np.float32)
            continue
        drawn = torch.randn(slot.shape, generator=generator)
        if init == "xavier":
            made[slot.name] = (drawn.clamp_(-1, 1) / math.sqrt(sum(slot.shape))).numpy()
        else:
            deviation = INITIAL_DEVIATION / (math.sqrt(2 * graph.hp.num_layers) if slot.name in inward else 1)
            made[slot.name] = (drawn * deviation).numpy()
    return made


class AdamW:
    """Torch's, over all parameters. Decay is multiplied by the learning rate and applied to matrices alone.

    `moments` are what it keeps from step to step, rows like `parameters.values`, by torch's names.
    """

    def __init__(
        self, parameters: Parameters, *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self.moments = {name: torch.zeros_like(parameters.values) for name in MOMENTS}
        self._betas, self._decays = betas, (weight_decay, 0.0)
        rows = (parameters.values, parameters.gradients, *self.moments.values())
        self._groups = list(zip(*map(parameters.split, rows), strict=True))  # those of matrices, and those of vectors
        self._count = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """One step along the gradients."""
        for (values, gradients, first, second), decay in zip(self._groups, self._decays, strict=True):
            adamw(
                [values],
                [gradients],
                [first],
                [second],
                [],
                [self._count.clone()],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=rate,
                weight_decay=decay,
                eps=EPSILON,
                maximize=False,
            )
        self._count += 1

    def set_updates(self, count: int) -> None:
        """Go on as after so many updates, with the moments as they are."""
        self._count.fill_(count)


def clip_gradients(gradients: Tensor, limit: float) -> float:
    """Scale all gradients so that their common norm is at most `limit` (0: no limit); returns the norm before."""
    norm = float(gradients.norm())
    if limit and norm > limit:
        gradients.mul_(limit / (norm + 1e-6))
    return norm
