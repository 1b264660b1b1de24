"""The native engine with a part of the operations: nothing of the others is compiled, and none of their weights read.

Values that come from elsewhere have a place among the slots from where the run of operations that reads them begins;
those that others read stay until they have been taken. One compiled list has all of the part: a run of operations is a
range of its instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starscope.engine.native_engine import NativeEngine
from starscope.engine.native_program import Compiler
from starscope.engine.native_slots import Compiled, Place, Slot
from starscope.engine.weights import Weights
from starscope.graph import Graph, Op

HEADS = frozenset({"split_heads", "rope", "cache", "scores"})
Run = tuple[bool, tuple[int, ...]]  # whether the operations are the part's own; their numbers


@dataclass
class PartCompiler(Compiler):
    """Compiles the operations of its own runs, in the order of `runs`.

    `split` lists are run in the recorded order instead, whatever the runs say: steps that stop go by it.
    """

    runs: Sequence[Run] = ()
    own: frozenset[int] = field(default_factory=frozenset)

    def compile(self) -> Compiled:
        self.own = frozenset(op for is_own, ops in self.runs if is_own for op in ops)
        after: dict[int, int] = {}
        for is_own, ops in recorded(self.own, len(self.graph.ops)) if self.split else self.runs:
            if is_own:
                self._run(ops, after)
            else:
                for edge in {edge for op in ops for edge in self.graph.ops[op].inputs} & self.places.keys():
                    self._read(edge)  # whoever takes it finds it there until now
        for op in self.graph.ops:
            self.ends.append(after.get(op.index, self.ends[-1]))
        self._add_logits()
        return self._finish()

    def _run(self, ops: Sequence[int], after: dict[int, int]) -> None:
        graph = self.graph
        for edges in self._entering(ops):
            slot, column = self._new_slot(*edges), 0
            for edge in edges:
                cols = self._columns(edge)
                self.places[edge] = Place(slot.slot, column, cols)
                column += cols
        for number in ops:
            self._add_op(graph.ops[number])
            after[number] = len(self.instructions)
        for edge in {edge for number in ops for edge in graph.ops[number].outputs} & self.places.keys():
            if any(reader not in self.own for reader in graph.consumers[edge]):
                self._read(edge)

    def _entering(self, ops: Sequence[int]) -> list[list[int]]:
        """Values that come from elsewhere; side by side those of an attention, which has them in one slot."""
        graph, found, heads = self.graph, dict[int, None](), dict[int, None]()
        for number in ops:
            for edge in graph.ops[number].inputs:
                producer = graph.producers[edge]
                if producer is not None and producer not in self.own and edge not in self.places:
                    (heads if graph.ops[number].kind in HEADS else found)[edge] = None
        return [[edge] for edge in found if edge not in heads] + ([list(heads)] if heads else [])

    def _follower(self, edge: int, kinds: tuple[str, ...]) -> Op | None:
        found = super()._follower(edge, kinds)
        return found if found is not None and found.index in self.own else None

    def _narrow(self, last: Op) -> None:
        """Other parts see all rows."""

    def _add_logits(self) -> None:
        """The caller's last array is for the logits, whoever makes them."""
        logits = self.graph.names["logits"]
        if logits not in self.places:
            end = len(self.instructions)
            self.slots.append(Slot(int(self.graph.hp.vocab_size), end, end, array=True))


def recorded(own: frozenset[int], count: int) -> list[Run]:
    """The operations in the recorded order, cut where the part begins and ends."""
    made: list[tuple[bool, list[int]]] = []
    for op in range(count):
        if not made or made[-1][0] != (op in own):
            made.append((op in own, []))
        made[-1][1].append(op)
    return [(is_own, tuple(ops)) for is_own, ops in made]


class NativePart(NativeEngine):
    """The native engine for a part of a graph. Its steps are run by ranges; as a whole it has no meaning."""

    def __init__(self, graph: Graph, weights: Weights, *, runs: Sequence[Run], **options: Any) -> None:
        self.compiler = partial(PartCompiler, runs=runs)
        super().__init__(graph, weights, **options)

    @property
    def plain(self) -> Any:
        """The list with everything fused that may be."""
        return self._plain
