"""How a model starts and how it learns: initial weights and AdamW with decoupled decay.

Matrices start as normal(0, 0.02), those that write into the residual stream divided by sqrt(2 · num_layers), so that
its variance does not grow with depth; norms start as the identity and biases at 0. The first loss is then close to
ln(vocab_size). Decay pulls matrices towards 0, never norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from starscope.errors import UsageError
from starscope.graph import Graph

INITIAL_DEVIATION = 0.02
INITS = ("scaled", "xavier")


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
    """Scale all gradients so that their common norm is at most `limit` (0: no limit); returns the norm before."""
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return float(norm)
