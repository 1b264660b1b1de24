"""One step of a torch engine at one place, and how values move to its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from starscope.engine.base import Array, Batch
from starscope.engine.gpu.devices import Ways, memory_errors
from starscope.engine.torch_engine import Step, TorchEngine
from starscope.engine.weights import Weights
from starscope.graph import Graph
from starscope.placement import HOST, Segment


class TorchPart(TorchEngine):
    """The torch engine for a part of a graph: attention is one call where all of it is here."""

    def reserve(self, count: int) -> None:
        """Take so many bytes on the device and leave them with torch's allocator: if there is no room, it shows now."""
        with memory_errors(self.device, "what a step needs besides weights, keys and values", count):
            torch.empty(count, dtype=torch.uint8, device=torch.device(self.device))


def make_torch_part(
    graph: Graph,
    weights: Weights,
    own: Collection[int],
    device: str,
    *,
    like: str,
    context_length: int,
    threads: int | None,
) -> TorchPart:
    """A torch engine that has some operations. On a CPU that stands for a device `like` another, it does as there."""
    ways = None
    if device == HOST and not like.startswith(HOST):
        ways = Ways(stored=True, static=True, recorded=True)
    part = TorchPart(graph, weights, device=device, context_length=context_length, threads=threads, ways=ways)
    part.fusions = {
        first: fusion
        for first, fusion in part.fusions.items()
        if all(op in own for op in range(first, fusion.last + 1))
    }
    return part


class TorchStep:
    """A step of a torch engine on its device. `whole`: all that it runs of a step is one segment, which may be recorded
    and replayed.
    """

    def __init__(self, engine: TorchEngine, batch: Batch, known: Mapping[int, Array], *, whole: bool) -> None:
        self._engine, self._device = engine, torch.device(engine.device)
        self._batch = batch
        self._step = engine.step(batch) if batch.caches else Step([], None)  # without caches: nothing attends
        recorder = engine.recorder if whole else None
        self._recorder = recorder if recorder is not None and recorder.fits(batch) else None
        self._known = known
        self._values: dict[int, Any] = {}

    def put(self, edge: int, value: Any) -> None:
        with memory_errors(self._engine.device):
            if isinstance(value, list):  # here a sequence is a group of one
                self._values[edge] = [self._moved(one)[None] for one in value]
            else:
                self._values[edge] = self._moved(value)

    def _moved(self, value: Any) -> Tensor:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        tensor = tensor.to(self._device)
        return tensor.to(self._engine.dtype) if tensor.is_floating_point() else tensor

    def run(self, segment: Segment) -> None:
        for number in segment.ops:
            for edge in self._known.keys() & set(self._engine.graph.ops[number].inputs):
                if edge not in self._values:
                    self.put(edge, self._known[edge])
        for start, stop in segment.ranges:
            if self._recorder is not None:
                self._recorder.run(self._batch, self._values, start, stop, segment.keep)
            else:
                self._engine.run(self._step, self._values, start, stop, segment.keep)

    def take(self, edge: int) -> Any:
        value = self._values[edge]
        return [one[0] for one in value] if isinstance(value, list) else value

    def drop(self, edge: int) -> None:
        self._values.pop(edge, None)
