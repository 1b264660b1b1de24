"""The loss of a batch of sequences of one length, through the recorded graph: what training differentiates.

The operations are the torch engine's. Two things are done in other ways than there. With `recompute`, what is inside
of a block is let go and computed again when its gradient is needed: more arithmetic, much less memory, the same bits.
Over a large vocabulary the logits are never all there: the loss and its gradient are made for some rows at a time.

    forward = Forward(engine, recompute=False)
    forward.loss_sum(ids, pad=None).backward()      # ids [n context_length+1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from starscope.engine.torch_engine import Group, Step, TorchEngine
from starscope.graph import Graph

IGNORED = -100  # a target that is no target


@dataclass(frozen=True)
class Segment:
    """Operations `start` to `stop`: those of one block, or those between blocks. Edges in, edges out."""

    start: int
    stop: int
    is_block: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def segments(graph: Graph) -> list[Segment]:
    """The list cut where blocks begin and end."""
    cuts = [0, *(i for i in range(1, len(graph.ops)) if graph.ops[i].layer != graph.ops[i - 1].layer), len(graph.ops)]
    logits = graph.names["logits"]
    made = []
    for start, stop in pairwise(cuts):
        produced = {edge for op in graph.ops[start:stop] for edge in op.outputs}
        used = {edge for op in graph.ops[start:stop] for edge in op.inputs}
        leaving = sorted(edge for edge in produced if edge == logits or graph.last_use(edge) >= stop)
        is_block = graph.ops[start].layer is not None
        made.append(Segment(start, stop, is_block, tuple(sorted(used - produced)), tuple(leaving)))
    return made


class Forward:
    """Logits and losses of `engine`'s model. `recompute` trades a third more arithmetic for memory."""

    def __init__(self, engine: TorchEngine, *, recompute: bool = False) -> None:
        self.engine, self.recompute = engine, recompute
        self.segments = segments(engine.graph)

    def logits(self, ids: Tensor) -> Tensor:
        """`[n seq]` ids -> `[n seq vocab_size]`."""
        return self._run(ids)[self.engine.graph.names["logits"]].reshape(*ids.shape, -1)  # type: ignore[no-any-return]

    def loss_sum(self, batch: Tensor, pad: int | None) -> Tensor:
        """The summed negative log-likelihood in nats of `[n context_length+1]` ids, all but the first and padding."""
        targets = batch[:, 1:] if pad is None else batch[:, 1:].masked_fill(batch[:, 1:] == pad, IGNORED)
        logits = self.logits(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def _run(self, ids: Tensor) -> Mapping[int, Any]:
        """The edges that are left when the whole list has run."""
        engine, graph = self.engine, self.engine.graph
        n, seq = ids.shape
        step = Step([Group(n, seq, 0, None)], None)
        values: dict[int, Any] = {
            graph.inputs["input_ids"]: ids.flatten(),
            graph.inputs["positions"]: torch.arange(seq, device=ids.device).repeat(n),
        }
        for segment in self.segments:

            def run(*inputs: Any, segment: Segment = segment) -> tuple[Any, ...]:
                inside = dict(zip(segment.inputs, inputs, strict=True))
                engine.run(step, inside, segment.start, segment.stop, keep=segment.outputs)
                return tuple(inside[edge] for edge in segment.outputs)

            inputs = [values[edge] for edge in segment.inputs]
            again = self.recompute and segment.is_block and torch.is_grad_enabled()
            outputs = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False) if again else run(*inputs)
            values.update(zip(segment.outputs, outputs, strict=True))
            for edge in segment.inputs:
                if graph.last_use(edge) < segment.stop:
                    del values[edge]
        return values
