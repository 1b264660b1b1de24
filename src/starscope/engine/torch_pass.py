"""A step of the torch engine that can stop between operations, with gradients when asked.

Scores, softmax and mix run as one call unless a value between them is written: what is read there is computed beside
it, from the same queries and keys. With gradients nothing is fused, so that what is read is what the step goes on with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from starscope.cache import Cache
from starscope.engine.base import MASKED, Array, Batch, input_values
from starscope.engine.passes import attention_of
from starscope.engine.torch_engine import KERNELS, Fusion, memory_errors
from starscope.engine.torch_kernels import unseen

if TYPE_CHECKING:
    from starscope.engine.torch_engine import TorchEngine


class GradCache(Cache):
    """Keys and values of one sequence that gradients flow through: every step joins new ones, nothing is overwritten.

    `half`: kept as float16, which the gradient passes over.
    """

    def __init__(self, num_layers: int, context_length: int, *, half: bool) -> None:
        super().__init__(context_length)
        self._half = half
        self._stored: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]

    def append(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.append`."""
        old = self._stored[layer].get(part)
        new = self._as_kept(rows).transpose(0, 1)
        joined = new if old is None else torch.cat([old[:, : self.length], new], dim=1)
        self._stored[layer][part] = joined
        return joined

    def replace(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.replace`."""
        self._stored[layer][part] = kept = self._as_kept(rows)
        return kept

    def _as_kept(self, rows: Tensor) -> Tensor:
        return _Half.apply(rows) if self._half else rows  # type: ignore[no-untyped-call]


class _Half(torch.autograd.Function):
    """Rounding to what float16 holds; the gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.float16).to(x.dtype)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class TorchPass:
    """A step of the torch engine. Implements `Pass`. `grad`: its values are nodes of an autograd graph."""

    is_torch = True

    def __init__(self, engine: TorchEngine, batch: Batch, *, grad: bool) -> None:
        self.graph, self.batch, self.grad = engine.graph, batch, grad
        self.device, self.dtype = engine.device, engine.dtype
        self._engine = engine
        known, self.done = input_values(engine.graph, batch)
        with self._running():
            self._step = engine.step(batch)
            self._values: dict[int, Any] = {
                i: torch.from_numpy(np.ascontiguousarray(v)).to(engine.device) for i, v in known.items()
            }
        self._ran = self.done  # `done` is ahead of it inside an attention that is to run as one call
        self._kept: set[int] = set()
        self._beside: dict[int, list[Tensor]] = {}
        self._written: set[int] = set()
        self._inside = {} if grad else _hidden_edges(engine.fusions)
        if grad:
            self._differentiate()

    def run(self, stop: int) -> None:
        with self._running():
            while self._ran < stop:
                fusion = next((f for f in self._engine.fusions.values() if f.first <= self._ran <= f.last), None)
                if fusion is None or self.grad:
                    self._run_to(self._next_fusion(stop))
                elif stop <= fusion.last:
                    break
                else:
                    self._attend(fusion)
        self.done = stop

    def _next_fusion(self, stop: int) -> int:
        if self.grad:
            return stop
        return min([stop, *(f.first for f in self._engine.fusions.values() if f.first > self._ran)])

    def _run_to(self, stop: int, keep: Collection[int] = ()) -> None:
        keep = {*self._kept, *keep} - self._inside.keys()  # those are beside
        self._engine.run(self._step, self._values, self._ran, stop, keep, fused=not self.grad)
        self._ran = stop

    def _attend(self, fusion: Fusion) -> None:
        if not self._written.isdisjoint(fusion.hidden):
            *_, v = fusion.inputs
            mix = self.graph.ops[fusion.last]
            pattern = self._pattern(fusion, fusion.hidden[1])
            self._values[fusion.output] = KERNELS["mix"](
                self._engine.weights, self._step, mix, [pattern, self._values[v]]
            )
            self._ran = fusion.last + 1
        else:
            for edge in self._kept.intersection(fusion.hidden):
                self._pattern(fusion, edge)
            self._run_to(fusion.last + 1)
        for edge in fusion.hidden:
            if edge not in self._kept:
                self._beside.pop(edge, None)

    def _pattern(self, fusion: Fusion, edge: int) -> list[Tensor]:
        """Scores or probabilities, computed from what they are made of unless they have been already."""
        if edge not in self._beside:
            op = self.graph.ops[self.graph.producers[edge] or 0]
            inputs = [self._pattern(fusion, i) if i in fusion.hidden else self._values[i] for i in op.inputs]
            self._beside[edge] = KERNELS[op.kind](self._engine.weights, self._step, op, inputs)
        return self._beside[edge]

    def read(self, edge: int) -> Any:
        with self._running():
            fusion = self._inside.get(edge)
            value = self._values[edge] if fusion is None else self._pattern(fusion, edge)
            return [one[0].clone() for one in value] if isinstance(value, list) else value.clone()

    def read_rows(self, edge: int, rows: Sequence[Array]) -> list[Tensor]:
        """See `RowReader`. Without gradients nothing else is computed; with them the whole is there anyway."""
        fusion = self._inside.get(edge)
        if fusion is None or edge in self._beside or not self._written.isdisjoint(fusion.hidden):
            return [whole[:, some] for whole, some in zip(self.read(edge), rows, strict=True)]
        q, k, _ = fusion.inputs
        attrs, made = self.graph.ops[fusion.first].attrs, []
        with self._running():
            parts = zip(self._step.groups, self._step.split(self._values[q]), self._values[k], rows, strict=True)
            for group, queries, keys, some in parts:
                picked = torch.from_numpy(np.asarray(some, np.int64)).to(self.device)
                kv_heads, key, dim = keys[0].shape
                at = queries[0, picked].transpose(0, 1)  # [num_heads n dim]
                s = (at.reshape(kv_heads, -1, dim) @ keys[0].transpose(-1, -2)).reshape(*at.shape[:2], key)
                s = (s * attrs["scale"]).masked_fill(unseen(group.past + picked, key, attrs["window"]), MASKED)
                made.append(s if edge == fusion.hidden[0] else s.softmax(-1))  # no row is masked throughout
        return made

    def write(self, edge: int, value: Any) -> None:
        with self._running():
            if isinstance(value, list):
                value = [self._as_value(one) for one in value]
                cached = attention_of(self.graph, edge)
                if cached is not None:
                    pairs = zip(self._step.groups, value, strict=True)
                    value = [group.cache.replace(*cached, rows) for group, rows in pairs if group.cache is not None]
                value = [one[None] for one in value]
            else:
                value = self._as_value(value)
            if edge in self._inside:
                self._beside[edge] = value
                self._written.add(edge)
            else:
                self._values[edge] = value

    def _as_value(self, value: Any) -> Tensor:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        tensor = tensor.to(self._engine.device)
        return tensor.to(self._engine.dtype) if tensor.is_floating_point() else tensor

    def keep(self, edges: Collection[int]) -> None:
        self._kept.update(edges)

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        self._values.update({edge: self._as_value(value) for edge, value in values.items()})
        self.done = self._ran = stop

    def finish(self) -> Any:
        self.batch.advance()
        return self._values[self.graph.names["logits"]]

    def _differentiate(self) -> None:
        """Begin the graph where values are floating point first: at the embeddings."""
        with self._running():
            if self.done == 0:
                first = self.graph.ops[0]
                self._run_to(1, keep=self.graph.inputs.values())
                self.done = 1
                start = first.outputs[0]
            else:
                start = self.graph.ops[0].outputs[0]
            self._values[start] = self._values[start].detach().requires_grad_()

    @contextmanager
    def _running(self) -> Iterator[None]:
        subclasses = torch._C.DisableTorchFunctionSubclass()
        recording = torch.inference_mode(mode=False) if self.grad else nullcontext()  # whatever mode the caller is in
        with memory_errors(self._engine.device), recording, torch.set_grad_enabled(self.grad), subclasses:
            yield


def _hidden_edges(fusions: Mapping[int, Fusion]) -> dict[int, Fusion]:
    return {edge: fusion for fusion in fusions.values() for edge in fusion.hidden}


def grad_caches(engine: TorchEngine, lengths: Sequence[int]) -> Sequence[Cache]:
    """Caches for a step with gradients, of prompts of these lengths."""
    layers, half = engine.graph.hp.num_layers, engine.half_cache
    caches = [GradCache(layers, engine.context_length, half=half) for _ in lengths]
    for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        cache.row, cache.prompt_length = row, length
    return caches
