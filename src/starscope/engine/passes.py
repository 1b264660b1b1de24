"""A step of an engine that can stop between any two operations: the ground that tracing stands on.

    one = engine.begin([ids])                       # nothing has run
    one.run(graph.producers[edge] + 1)              # up to where a value is made
    value = one.read(edge)                          # a copy of its own
    one.write(edge, value * 2)                      # what has not run yet sees this one
    one.run(len(graph.ops))
    one.finish()                                    # caches move on; without it the step never was

Values have the engine's own form: `[rows ...]` for the rows of all sequences one after another, and a list with one
array a sequence, without the rows of the others, where an axis is `query` or `key`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from starscope.engine.base import Array, Batch
from starscope.graph import Graph


class Pass(Protocol):
    """One step under way. Operations [0, done) have run.

    A value can be read once its producer has run and until the last of its consumers has, and written until the first
    of them has; whoever calls sees to that. Keys and values are read with their history, rounded to the cache's type,
    and what is written to them stays in the cache. Scores and probabilities are computed beside the step for whoever
    reads them; only a value written there is what the step goes on with.
    """

    graph: Graph
    batch: Batch
    done: int
    is_torch: bool  # whether its values are torch tensors; NumPy arrays otherwise

    def run(self, stop: int) -> None:
        """Run until operations [0, stop) have run; `stop` is not before `done`."""

    def read(self, edge: int) -> Any:
        """A copy of a value."""

    def write(self, edge: int, value: Any) -> None:
        """Replace a value, in the form that `read` gives."""

    def keep(self, edges: Collection[int]) -> None:
        """Have values readable until the pass ends; said before their producers have run."""

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        """Let operations [done, stop) not run; `values` are the outputs of theirs that later ones read."""

    def finish(self) -> Any:
        """End the step, all of whose operations have run: the caches move on. Gives the logits, `[wanted vocab_size]`;
        the pass is of no use any more.
        """


@runtime_checkable
class RowReader(Protocol):
    """A pass that computes the scores or probabilities of some queries without those of the others."""

    def read_rows(self, edge: int, rows: Sequence[Array]) -> list[Any]:
        """Of each sequence `[num_heads n key]`: the queries with these numbers among its new rows, int64 `[n]`,
        ascending and each once.
        """


def read_rows(one: Pass, edge: int, rows: Sequence[Array]) -> list[Any]:
    """Scores or probabilities of some queries, `[num_heads n key]` of each sequence, in the order that is given."""
    if isinstance(one, RowReader):
        asked = [np.unique(some, return_inverse=True) for some in rows]
        made = one.read_rows(edge, [each for each, _ in asked])
        return [value[:, where] for value, (_, where) in zip(made, asked, strict=True)]
    return [value[:, some].copy() for value, some in zip(one.read(edge), rows, strict=True)]


def attention_of(graph: Graph, edge: int) -> tuple[int, str] | None:
    """The block and part ("k" or "v") that an edge is the cached history of; None for other edges."""
    producer = graph.producers[edge]
    if producer is None or graph.ops[producer].kind != "cache":
        return None
    op = graph.ops[producer]
    assert op.layer is not None
    return op.layer, str(op.attrs["part"])


def tail_of(graph: Graph, edge: int) -> int:
    """The first operation behind an edge from which the logits follow, by that edge alone."""
    first = min(graph.consumers[edge])
    made = {edge}
    for op in graph.ops[first:]:
        if not made.issuperset(op.inputs):
            raise ValueError(f"the logits do not follow from edge {edge} alone")
        made.update(op.outputs)
    return first
