"""What a trace wants to know of each edge of a graph, looked up once: its name, its form, and when it is there."""

from __future__ import annotations

from dataclasses import dataclass

from starscope.graph import Graph
from starscope.microscope.present import Form, form_of
from starscope.values import VALUES


@dataclass(frozen=True)
class EdgeFacts:
    """An edge is there once operations [0, made) have run. `first_use` and `last_use` are the operations that read it
    first and last; behind the last operation when none does.
    """

    name: str
    form: Form
    made: int
    first_use: int
    last_use: int
    layer: int | None


class Edges:
    """The facts of all edges of a graph, and the operations of its blocks."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.facts = [self._facts(edge) for edge in range(len(graph.edges))]
        self.logits = graph.names["logits"]
        gather = next(op for op in graph.ops if op.kind == "wanted_rows")
        self.head, self.gather = gather.inputs[0], gather.index  # what the output matrix reads, before rows are chosen
        self.end = len(graph.ops)
        self.blocks: dict[int, tuple[int, int]] = {}  # operations [first, stop) of each
        for op in graph.ops:
            if op.layer is not None:
                first, _ = self.blocks.get(op.layer, (op.index, 0))
                self.blocks[op.layer] = (first, op.index + 1)

    def _facts(self, index: int) -> EdgeFacts:
        graph = self.graph
        edge, producer = graph.edges[index], graph.producers[index]
        op = None if producer is None else graph.ops[producer]
        if edge.names:
            name = "logits" if "logits" in edge.names else edge.names[0]
        elif op is None:
            name = next(name for name, i in graph.inputs.items() if i == index)
        else:
            name = f"{op.weights[0].removesuffix('.weight')}.output" if op.weights else f"the output of {op.kind}"
        layout = VALUES[edge.names[0].rpartition(".")[2]].layout if edge.names else None
        uses = graph.consumers[index] or (len(graph.ops),)
        return EdgeFacts(
            name=name,
            form=form_of(edge, layout, graph.hp.head_dim),
            made=0 if producer is None else producer + 1,
            first_use=min(uses),
            last_use=max(uses),
            layer=None if op is None else op.layer,
        )
