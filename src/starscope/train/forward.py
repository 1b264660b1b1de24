"""The loss of a batch of sequences of one length, through the recorded graph: what training differentiates.

The operations are the torch engine's, but for those in `kernels.py`. With `recompute`, what is inside of a block is
let go and computed again when its gradient is needed: a third more arithmetic, much less memory, the same bits. Over a
large vocabulary the logits are never all there.

    forward = Forward(engine, recompute=False)
    forward.loss_sum(ids, pad=None).backward()      # ids [n context_length+1]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from starscope.engine.torch_engine import KERNELS, Fusion, Group, Step, TorchEngine
from starscope.graph import Graph, Op
from starscope.train.kernels import IGNORED, attend, linear_bfloat16, linear_loss

LOGIT_BYTES = 64 << 20  # float32 logits of a micro-batch that are held; more are made in parts


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
    """Logits and losses of `engine`'s model. `dtype`: of the products' operands, float32 or bfloat16."""

    def __init__(
        self,
        engine: TorchEngine,
        *,
        recompute: bool = False,
        dtype: torch.dtype = torch.float32,
        logit_bytes: int = LOGIT_BYTES,
    ) -> None:
        self.engine, self.recompute, self.dtype, self._logit_bytes = engine, recompute, dtype, logit_bytes
        self.compiled: Callable[..., Tensor] | None = None  # `loss`, made ready for batches of one shape
        self.segments = segments(engine.graph)
        self._weights = {name: weight for name, weight in engine.weights.items() if isinstance(weight, Tensor)}
        self._low: dict[str, Tensor] = {}  # the linear layers' weights in bfloat16

    def logits(self, ids: Tensor) -> Tensor:
        """`[n seq]` ids -> float32 `[n seq vocab_size]`."""
        graph = self.engine.graph
        logits: Tensor = self._run(ids, len(graph.ops))[graph.names["logits"]]
        return logits.to(self.engine.dtype).reshape(*ids.shape, -1)

    def loss_sum(self, batch: Tensor, pad: int | None, loss: Callable[..., Tensor] | None = None) -> Tensor:
        """The summed negative log-likelihood in nats of `[n context_length+1]` ids, all but the first and padding.

        Through `loss`, or `compiled`, where there is one.
        """
        targets = batch[:, 1:] if pad is None else batch[:, 1:].masked_fill(batch[:, 1:] == pad, IGNORED)
        return (loss or self.compiled or self.loss)(batch[:, :-1], targets)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The same of `[n seq]` targets behind `[n seq]` ids; one that is -100 does not count."""
        graph = self.engine.graph
        last = graph.ops[-1]
        makes_logits = last.kind == "linear" and last.outputs == (graph.names["logits"],) and len(last.weights) == 1
        if makes_logits and 4 * ids.numel() * graph.hp.vocab_size > self._logit_bytes:
            x = self._run(ids, last.index)[last.inputs[0]]
            weight = self._weights[last.weights[0]]
            return linear_loss(x, weight, targets.flatten(), self.dtype if self._is_low else weight.dtype)
        logits = self.logits(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    @property
    def _is_low(self) -> bool:
        return self.dtype == torch.bfloat16

    def _run(self, ids: Tensor, stop: int) -> Mapping[int, Any]:
        """The edges that are left when the ops before `stop` have run."""
        if self._is_low:
            self._round_weights()
        graph = self.engine.graph
        n, seq = ids.shape
        step = Step([Group(n, seq, 0, None)], None)
        values: dict[int, Any] = {
            graph.inputs["input_ids"]: ids.flatten(),
            graph.inputs["positions"]: torch.arange(seq, device=ids.device).repeat(n),
        }
        for segment in self.segments:
            end = min(segment.stop, stop)
            outputs = segment.outputs if end == segment.stop else graph.ops[end].inputs

            def run(
                *inputs: Any, segment: Segment = segment, end: int = end, outputs: tuple[int, ...] = outputs
            ) -> tuple[Any, ...]:
                inside = dict(zip(segment.inputs, inputs, strict=True))
                self._run_ops(step, inside, segment.start, end, outputs)
                return tuple(inside[edge] for edge in outputs)

            inputs = [values[edge] for edge in segment.inputs]
            again = self.recompute and segment.is_block and torch.is_grad_enabled()
            made = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False) if again else run(*inputs)
            values.update(zip(outputs, made, strict=True))
            for edge in segment.inputs:
                if graph.last_use(edge) < end and edge not in outputs:
                    del values[edge]
        return values

    @torch.no_grad()
    def _round_weights(self) -> None:
        """Make the copies in bfloat16 that this pass and its gradients read."""
        weights = self._weights
        if not self._low:
            names = {name for op in self.engine.graph.ops if op.kind == "linear" for name in op.weights}
            self._low = {name: torch.empty_like(weights[name], dtype=torch.bfloat16) for name in sorted(names)}
        torch._foreach_copy_(list(self._low.values()), [weights[name].detach() for name in self._low])

    def _run_ops(self, step: Step, values: dict[int, Any], start: int, stop: int, keep: tuple[int, ...]) -> None:
        """Ops `start` to `stop` over `values`; an edge is let go after its last use: what autograd needs, it holds."""
        graph, index = self.engine.graph, start
        while index < stop:
            op = graph.ops[index]
            fusion = self.engine.fusions.get(index)
            if fusion is not None:
                values[fusion.output] = self._attention(step, op, fusion, values)
                used, index = {*op.inputs, *fusion.inputs}, fusion.last
            else:
                made = self._one(step, op, [values[edge] for edge in op.inputs])
                values.update(zip(op.outputs, made if len(op.outputs) > 1 else [made], strict=True))
                used = set(op.inputs)
            for edge in used:
                if graph.last_use(edge) <= index and edge not in keep:
                    del values[edge]
            index += 1

    def _attention(self, step: Step, op: Op, fusion: Fusion, values: Mapping[int, Any]) -> Tensor:
        queries, (keys,), (held,) = (values[edge] for edge in fusion.inputs)
        [rows] = step.split(queries)
        return attend(rows, keys, held, op.attrs["scale"], op.attrs["window"])

    def _one(self, step: Step, op: Op, inputs: list[Any]) -> Any:
        if op.kind == "linear" and self._is_low:
            weight, bias = op.weights[0], op.weights[1] if len(op.weights) > 1 else None
            full, low = self._weights, self._low
            offsets = (None, None) if bias is None else (full[bias], low[bias])
            return linear_bfloat16(inputs[0], full[weight], offsets[0], low[weight], offsets[1])
        return KERNELS[op.kind](self.engine.weights, step, op, inputs)
