"""A forward pass recorded once: a flat list of operations over named values.

`record(family, hp)` runs the family's file against a `Recorder` and gives a `Graph`. Nothing else describes the
model's arithmetic: engines run the list, `starscope graph` prints it, sizes and names are read off it.

    graph = record(family, hp)
    graph.edge("layers.3.layer_output")             # where that value is in the list
    graph.bytes({"rows": 512, "wanted": 1, ...})    # what each value takes, before anything is allocated
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starscope.family import Family, HParams
from starscope.ops import OPS, PER_SEQUENCE, Axes, ShapeError
from starscope.values import VALUES, qualified

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

INPUTS = ("input_ids", "positions")


@dataclass(frozen=True)
class Edge:
    """A value between operations: float32 (the inputs: int64). `names` are its standard names, fully qualified."""

    index: int
    axes: Axes
    names: tuple[str, ...] = ()

    @property
    def per_sequence(self) -> bool:
        """Whether the value exists once for each sequence instead of once for all rows."""
        return any(axis in PER_SEQUENCE for axis in self.axes)


@dataclass(frozen=True)
class Op:
    """One step: edges in, weights by name, edges out. `layer` is the block that it belongs to, if any."""

    index: int
    kind: str
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any]
    layer: int | None


@dataclass(frozen=True)
class Graph:
    """The recorded list. Edges and ops are numbered in order; an edge's producer comes before its consumers."""

    family: Family
    hp: HParams
    ops: tuple[Op, ...]
    edges: tuple[Edge, ...]
    names: Mapping[str, int]
    inputs: Mapping[str, int]
    weights: Mapping[str, tuple[int, ...]]
    consumers: tuple[tuple[int, ...], ...] = field(repr=False)
    producers: tuple[int | None, ...] = field(repr=False)

    def edge(self, name: str) -> Edge:
        """The edge with a qualified standard name; KeyError with the nearest names when there is none."""
        if name not in self.names:
            import difflib

            near = ", ".join(difflib.get_close_matches(name, self.names, 3)) or "see names"
            raise KeyError(f"no value is called {name!r} (near: {near})")
        return self.edges[self.names[name]]

    def last_use(self, edge: int) -> int:
        """The index of the last op that reads an edge; after it the value can be let go. -1: nothing reads it."""
        return max(self.consumers[edge], default=-1)

    def bytes(self, sizes: Mapping[str, int], itemsize: int = 4) -> list[int]:
        """The bytes of every edge when the named axes (rows, wanted, query, key) have these sizes."""
        return [itemsize * math.prod(sizes[a] if isinstance(a, str) else a for a in edge.axes) for edge in self.edges]

    def peak_bytes(self, sizes: Mapping[str, int], itemsize: int = 4) -> int:
        """The most bytes alive at once when every value is let go after its last use."""
        each = self.bytes(sizes, itemsize)
        alive = sum(each[i] for i, producer in enumerate(self.producers) if producer is None)
        peak = alive
        for op in self.ops:
            alive += sum(each[i] for i in op.outputs)
            peak = max(peak, alive)
            alive -= sum(
                each[i] for i in {*op.inputs, *op.outputs} if self.last_use(i) <= op.index and self.consumers[i]
            )
        return peak


class Recorder:
    """What a family's `record` writes on. Each method appends one op and returns the edge it makes.

    Weights are named relative to the block being recorded: `g.linear(x, "mlp.up_proj")`. `ranks`, by weight: those
    matrices have an adapter of that rank beside them, two small linear layers whose result is added.
    """

    def __init__(self, family: Family, hp: HParams, ranks: Mapping[str, int] | None = None) -> None:
        self.family, self.hp = family, hp
        self._shapes = {slot.name: slot.shape for slot in family.slots(hp)}
        for name, rank in (ranks or {}).items():
            (out, size), (a, b) = self._shapes[name], adapter_names(name)
            self._shapes |= {a: (rank, size), b: (out, rank)}
        self._ops: list[Op] = []
        self._edges: list[Edge] = []
        self._names: dict[str, int] = {}
        self._layer: int | None = None
        self._used: dict[str, tuple[int, ...]] = {}
        self.inputs = {name: self._new_edge(("rows",)) for name in INPUTS}
        self.value("input_ids", self.inputs["input_ids"])

    def layers(self) -> Iterator[AbstractContextManager[None]]:
        """One context a block: what is recorded inside belongs to it."""
        return (self._block(layer) for layer in range(self.hp.num_layers))

    @contextmanager
    def _block(self, layer: int) -> Iterator[None]:
        self._layer = layer
        yield
        self._layer = None

    def value(self, name: str, edge: Edge) -> Edge:
        """Give an edge a standard name. An edge may have several: one block's output is the next one's input."""
        if name not in VALUES:
            raise ShapeError(f"{name} is not a standard value")
        full = qualified(name, self._layer)
        if full in self._names:
            raise ShapeError(f"{full} is named twice")
        named = Edge(edge.index, edge.axes, (*self._edges[edge.index].names, full))
        self._edges[edge.index] = named
        self._names[full] = edge.index
        return named

    def embed(self, source: str, table: str) -> Edge:
        return self._op("embed", [self.inputs[source]], [f"{table}.weight"], source=source)[0]

    def add(self, a: Edge, b: Edge) -> Edge:
        return self._op("add", [a, b])[0]

    def layer_norm(self, x: Edge, module: str) -> Edge:
        return self._op("layer_norm", [x], self._module(module), epsilon=self.hp.norm_epsilon)[0]

    def rms_norm(self, x: Edge, module: str) -> Edge:
        return self._op("rms_norm", [x], self._module(module), epsilon=self.hp.norm_epsilon)[0]

    def linear(self, x: Edge, module: str) -> Edge:
        weights = self._module(module)
        y, (a, b) = self._op("linear", [x], weights)[0], adapter_names(weights[0])
        if a not in self._shapes:
            return y
        return self.add(y, self._op("linear", self._op("linear", [x], [a]), [b])[0])

    def gelu(self, x: Edge, *, exact: bool) -> Edge:
        return self._op("gelu" if exact else "gelu_tanh", [x])[0]

    def silu(self, x: Edge) -> Edge:
        return self._op("silu", [x])[0]

    def multiply(self, a: Edge, b: Edge) -> Edge:
        return self._op("multiply", [a, b])[0]

    def wanted_rows(self, x: Edge) -> Edge:
        return self._op("wanted_rows", [x])[0]

    def split_heads(self, x: Edge, *heads: int) -> tuple[Edge, ...]:
        """`[rows sum(heads)·head_dim]` -> one `[rows heads[i] head_dim]` each."""
        return self._op("split_heads", [x], heads=heads, head_dim=self.hp.head_dim)

    def rope(self, x: Edge) -> Edge:
        """Rotary positions: queries or keys `[rows heads head_dim]` -> the same, turned.

        `rope_base` and `rope_scale` are hyperparameters; the tensor `rope_freqs`, where the family has it, divides each
        frequency.
        """
        factors = [name for name in ("rope_freqs.weight",) if name in self._shapes]
        inputs = [x, self.inputs["positions"]]
        return self._op("rope", inputs, factors, base=self.hp.rope_base, scale=self.hp.rope_scale)[0]

    def attention(self, q: Edge, k: Edge, v: Edge) -> Edge:
        """Causal attention over each sequence's own history: [rows heads head_dim] thrice -> [rows heads·head_dim].

        With a hyperparameter `sliding_window` each query sees so many keys at the most. Its inner values get
        their standard names. Engines fuse the three ops wherever nobody looks between them.
        """
        q = self.value("attention_queries", q)
        k = self.value("attention_keys", self._op("cache", [k], part="k")[0])
        v = self.value("attention_values", self._op("cache", [v], part="v")[0])
        seen = {"scale": self.hp.qk_head_dim**-0.5, "window": self.hp.get("sliding_window") or None}
        scores = self.value("attention_scores", self._op("scores", [q, k], **seen)[0])
        pattern = self.value("attention_probabilities", self._op("softmax", [scores])[0])
        heads = self.value("attention_head_outputs", self._op("mix", [pattern, v])[0])
        return self.value("attention_premix", self._op("merge_heads", [heads])[0])

    def _module(self, module: str) -> list[str]:
        """The weight of a module and its bias, when the family declares one."""
        base = module if self._layer is None else f"layers.{self._layer}.{module}"
        return [name for name in (f"{base}.weight", f"{base}.bias") if name in self._shapes or name.endswith(".weight")]

    def _new_edge(self, axes: Axes) -> Edge:
        self._edges.append(Edge(len(self._edges), axes))
        return self._edges[-1]

    def _op(self, kind: str, inputs: Sequence[Edge], weights: Sequence[str] = (), **attrs: Any) -> tuple[Edge, ...]:
        for name in weights:
            if name not in self._shapes:
                raise ShapeError(f"{self.family.name} records {name}, which its tensor table does not have")
            self._used[name] = self._shapes[name]
        axes = OPS[kind].shapes([e.axes for e in inputs], [self._shapes[name] for name in weights], attrs)
        outputs = tuple(self._new_edge(a) for a in axes)
        made = Op(
            len(self._ops),
            kind,
            tuple(e.index for e in inputs),
            tuple(weights),
            tuple(e.index for e in outputs),
            attrs,
            self._layer,
        )
        self._ops.append(made)
        return outputs

    def finish(self) -> Graph:
        unused = [name for name in self._shapes if name not in self._used]
        if unused:
            raise ShapeError(f"{self.family.name} declares {unused[0]} and never uses it")
        consumers: list[list[int]] = [[] for _ in self._edges]
        producers: list[int | None] = [None] * len(self._edges)
        for op in self._ops:
            for index in op.inputs:
                consumers[index].append(op.index)
            for index in op.outputs:
                producers[index] = op.index
        return Graph(
            family=self.family,
            hp=self.hp,
            ops=tuple(self._ops),
            edges=tuple(self._edges),
            names=self._names,
            inputs={name: edge.index for name, edge in self.inputs.items()},
            weights=self._used,
            consumers=tuple(map(tuple, consumers)),
            producers=tuple(producers),
        )


def adapter_names(weight: str) -> tuple[str, str]:
    """What the two halves of a matrix's adapter are called, `[rank in]` and `[out rank]`."""
    module = weight.removesuffix(".weight")
    return f"{module}.lora_a.weight", f"{module}.lora_b.weight"


def record(family: Family, hp: HParams, ranks: Mapping[str, int] | None = None) -> Graph:
    """Record a family's forward pass for one model, with adapters of these `ranks` beside some of its matrices.

    ShapeError when the family's file contradicts itself.
    """
    recorder = Recorder(family, hp, ranks)
    try:
        family.record(recorder)
        return recorder.finish()
    except ShapeError as error:
        raise ShapeError(f"families/{family.name}.py: {error}") from None
