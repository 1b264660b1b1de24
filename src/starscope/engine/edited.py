"""Steps with edits: a pass that stops behind each edited value and changes it, and an engine whose every step does so.

    one = EditedPass(engine.begin([ids]), edits)     # run, read and write as in any pass; edits come in between
    engine = EditedEngine(engine, edits)             # an engine like any other

An edit comes right behind a value's producer, so whoever reads the value in a trace sees it edited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from starscope.cache import Cache
from starscope.engine.base import Array, Batch, EditRows, Engine, Sequences, StepEdits, Wanted
from starscope.engine.passes import Pass, attention_of, read_rows
from starscope.graph import Graph


class EditedPass:
    """A pass with edits in it. Implements `Pass`."""

    def __init__(self, one: Pass, edits: StepEdits) -> None:
        self.graph, self.batch, self.is_torch = one.graph, one.batch, one.is_torch
        self.inner, self.done = one, one.done
        self._changes: dict[int, dict[int, Sequence[EditRows]]] = {}  # made -> edge -> changes
        found = edits.of_step(one.batch, 0, len(one.batch.positions))
        for edge in sorted(edits.edges):
            # Patterns that any step changes are written in all: the way that attention goes is no step's own.
            if edge in found or "query" in one.graph.edges[edge].axes:
                producer = one.graph.producers[edge]
                assert producer is not None, "only what an operation makes is edited"
                self._changes.setdefault(producer + 1, {})[edge] = found.get(edge, ())
        for made in [made for made in self._changes if made <= one.done]:  # given instead of made: embeddings
            self._change(made)

    def run(self, stop: int) -> None:
        for made in sorted(made for made in self._changes if self.done < made <= stop):
            self.inner.run(made)
            self._change(made)
        if self.inner.done < stop:
            self.inner.run(stop)
        self.done = stop

    def _change(self, made: int) -> None:
        for edge, changes in self._changes[made].items():
            self.inner.write(edge, changed(self.graph, self.batch, edge, self.inner.read(edge), changes))

    def read(self, edge: int) -> Any:
        return self.inner.read(edge)

    def read_rows(self, edge: int, rows: Sequence[Array]) -> list[Any]:
        return read_rows(self.inner, edge, rows)

    def write(self, edge: int, value: Any) -> None:
        self.inner.write(edge, value)

    def keep(self, edges: Collection[int]) -> None:
        self.inner.keep(edges)

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        self.inner.skip(stop, values)
        self.done = stop

    def finish(self) -> Any:
        return self.inner.finish()

    @property
    def device(self) -> Any:
        """Where the tensors of a torch pass are."""
        return self.inner.device  # type: ignore[attr-defined]

    @property
    def dtype(self) -> Any:
        """The type of a torch pass's tensors."""
        return self.inner.dtype  # type: ignore[attr-defined]


def forward_edited(
    engine: Engine, sequences: Sequences, caches: Sequence[Cache] | None, wanted: Wanted, edits: StepEdits
) -> list[Array]:
    """`Engine.forward` by way of a pass."""
    one = EditedPass(engine.begin(sequences, caches, wanted), edits)
    one.run(len(engine.graph.ops))
    logits = one.finish()
    return one.batch.split_wanted(logits.float().cpu().numpy() if one.is_torch else logits)


def changed(graph: Graph, batch: Batch, edge: int, value: Any, changes: Sequence[EditRows]) -> Any:
    """A value in the form that a pass reads, its own copy, with the changes of a step made."""
    for change in changes:
        if attention_of(graph, edge) is not None:
            _change_cached(batch, value, change)
        elif change.heads:
            _change_patterns(batch, value, change, _window(graph, edge))
        else:
            value = change_rows(value, change)
    return value


def change_rows(value: Any, change: EditRows) -> Any:
    """Rows of a value that nobody else has, changed."""
    flat = value.reshape(len(value), -1)
    cols = slice(change.first_col, change.first_col + change.cols)
    rows = _like(change.rows, flat)
    flat[rows, cols] = _apply(flat[rows, cols], change, change.values)
    return flat.reshape(value.shape)


def _change_cached(batch: Batch, value: Any, change: EditRows) -> None:
    """Keys or values `[num_kv_heads key dim]` of each sequence, in their new rows."""
    for i, rows, values in _of_sequences(batch, change):
        heads, _, dim = value[i].shape
        at = _like(batch.pasts[i] + rows, value[i])
        new = value[i][:, at].swapaxes(0, 1).reshape(len(rows), heads * dim)
        cols = slice(change.first_col, change.first_col + change.cols)
        new[:, cols] = _apply(new[:, cols], change, values)
        value[i][:, at] = new.reshape(len(rows), heads, dim).swapaxes(0, 1)


def _window(graph: Graph, edge: int) -> int | None:
    """How many keys a query sees at the most, of the scores or of what is made of them."""
    op = graph.ops[graph.producers[edge] or 0]
    while op.kind != "scores":
        op = graph.ops[graph.producers[op.inputs[0]] or 0]
    window: int | None = op.attrs["window"]
    return window


def _change_patterns(batch: Batch, value: Any, change: EditRows, window: int | None) -> None:
    """Scores or probabilities `[num_heads query key]` of each sequence, where the query sees the key."""
    for i, rows, values in _of_sequences(batch, change):
        stop = min(change.first_col + change.cols, value[i].shape[2])
        keys = np.arange(change.first_col, stop)
        queries, cols = _like(rows, value[i]), slice(change.first_col, stop)
        heads = slice(change.first_head, change.first_head + change.heads)
        old = value[i][heads, queries, cols]
        new = _apply(old, change, values[:, : len(keys)])
        at = batch.pasts[i] + rows[:, None]
        seen = _like((keys <= at) & (window is None or keys > at - window), value[i])
        value[i][heads, queries, cols] = (
            np.where(seen, new, old) if isinstance(old, np.ndarray) else new.where(seen, old)
        )


def _of_sequences(batch: Batch, change: EditRows) -> list[tuple[int, Array, Array]]:
    """Of each sequence that is changed: its number, its rows from its own first, and their values."""
    found = []
    for i, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=False)):
        own = (change.rows >= start) & (change.rows < start + length)
        if own.any():
            values = change.values if len(change.values) == 1 else change.values[own]
            found.append((i, change.rows[own] - start, values))
    return found


def _apply(old: Any, change: EditRows, values: Array) -> Any:
    """`scale * old + values`, of the shape of `old`."""
    new = _like(values, old)
    if change.scale == 0:
        return np.broadcast_to(new, old.shape) if isinstance(old, np.ndarray) else new.expand(old.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # of the masked scores that are left as they were
        return change.scale * old + new


def _like(array: Array, value: Any) -> Any:
    """An array as an engine's own: where `value` is, numbers in its type."""
    if isinstance(value, np.ndarray):
        return array
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(value.device)
    return tensor.to(value.dtype) if tensor.is_floating_point() else tensor


class EditedEngine:
    """An engine whose every step has edits. Implements `Engine`; what else the engine has, this one has too."""

    def __init__(self, engine: Engine, edits: StepEdits) -> None:
        self.inner, self.edits = engine, edits
        self.name, self.device, self.threads = engine.name, engine.device, engine.threads
        self.graph, self.context_length, self.runs_ahead = engine.graph, engine.context_length, engine.runs_ahead

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def new_cache(self) -> Cache:
        return self.inner.new_cache()

    def prepare(self) -> None:
        self.inner.prepare()

    def forward(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        edits: StepEdits | None = None,
    ) -> list[Array]:
        return self.inner.forward(sequences, caches, wanted, edits=edits or self.edits)

    def begin(
        self, sequences: Sequences, caches: Sequence[Cache] | None = None, wanted: Wanted = "last", **options: Any
    ) -> EditedPass:
        return EditedPass(self.inner.begin(sequences, caches, wanted, **options), self.edits)

    def run_tail(self, edge: int, rows: Any) -> Any:
        """As the engine's own: edits are of steps."""
        return self.inner.run_tail(edge, rows)


def changes_of_others(edits: StepEdits, graph: Graph, batch: Batch) -> list[EditRows]:
    """Edits of logits in all but the last rows of n sequences, padded, one by one: `[n·(seq-1) vocab_size]`."""
    longest, total = max(batch.lengths) - 1, len(batch.positions)
    every = replace(batch, wanted=np.arange(total), wanted_lengths=list(batch.lengths))
    place = np.full(total, -1)  # of each row of the batch, among the padded ones; -1: a last row
    for i, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=False)):
        place[start : start + length - 1] = i * longest + np.arange(longest - length + 1, longest)
    made = []
    for change in edits.of_step(every, 0, total).get(graph.names["logits"], ()):
        kept = place[change.rows] >= 0
        values = change.values if len(change.values) == 1 else change.values[kept]
        made.append(change._replace(rows=place[change.rows][kept], values=values))
    return made
