"""The order in which operations on several devices run, and what moves between them.

Every device goes through its own operations in the recorded order, as far as it can; another one goes on where it
waits. So the projections of a block run in one go before their results move, once and together:

    for segment in make_schedule(graph, places):     # places: a label for each operation
        ...                                          # fetch segment.enter; run segment.ops; let go of segment.drop

Nothing here knows what a device is: a label stands for whatever runs operations, two of them may be on one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from starscope.graph import Graph

INDEX_BYTES = 8  # of an input: int64


@dataclass(frozen=True)
class Segment:
    """Operations that run one after another at one place.

    `enter`: edges that it reads and does not have, and where they are. `leave`: edges that it makes and somebody else
    reads. `keep`: of all that it reads and makes, what is needed there later. `drop`: (place, edge) of whatever nobody
    needs any more once it has run.
    """

    place: str
    ops: tuple[int, ...]
    enter: tuple[tuple[int, str], ...]
    leave: tuple[int, ...]
    keep: tuple[int, ...]
    drop: tuple[tuple[str, int], ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The same operations as ranges, from and to (exclusive)."""
        made: list[tuple[int, int]] = []
        for op in self.ops:
            if made and made[-1][1] == op:
                made[-1] = (made[-1][0], op + 1)
            else:
                made.append((op, op + 1))
        return made


def make_schedule(graph: Graph, places: Sequence[str], begin: int = 0) -> list[Segment]:
    """Segments that run operations `begin` and later, whose earlier values are at the place of who made them.

    The graph's inputs are everywhere.
    """
    queues: dict[str, list[int]] = {}
    for op in graph.ops[begin:]:
        queues.setdefault(places[op.index], []).append(op.index)
    done = set(range(begin))
    runs: list[tuple[str, list[int]]] = []
    while any(queues.values()):
        ready = [queue[0] for queue in queues.values() if queue and _is_ready(graph, queue[0], done)]
        place = places[min(ready)]
        run: list[int] = []
        while queues[place] and _is_ready(graph, queues[place][0], done):
            run.append(queues[place].pop(0))
            done.add(run[-1])
        runs.append((place, run))
    return _with_moves(graph, places, runs)


def _is_ready(graph: Graph, op: int, done: Collection[int]) -> bool:
    producers = (graph.producers[edge] for edge in graph.ops[op].inputs)
    return all(producer is None or producer in done for producer in producers)


def _with_moves(graph: Graph, places: Sequence[str], runs: Sequence[tuple[str, list[int]]]) -> list[Segment]:
    last: dict[tuple[str, int], int] = {}  # (place, edge) -> the last run that needs it there
    made_by: dict[int, int] = {}
    logits = graph.names["logits"]
    for number, (place, ops) in enumerate(runs):
        for op in ops:
            for edge in graph.ops[op].inputs:
                last[place, edge] = number
                home = _home(graph, places, edge)
                if home is not None:
                    last[home, edge] = max(number, last.get((home, edge), 0))
            for edge in graph.ops[op].outputs:
                made_by[edge] = number
                last.setdefault((place, edge), number)
    segments, there = [], set()
    for number, (place, ops) in enumerate(runs):
        enter: dict[int, str] = {}
        for op in ops:
            for edge in graph.ops[op].inputs:
                home = _home(graph, places, edge)
                if home not in (None, place) and made_by.get(edge) != number and (place, edge) not in there:
                    assert home is not None
                    enter[edge] = home
                    there.add((place, edge))
        leave = tuple(
            edge
            for op in ops
            for edge in graph.ops[op].outputs
            if any(places[reader] != place for reader in graph.consumers[edge])
        )
        seen = {edge for op in ops for edge in (*graph.ops[op].inputs, *graph.ops[op].outputs)}
        keep = tuple(sorted(edge for edge in seen if last[place, edge] > number))
        drop = tuple(at for at, until in last.items() if until == number and at[1] != logits)
        segments.append(Segment(place, tuple(ops), tuple(enter.items()), leave, keep, drop))
    return segments


def _home(graph: Graph, places: Sequence[str], edge: int) -> str | None:
    """Where an edge is made; None: it is an input."""
    producer = graph.producers[edge]
    return None if producer is None else places[producer]


def peak_bytes(
    graph: Graph, segments: Sequence[Segment], place: str, sizes: Mapping[str, int], *, half_cache: bool
) -> int:
    """The most bytes that values take at a place while the segments run: made there, or moved there.

    Attention whose three operations are together runs as one call: what is between them is never there; its keys and
    values are, as float32 besides, where the cache has them as float16. Caches are not counted.
    """
    each = graph.bytes(sizes)
    for edge in graph.inputs.values():
        each[edge] = each[edge] // 4 * INDEX_BYTES
    alive = {edge: each[edge] for edge in graph.inputs.values()}
    peak = 0
    for segment in segments:
        if segment.place != place:
            _let_go(alive, place, segment.drop)
            continue
        own = set(segment.ops)
        for edge, _ in segment.enter:
            alive[edge] = each[edge]
        peak = max(peak, sum(alive.values()))
        for number in segment.ops:
            op = graph.ops[number]
            extra = 0
            if op.kind == "cache":  # in the cache, seen as it is there
                alive.update(dict.fromkeys(op.outputs, each[op.outputs[0]] if half_cache else 0))
            elif op.kind in ("scores", "softmax") and _is_fused(graph, number, own):
                alive[op.outputs[0]] = 0
                if op.kind == "scores":
                    extra = mask_bytes(sizes)
            else:
                alive.update({edge: each[edge] for edge in op.outputs})
                if op.kind == "mix" and _is_fused(graph, number, own):  # the heads' results, before they lie in rows
                    extra = each[op.outputs[0]] + mask_bytes(sizes)
            peak = max(peak, sum(alive.values()) + extra)
            for edge in op.inputs:
                readers = [reader for reader in graph.consumers[edge] if reader in own and reader > number]
                if not readers and (place, edge) in segment.drop:
                    alive.pop(edge, None)
        _let_go(alive, place, segment.drop)
    return peak


def _let_go(alive: dict[int, int], place: str, drop: Collection[tuple[str, int]]) -> None:
    for at, edge in drop:
        if at == place:
            alive.pop(edge, None)


def _is_fused(graph: Graph, number: int, own: Collection[int]) -> bool:
    first = number - ("scores", "softmax", "mix").index(graph.ops[number].kind)
    return all(op in own for op in range(first, first + 3))


def mask_bytes(sizes: Mapping[str, int]) -> int:
    """What says which keys a query sees, where several do: a bool each, made into a float32."""
    return 5 * math.prod((sizes["query"], sizes["key"])) if sizes["query"] > 1 else 0
