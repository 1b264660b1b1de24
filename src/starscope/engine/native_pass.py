"""A step of the native engine that can stop between any two operations.

It runs a list of instructions with nothing fused, whose bits are those of the fused one, over slots of its own. Most
values lie in a slot while they live; embeddings and logits are arrays here, keys and values are in the caches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.engine.base import Array, Batch
from starscope.engine.passes import attention_of

if TYPE_CHECKING:
    from starscope.engine.native_engine import NativeEngine


class NativePass:
    """A step of the native engine, run by ranges of instructions. Implements `Pass`.

    `known`: the values that are there when operations [0, done) have run, by edge.
    """

    is_torch = False

    def __init__(self, engine: NativeEngine, batch: Batch, known: Mapping[int, Array], done: int) -> None:
        self.graph, self.batch, self.done = engine.graph, batch, done
        self._engine, self._listed, self._buffers = engine, engine.split(), engine.new_buffers()
        self._compiled = self._listed.compiled
        self._rows, self._wanted = len(batch.positions), np.ascontiguousarray(batch.wanted, np.int64)
        self._buffers.fit(self._listed.code, self._rows)
        parts = zip(batch.starts, batch.lengths, batch.pasts, batch.caches, strict=False)
        self._pieces = [(first, length, past, cache.stored) for first, length, past, cache in parts]
        self.logits = np.empty((len(batch.wanted), engine.graph.hp.vocab_size), np.float32)
        inputs = self._compiled.inputs
        self._arrays = [np.empty((self._rows, self._compiled.widths[i]), np.float32) for i in range(len(inputs))]
        self._arrays.append(self.logits)
        self._array_of = {one.edge: array for one, array in zip(inputs, self._arrays, strict=False)}
        self._array_of[self.graph.names["logits"]] = self.logits
        self._indices: dict[int, Array] = {}
        self._keeping: set[int] = set()
        self._kept: dict[int, Any] = {}
        for edge, value in known.items():
            if edge in self.graph.inputs.values():
                self._indices[edge] = value.copy()
            else:
                self.write(edge, value)

    def run(self, stop: int) -> None:
        producers = (self.graph.producers[edge] for edge in self._keeping)
        made = {producer + 1 for producer in producers if producer is not None}
        for end in sorted({stop, *(end for end in made if self.done < end < stop)}):
            self._run(end)
            self.done = end
            if end in made:
                self._keep_outputs(end - 1)

    def _run(self, stop: int) -> None:
        """Up to `stop`, with nothing to keep before it."""
        for one in self._compiled.inputs:
            producer = self.graph.producers[one.edge]
            if producer is not None and self.done <= producer < stop:
                self._array_of[one.edge][:] = self._engine.weights.rows(one.table, self._indices[one.source])
        self._execute(self._compiled.ends[self.done], self._compiled.ends[stop])

    def _execute(self, first: int, last: int) -> None:
        if first < last:
            self._engine.run_listed(
                self._listed, self._buffers, first, last, self._rows, self._wanted, self._pieces, self._arrays
            )

    def read(self, edge: int) -> Any:
        if edge in self._kept:
            value: Any = self._kept[edge]
            return [one.copy() for one in value] if isinstance(value, list) else value.copy()
        if edge in self._indices:
            return self._indices[edge].copy()
        cached = attention_of(self.graph, edge)
        if cached is not None:
            return [cache.read(*cached, 0, past + length) for _, length, past, cache in self._pieces]
        if edge in self._array_of:
            return self._array_of[edge].copy()
        view, cols = self._compiled.views[edge]
        shape = self._shape(edge)
        return self._buffers.read(view, shape[0], cols).reshape(shape)

    def write(self, edge: int, value: Any) -> None:
        cached = attention_of(self.graph, edge)
        if edge in self._indices:
            self._indices[edge][:] = value
        elif cached is not None:
            for (_, length, past, cache), rows in zip(self._pieces, value, strict=True):
                given = np.ascontiguousarray(rows, np.float32)
                if given.shape[1] != past + length:
                    raise ValueError(f"{given.shape[1]} positions were given; expected {past + length}.")
                cache.write(*cached, 0, given)
        elif edge in self._array_of:
            self._array_of[edge][:] = np.asarray(value, np.float32).reshape(self._array_of[edge].shape)
        else:
            view, cols = self._compiled.views[edge]
            given = np.asarray(value, np.float32).reshape(self._shape(edge))
            self._buffers.write(view, np.ascontiguousarray(given.reshape(-1, cols)))
        if edge in self._kept:
            del self._kept[edge]
            self._kept[edge] = self.read(edge)

    def keep(self, edges: Collection[int]) -> None:
        for edge in edges:
            producer = self.graph.producers[edge]
            if producer is not None and producer >= self.done:
                self._keeping.add(edge)
            else:
                self._kept[edge] = self.read(edge)

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        self.done = stop
        for edge, value in values.items():
            # What nothing reads any more may have no place of its own.
            if self.graph.last_use(edge) >= stop or edge in self._array_of or attention_of(self.graph, edge):
                self.write(edge, value)
            if edge in self._keeping:
                self._kept[edge] = [one.copy() for one in value] if isinstance(value, list) else value.copy()

    def finish(self) -> None:
        self.batch.advance()

    def _keep_outputs(self, op: int) -> None:
        for edge in self._keeping.intersection(self.graph.ops[op].outputs):
            self._kept[edge] = self.read(edge)

    def _shape(self, edge: int) -> tuple[int, ...]:
        rows, *rest = self.graph.edges[edge].axes
        return (len(self._wanted) if rows == "wanted" else self._rows, *(int(axis) for axis in rest))
