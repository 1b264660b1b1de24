"""A step of the native engine that can stop between any two operations.

It runs a list of instructions with nothing fused, whose bits are those of the fused one, over slots of its own. Most
values lie in a slot while they live; embeddings and logits are arrays here, keys and values are in the caches. Scores
and probabilities are nowhere while the step runs: attention is one instruction. Read, they are computed beside it, by
three instructions that only such a read or a write runs; once one is written, the last of them takes attention's place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.engine.base import MASKED, Array, Batch
from starscope.engine.passes import attention_of
from starscope.errors import DoesNotFitError
from starscope.graph import Graph, Op
from starscope.machine import bytes_text, free_memory

if TYPE_CHECKING:
    from starscope.engine.native_engine import Listed, NativeEngine

Piece = tuple[int, int, int, Any]  # of one sequence: its first row, new rows, cached positions, the module's cache
ASK_FOR = 1 << 28  # bytes: whether there is room for less is not asked


@dataclass(frozen=True)
class KeepPlan:
    """How a step that runs in one call keeps values: its list, and where each edge is then."""

    listed: Listed
    whole: list[tuple[int, int]]  # edge, array
    parts: list[tuple[int, int, int, int]]  # edge, array, first column, columns
    others: list[int]  # edges that come in, or are in a cache


def plan_to_keep(graph: Graph, edges: frozenset[int], keeping: Callable[[frozenset[int]], Listed]) -> KeepPlan | None:
    """The plan for some edges; None where one of them is nowhere in a step that does not stop. `keeping` gives the list
    that makes edges in arrays.
    """
    cached = {edge for edge in edges if attention_of(graph, edge)}
    if any(graph.edges[edge].per_sequence for edge in edges - cached):
        return None
    listed = keeping(edges - cached)
    compiled = listed.compiled
    whole, parts = [], []
    for edge, (number, column, cols) in compiled.kept.items():
        if compiled.widths[number] == cols and len(graph.edges[edge].axes) == 2:
            whole.append((edge, number))
        else:
            parts.append((edge, number, column, cols))
    return KeepPlan(listed, whole, parts, sorted(edges - compiled.kept.keys()))


class NativePass:
    """A step of the native engine, run by ranges of instructions. Implements `Pass`.

    `known`: the values that are there when operations [0, done) have run, by edge.
    """

    is_torch = False

    def __init__(self, engine: NativeEngine, batch: Batch, known: Mapping[int, Array], done: int) -> None:
        self.graph, self.batch, self.done = engine.graph, batch, done
        self._engine, self._listed, self._begun = engine, engine.split(), False
        self._compiled = self._listed.compiled
        self._rows, self._wanted = len(batch.positions), np.ascontiguousarray(batch.wanted, np.int64)
        parts = zip(batch.starts, batch.lengths, batch.pasts, batch.caches, strict=False)
        self._pieces = [(first, length, past, cache.stored) for first, length, past, cache in parts]
        self.logits = np.empty((len(batch.wanted), engine.graph.hp.vocab_size), np.float32)
        inputs = self._compiled.inputs
        self._arrays = [np.empty((self._rows, self._compiled.widths[i]), np.float32) for i in range(len(inputs))]
        self._arrays.append(self.logits)
        self._array_of = {one.edge: array for one, array in zip(inputs, self._arrays, strict=False)}
        self._array_of[self.graph.names["logits"]] = self.logits
        self._patterns: tuple[int | None, str] | None = None  # the block and op whose output is in the patterns' memory
        self._written: int | None = None  # the block whose attention goes on from there
        self._indices: dict[int, Array] = {}
        self._keeping: set[int] = set()
        self._kept: dict[int, Any] = {}
        for edge, value in known.items():
            if edge in self.graph.inputs.values():
                self._indices[edge] = value.copy()
            else:
                self.write(edge, value)

    @functools.cached_property
    def _buffers(self) -> Any:
        """Room for the values of this step alone, from when it has run to somewhere."""
        self._begun = True
        buffers = self._engine.new_buffers()
        buffers.fit(self._listed.code, self._rows)
        return buffers

    def run(self, stop: int) -> None:
        if self._keeping and stop == len(self.graph.ops) and self.done == 0 and not self._begun:
            plan = self._engine.plan_to_keep(frozenset(self._keeping))
            if plan is not None:
                self._run_whole(plan)
                return
        producers = (self.graph.producers[edge] for edge in self._keeping)
        made = {producer + 1 for producer in producers if producer is not None}
        for end in sorted({stop, *(end for end in made if self.done < end < stop)}):
            self._run(end)
            self.done = end
            if end in made:
                self._keep_outputs(end - 1)

    def _run_whole(self, plan: KeepPlan) -> None:
        """All of the step in one call, as `forward` does it, with the kept values in arrays."""
        listed = plan.listed
        compiled = listed.compiled
        for one in compiled.inputs:
            self._array_of[one.edge][:] = self._engine.weights.rows(one.table, self._indices[one.source])
        inputs = len(compiled.inputs)
        kept = [np.empty((self._rows, width), np.float32) for width in compiled.widths[inputs : compiled.arrays - 1]]
        arrays = [*self._arrays[:inputs], *kept, self.logits]
        self._engine.run_listed(
            listed,
            self._engine.buffers,
            0,
            len(compiled.instructions),
            self._rows,
            self._wanted,
            self._pieces,
            arrays,
        )
        self.done = len(self.graph.ops)
        for edge, number in plan.whole:
            self._kept[edge] = arrays[number]
        for edge, number, column, cols in plan.parts:
            part = arrays[number][:, column : column + cols]
            self._kept[edge] = part.reshape(self._shape(edge)).copy()  # whoever changes it changes nothing else
        for edge in plan.others:
            self._kept[edge] = self.read(edge)

    def _run(self, stop: int) -> None:
        """Up to `stop`, with nothing to keep before it."""
        for one in self._compiled.inputs:
            producer = self.graph.producers[one.edge]
            if producer is not None and self.done <= producer < stop:
                self._array_of[one.edge][:] = self._engine.weights.rows(one.table, self._indices[one.source])
        at = self.done
        for op in self.graph.ops[at:stop] if self._written is not None else ():
            if op.layer == self._written and op.kind in ("softmax", "mix"):
                self._execute(self._compiled.ends[at], self._compiled.ends[op.index])
                self._go_on(op)
                at = op.index + 1
        self._execute(self._compiled.ends[at], self._compiled.ends[stop])

    def _go_on(self, op: Op) -> None:
        """The softmax or mix of what was written into the patterns."""
        assert self._written is not None
        first = self._compiled.beside[self._written]
        if op.kind == "mix":
            self._execute(first + 2, first + 3)
            self._written = None
        elif self._patterns == (op.layer, "scores"):
            self._execute(first + 1, first + 2)
            self._patterns = (op.layer, "softmax")

    def _execute(self, first: int, last: int, pieces: Sequence[Piece] | None = None) -> None:
        pieces = self._pieces if pieces is None else pieces
        if first < last:
            self._engine.run_listed(
                self._listed, self._buffers, first, last, self._rows, self._wanted, pieces, self._arrays
            )

    def read(self, edge: int) -> Any:
        if edge in self._kept:
            return self._kept[edge]
        if edge in self._indices:
            return self._indices[edge].copy()
        cached = attention_of(self.graph, edge)
        if cached is not None:
            return [cache.read(*cached, 0, past + length) for _, length, past, cache in self._pieces]
        if "query" in self.graph.edges[edge].axes:
            self._compute(self._pattern_op(edge))
            return [self._buffers.read_pattern(*where) for where in self._pattern_places()]
        if edge in self._array_of:
            return self._array_of[edge].copy()
        view, cols = self._compiled.views[edge]
        shape = self._shape(edge)
        return self._buffers.read(view, shape[0], cols).reshape(shape)

    def read_rows(self, edge: int, rows: Sequence[Array]) -> list[Array]:
        """See `RowReader`. Neighbours among the queries are computed like a sequence of their own."""
        op = self._pattern_op(edge)
        if edge in self._kept or self._written is not None or self._patterns == (op.layer, op.kind):
            return [whole[:, some] for whole, some in zip(self.read(edge), rows, strict=True)]
        runs: list[tuple[int, int, Piece]] = []  # of each: the sequence, where it begins among its rows, and the piece
        for i, (some, (first, _, past, cache)) in enumerate(zip(rows, self._pieces, strict=True)):
            ends = [*(np.flatnonzero(np.diff(some) != 1) + 1).tolist(), len(some)] if len(some) else []
            for start, stop in zip([0, *ends], ends, strict=False):
                row = int(some[start])
                runs.append((i, start, (first + row, stop - start, past + row, cache)))
        if not runs:
            return [np.empty((self.graph.hp.num_heads, 0, past + n), np.float32) for _, n, past, _ in self._pieces]
        pieces = [piece for _, _, piece in runs]
        places = self._pattern_places(pieces)
        self._fit_patterns(places)
        first = self._compiled.beside[op.layer or 0]
        self._execute(first, first + (1 if op.kind == "scores" else 2), pieces)
        self._patterns = None  # those of the whole step have been there
        heads, unseen = self.graph.hp.num_heads, np.float32(MASKED if op.kind == "scores" else 0)
        parts = zip(rows, self._pieces, strict=True)
        made = [np.full((heads, len(some), past + n), unseen) for some, (_, n, past, _) in parts]
        for (i, start, (_, count, _, _)), where in zip(runs, places, strict=True):
            made[i][:, start : start + count, : where[-1]] = self._buffers.read_pattern(*where)
        return made

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
        elif "query" in self.graph.edges[edge].axes:
            self._write_patterns(edge, value)
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

    def finish(self) -> Any:
        self.batch.advance()
        return self.logits

    def _pattern_op(self, edge: int) -> Op:
        producer = self.graph.producers[edge]
        assert producer is not None
        return self.graph.ops[producer]

    def _compute(self, op: Op) -> None:
        """Have the scores or probabilities that are an op's output in the patterns' memory."""
        if self._patterns == (op.layer, op.kind):
            return
        self._fit_patterns(self._pattern_places())
        first = self._compiled.beside[op.layer or 0]
        if self._patterns != (op.layer, "scores"):
            self._execute(first, first + 1)
        if op.kind == "softmax":
            self._execute(first + 1, first + 2)
        self._patterns = (op.layer, op.kind)

    def _write_patterns(self, edge: int, value: Any) -> None:
        op, places = self._pattern_op(edge), self._pattern_places()
        given = [np.ascontiguousarray(one, np.float32) for one in value]
        for one, (_, *shape) in zip(given, places, strict=True):
            if one.shape != tuple(shape):
                raise ValueError(f"a pattern is {list(one.shape)}; expected {list(shape)}.")
        self._fit_patterns(places)
        for one, (offset, *_) in zip(given, places, strict=True):
            self._buffers.write_pattern(offset, one)
        self._patterns, self._written = (op.layer, op.kind), op.layer

    def _pattern_places(self, pieces: Sequence[Piece] | None = None) -> list[tuple[int, int, int, int]]:
        """Of each sequence: where its pattern begins, heads, new rows and keys."""
        places, heads, at = [], self.graph.hp.num_heads, 0
        for _, length, past, _ in self._pieces if pieces is None else pieces:
            places.append((at, heads, length, past + length))
            at += heads * length * (past + length)
        return places

    def _fit_patterns(self, places: Sequence[tuple[int, int, int, int]]) -> None:
        floats = sum(heads * rows * keys for _, heads, rows, keys in places)
        if 4 * floats > ASK_FOR:
            free = free_memory()
            if 4 * floats > free:
                raise DoesNotFitError(
                    f"the attention patterns of a block need {bytes_text(4 * floats)} of memory; "
                    f"{bytes_text(free)} are free.",
                    hint="Run the prompt in shorter pieces.",
                )
        self._buffers.fit_patterns(floats)

    def _keep_outputs(self, op: int) -> None:
        for edge in self._keeping.intersection(self.graph.ops[op].outputs):
            self._kept[edge] = self.read(edge)

    def _shape(self, edge: int) -> tuple[int, ...]:
        rows, *rest = self.graph.edges[edge].axes
        return (len(self._wanted) if rows == "wanted" else self._rows, *(int(axis) for axis in rest))
