"""One step of a batch at one place: values come in, operations run, values go out.

A value moves in one form whatever engines there are: torch tensors without the group's axis where either side is
torch's, NumPy arrays otherwise; a list, one for each sequence, for values that exist once a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from starscope.engine.base import Array, Batch, Engine
from starscope.engine.numpy_engine import NumpyEngine
from starscope.engine.split.compiler import NativePart
from starscope.placement import Segment


class Step(Protocol):
    """The values of one step at one place. `known`: the graph's inputs, or what stands in for them."""

    def put(self, edge: int, value: Any) -> None:
        """Take a value that was made elsewhere."""

    def run(self, segment: Segment) -> None:
        """Run operations whose inputs are all here."""

    def take(self, edge: int) -> Any:
        """A value for somebody else, who does not change it."""

    def drop(self, edge: int) -> None:
        """Let go of a value; of one that is not here too."""


def make_step(engine: Engine, batch: Batch, known: Mapping[int, Array], *, whole: bool = False) -> Step:
    """A step of an engine's own kind. `whole`: the engine has one segment of it."""
    if isinstance(engine, NativePart):
        return NativeStep(engine, batch, known)
    if isinstance(engine, NumpyEngine):
        return NumpyStep(engine, batch, known)
    from starscope.engine.split.torch_step import TorchStep

    return TorchStep(engine, batch, known, whole=whole)  # type: ignore[arg-type]  # what is left is a torch engine


def as_array(value: Any) -> Any:
    """A value, or each of a list, as a NumPy array on the host."""
    if isinstance(value, list):
        return [as_array(one) for one in value]
    return value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()


class NumpyStep:
    """A step of the NumPy engine."""

    def __init__(self, engine: NumpyEngine, batch: Batch, known: Mapping[int, Array]) -> None:
        self._engine, self._batch = engine, batch
        self._values: dict[int, Any] = dict(known)

    def put(self, edge: int, value: Any) -> None:
        self._values[edge] = as_array(value)

    def run(self, segment: Segment) -> None:
        for start, stop in segment.ranges:
            self._engine.run(self._batch, self._values, start, stop, segment.keep)

    def take(self, edge: int) -> Any:
        return self._values[edge]

    def drop(self, edge: int) -> None:
        self._values.pop(edge, None)


class NativeStep:
    """A step of the native engine's part. `is_split`: by the list in which nothing is fused."""

    def __init__(self, engine: NativePart, batch: Batch, known: Mapping[int, Array], *, is_split: bool = False) -> None:
        self._engine, self._known, self._rows = engine, known, len(batch.positions)
        self._listed = engine.split() if is_split else engine.plain
        self._compiled = self._listed.compiled
        self._wanted = np.ascontiguousarray(batch.wanted, np.int64)
        parts = zip(batch.starts, batch.lengths, batch.pasts, batch.caches, strict=False)
        self._pieces = [(first, length, past, cache.stored) for first, length, past, cache in parts]
        widths, inputs = self._compiled.widths, self._compiled.inputs
        self._arrays = [np.empty((self._rows, widths[i]), np.float32) for i in range(len(inputs))]
        self._logits = np.empty((len(self._wanted), engine.graph.hp.vocab_size), np.float32)
        self._arrays.append(self._logits)
        self._out: dict[int, Array] = {}
        self._buffers = engine.buffers
        self._buffers.fit(self._listed.code, self._rows)

    def put(self, edge: int, value: Any) -> None:
        if edge in self._known:  # embeddings that were given: `run` has them in their array
            self._out[edge] = as_array(value)
            return
        view, cols = self._compiled.views[edge]
        self._buffers.write(view, np.ascontiguousarray(as_array(value), np.float32).reshape(-1, cols))

    def run(self, segment: Segment) -> None:
        graph, ends = self._engine.graph, self._compiled.ends
        for number, one in enumerate(self._compiled.inputs):
            if one.edge in self._known:
                self._arrays[number][:] = self._known[one.edge]
            elif graph.producers[one.edge] in segment.ops:
                self._arrays[number][:] = self._engine.weights.rows(one.table, self._known[one.source])
        first, last = ends[segment.ops[0]], ends[segment.ops[-1] + 1]
        if first < last:
            self._engine.run_listed(
                self._listed, self._buffers, first, last, self._rows, self._wanted, self._pieces, self._arrays
            )
        for edge in segment.leave:
            self._out[edge] = self._read(edge)

    def _read(self, edge: int) -> Array:
        for one, array in zip(self._compiled.inputs, self._arrays, strict=False):
            if one.edge == edge:
                return array
        view, cols = self._compiled.views[edge]
        first, *rest = self._engine.graph.edges[edge].axes
        rows = len(self._wanted) if first == "wanted" else self._rows
        found: Array = self._buffers.read(view, rows, cols).reshape(rows, *(int(axis) for axis in rest))
        return found

    def take(self, edge: int) -> Any:
        return self._logits if edge == self._engine.graph.names["logits"] else self._out[edge]

    def drop(self, edge: int) -> None:
        self._out.pop(edge, None)
