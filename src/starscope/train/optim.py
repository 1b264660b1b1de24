"""How a model starts and how it learns: initial weights, AdamW with decoupled decay, the learning rate's schedule.

Matrices start as normal(0, 0.02), those that write into the residual stream divided by sqrt(2 · num_layers), so that
its variance does not grow with depth; norms start as the identity and biases at 0. The first loss is then close to
ln(vocab_size). Decay pulls matrices towards 0, never norms and biases:

    schedule = Schedule(peak=2e-3, warmup_steps=100, decay_steps=2000, final=2e-4)
    schedule(0), schedule(99), schedule(2000)       # 2e-05, 2e-3, 2e-4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from starscope.errors import UsageError
from starscope.graph import Graph

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step: a straight rise over `warmup_steps`, then half a cosine to `final`.

    `final` is reached at step `decay_steps` and kept. The length does not follow from how long one trains.
    """

    peak: float
    warmup_steps: int
    decay_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise UsageError(
                f"warm-up takes {self.warmup_steps} steps and decay ends at {self.decay_steps}; "
                "expected warm-up to end before."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


def residual_projections(graph: Graph) -> frozenset[str]:
    """The weights of linear layers whose output is added to the residual stream, read off the graph."""
    adds = {op.index for op in graph.ops if op.kind == "add"}
    linears = (op for op in graph.ops if op.kind == "linear")
    return frozenset(op.weights[0] for op in linears if adds.intersection(graph.consumers[op.outputs[0]]))


def initial_weights(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """Float32 arrays for every tensor of the model, tied ones left out."""
    generator = torch.Generator().manual_seed(seed)
    inward = residual_projections(graph)
    made: dict[str, np.ndarray] = {}
    for slot in graph.family.slots(graph.hp):
        if slot.tied_to:
            continue
        if len(slot.shape) == 1:
            made[slot.name] = np.full(slot.shape, 0.0 if slot.name.endswith(".bias") else 1.0, np.float32)
        else:
            deviation = INITIAL_DEVIATION / (math.sqrt(2 * graph.hp.num_layers) if slot.name in inward else 1)
            made[slot.name] = (torch.randn(slot.shape, generator=generator) * deviation).numpy()
    return made


def make_adamw(
    parameters: Mapping[str, Tensor], *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """AdamW over named parameters. Decay is multiplied by the learning rate and applied to matrices alone."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=1e-8, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next update for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Mapping[str, Tensor], limit: float) -> float:
    """Scale all gradients so that their common norm is at most `limit`; returns the norm before."""
    return float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), limit))
