"""From a graph to the instructions of the native module: which operations become one, and where values lie.

A normalization goes with the linear layer that reads it, an activation and a residual sum with the layer before them,
the operations of attention with one another: wherever nothing else reads what is between them. Splitting and merging
heads move nothing, they are other views of the same columns. Every other value gets a slot, some columns of each row in
one buffer, which is given on to a later value once nothing reads it any more. Behind the last attention only the rows
whose logits are wanted go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starscope.errors import UnsupportedError
from starscope.graph import Graph, Op

# As the module numbers them.
ADD, NORM, LINEAR, ACTIVATE, ATTENTION, GATHER = range(6)
ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2}


@dataclass(frozen=True)
class Place:
    """Where a value is: `cols` columns of a slot, from `column` on."""

    slot: int
    column: int
    cols: int


@dataclass
class Slot:
    """`width` columns; used from instruction `begin` to `end`. `array`: the caller's own, not a place in the buffer."""

    width: int
    begin: int
    end: int
    array: bool = False


@dataclass(frozen=True)
class Input:
    """A value that comes in: rows of a table by the indices of an input, unless the caller has the value itself."""

    edge: int
    table: str
    source: int  # edge of the indices


@dataclass
class Compiled:
    """A program's instructions, the widths of its slots (those of its arrays first), and what its arrays are."""

    instructions: list[Any]
    widths: list[int]
    inputs: list[Input]  # the first arrays, in order; then come those of the kept values; at last the logits
    kept: dict[int, tuple[int, int, int]]  # edge -> the number of its array, its first column and its columns
    views: dict[int, tuple[Any, int]]  # edge -> where it is while it lives, and its columns
    ends: list[int]  # by number of operations: the instructions that have run when those have
    beside: dict[int, int]  # block -> the first of the instructions that compute its attention openly, behind `ends`

    @property
    def arrays(self) -> int:
        return len(self.inputs) + len({number for number, _, _ in self.kept.values()}) + 1


@dataclass
class Compiler:
    """One pass over a graph's operations. `matrix` and `vector` give a weight's number in the module.

    `split`: every operation by itself. `edited`: edges that are changed behind their producers, by the number that a
    step gives its changes under; they are values of their own, and attention goes openly where its patterns are edited.
    `kept`: edges that are made in the caller's own arrays. (Values that are in a cache or in patterns cannot be.)
    """

    graph: Graph
    module: Any
    matrix: Callable[[str], int]
    vector: Callable[[str], int]
    split: bool = False
    edited: Mapping[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    slots: list[Slot] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    instructions: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # operations that went into another's instruction
    narrowed: bool = False  # whether every value in use has the wanted rows only
    ends: list[int] = field(default_factory=lambda: [0])
    attention: tuple[Op, Op] | None = None  # the one under way: its scores and its mix
    attentions: dict[int, dict[str, Any]] = field(default_factory=dict)  # block -> its instruction's fields

    def compile(self) -> Compiled:
        for op in self.graph.ops:
            if op.index not in self.done:
                handler = getattr(self, f"_{op.kind}", None)
                if handler is None:
                    raise UnsupportedError(
                        f"the native engine has no {op.kind}, which {self.graph.family.name} needs.",
                        hint="Use the torch or numpy engine.",
                    )
                handler(op)
            for edge in op.outputs:
                if edge in self.edited:
                    self._edit(op, edge)
            self.ends.append(len(self.instructions))
        beside: dict[int, int] = {}
        if self.split:
            for layer, fields in self.attentions.items():
                beside[layer] = len(self.instructions)
                for kind in ("scores", "softmax", "mix"):
                    self._emit(kind, **fields)
        return self._finish(beside)

    # Operations, by the name of their kind.

    def _embed(self, op: Op) -> None:
        edge = op.outputs[0]
        self.inputs.append(Input(edge, op.weights[0], self.graph.inputs[op.attrs["source"]]))
        self.places[edge] = self._new_slot(edge, array=True)

    def _add(self, op: Op) -> None:
        a, b = (self._read(edge) for edge in op.inputs)
        self._emit("add", a=a, b=b, out=self._new_slot_for(op), cols=a.cols, wanted=self._chosen(op))

    def _layer_norm(self, op: Op) -> None:
        if self._follower(op.outputs[0], ("linear",)) or self._gathered_linear(op):
            return  # the linear layer takes it along
        a = self._read(op.inputs[0])
        weight, bias = self._weight_and_bias(op)
        fields = {"weight": weight, "bias": bias, "epsilon": op.attrs["epsilon"], "wanted": self._chosen(op)}
        self._emit("norm", a=a, out=self._new_slot_for(op), cols=a.cols, **fields)

    def _linear(self, op: Op) -> None:
        norm, gather = self._before(op)
        source = (norm or gather or op).inputs[0]
        fields: dict[str, Any] = {
            "a": self._read(source),
            "matrix": self.matrix(op.weights[0]),
            "wanted": self._chosen(op),
        }
        if gather and not self.narrowed:
            fields.update(gather=True, wanted=False)
        if len(op.weights) > 1:
            fields["bias"] = self.vector(op.weights[1])
        if norm:
            weight, bias = self._weight_and_bias(norm)
            fields.update(norm_weight=weight, norm_bias=bias, epsilon=norm.attrs["epsilon"])
        out = op.outputs[0]
        activation = self._follower(out, tuple(self.module.activations))
        if activation:
            fields["activation"] = self.module.activations[activation.kind]
            out = activation.outputs[0]
            self.done.add(activation.index)
        residual = self._follower(out, ("add",))
        other = next((edge for edge in residual.inputs if edge != out), None) if residual else None
        if residual and other in self.places and not self._comes_in(other):
            fields["b"] = self._read(other)
            out = residual.outputs[0]
            self.done.add(residual.index)
        place = self._new_slot(out)
        self.places[out] = place
        self._emit("linear", out=place, cols=place.cols, **fields)

    def _gelu(self, op: Op) -> None:
        a = self._read(op.inputs[0])
        activation = self.module.activations[op.kind]
        self._emit(
            "activate", a=a, out=self._new_slot_for(op), cols=a.cols, activation=activation, wanted=self._chosen(op)
        )

    _gelu_tanh = _gelu

    def _wanted_rows(self, op: Op) -> None:
        if self._follower(op.outputs[0], ("linear",)):
            return
        if self.narrowed:
            self.places[op.outputs[0]] = self.places[op.inputs[0]]
            return
        a = self._read(op.inputs[0])
        self._emit("gather", a=a, out=self._new_slot_for(op), cols=a.cols)

    def _split_heads(self, op: Op) -> None:
        whole = self.places[op.inputs[0]]
        column = whole.column
        for edge in op.outputs:
            _, heads, dim = self.graph.edges[edge].axes
            cols = int(heads) * int(dim)
            self.places[edge] = Place(whole.slot, column, cols)
            column += cols

    def _cache(self, op: Op) -> None:
        """Taken along by the attention that reads it, unless that takes several instructions."""
        if op.outputs[0] in self.edited:
            self._edit(op, op.inputs[0])
        if self._is_open(op.layer):
            place = self._read(op.inputs[0])
            part = {"k": "b", "v": "c"}[op.attrs["part"]]
            _, kv_heads, dim = self.graph.edges[op.inputs[0]].axes
            sizes = {"cols": place.cols, "layer": op.layer, "heads": kv_heads, "kv_heads": kv_heads, "dim": dim}
            self._emit("append", **{part: place}, **sizes)

    def _scores(self, op: Op) -> None:
        ops, graph = self.graph.ops, self.graph
        softmax, mix, merge = ops[op.index + 1 : op.index + 4]
        if (softmax.kind, mix.kind, merge.kind) != ("softmax", "mix", "merge_heads"):
            raise UnsupportedError(f"the native engine cannot run this form of attention of {graph.family.name}.")
        self.attention = (op, mix)
        if self._is_open(op.layer):
            self._emit_open("scores")
        else:
            self.done |= {softmax.index, mix.index}
            self._mix(mix)

    def _softmax(self, _op: Op) -> None:
        self._emit_open("softmax")

    def _mix(self, op: Op) -> None:
        """All of an attention, unless its steps are in the list one by one."""
        is_open = self._is_open(op.layer) and not self.split
        fields = self._attention_fields()
        out = self._new_slot_for(op)
        self._emit("mix" if is_open else "attention", out=out, **fields)
        self.attentions[op.layer or 0] = {"out": out, **fields}

    def _emit_open(self, kind: str) -> None:
        """A step of an attention that is in the list openly; for a list that stops they are behind its end."""
        if not self.split:
            self._emit(kind, **self._attention_fields())

    def _attention_fields(self) -> dict[str, Any]:
        assert self.attention is not None
        scores, mix = self.attention
        graph = self.graph
        keys, values = (graph.ops[graph.producers[edge] or 0] for edge in (scores.inputs[1], mix.inputs[1]))
        _, heads, dim = graph.edges[scores.inputs[0]].axes
        _, kv_heads, _ = graph.edges[keys.inputs[0]].axes
        fields: dict[str, Any] = {"a": self._read(scores.inputs[0]), "layer": scores.layer}
        fields.update(heads=heads, kv_heads=kv_heads, dim=dim, cols=int(heads) * int(dim), scale=scores.attrs["scale"])
        if not self._is_open(scores.layer):
            fields.update(b=self._read(keys.inputs[0]), c=self._read(values.inputs[0]))
        return fields

    def _is_open(self, layer: int | None) -> bool:
        """Whether a block's attention is several instructions."""
        patterns = (self.graph.ops[self.graph.producers[edge] or 0] for edge in self.edited if self._is_pattern(edge))
        return self.split or any(op.layer == layer for op in patterns)

    def _is_pattern(self, edge: int) -> bool:
        return "query" in self.graph.edges[edge].axes

    def _edit(self, op: Op, edge: int) -> None:
        """The changes of an op's output, or of the new rows, its input, that it will put into the caches."""
        number = self.edited[op.outputs[0] if op.kind == "cache" else edge]
        if self._is_pattern(edge):
            self._emit("edit", edit=number, **{**self._attention_fields(), "a": None})
        elif edge in self.places:
            place = self._read(edge)
            wanted, cached = self.graph.edges[edge].axes[0] == "wanted", op.kind == "cache"
            self._emit("edit", a=place, cols=place.cols, edit=number, wanted=wanted, as_cached=cached)

    def _merge_heads(self, op: Op) -> None:
        """The heads lie side by side."""
        self.places[op.outputs[0]] = self.places[op.inputs[0]]
        is_looked_at = any((self.graph.producers[edge] or 0) >= op.index for edge in self.edited)
        if not (self.split or self.kept or is_looked_at) and not any(
            later.kind == "scores" for later in self.graph.ops[op.index :]
        ):
            self._narrow(op)

    def _narrow(self, last: Op) -> None:
        """Behind the last attention rows are looked at one by one: of what is read there, take the wanted ones."""
        graph = self.graph
        if graph.edges[graph.names["logits"]].axes[0] != "wanted":
            return
        for edge in [edge for edge in self.places if max(graph.consumers[edge], default=-1) > last.index]:
            a = self._read(edge)
            self.places[edge] = self._new_slot(edge)
            self._emit("gather", a=a, out=self.places[edge], cols=a.cols)
        self.narrowed = True

    # What may go together.

    def _follower(self, edge: int, kinds: tuple[str, ...]) -> Op | None:
        """The one operation that reads a value, when it is of these kinds."""
        consumers = self.graph.consumers[edge]
        is_seen = self.split or edge in self.edited or edge in self.kept
        if is_seen or len(consumers) != 1 or self.graph.ops[consumers[0]].kind not in kinds:
            return None
        return self.graph.ops[consumers[0]]

    def _gathered_linear(self, op: Op) -> bool:
        gather = self._follower(op.outputs[0], ("wanted_rows",))
        return gather is not None and self._follower(gather.outputs[0], ("linear",)) is not None

    def _before(self, op: Op) -> tuple[Op | None, Op | None]:
        """The normalization and the choice of rows that a linear layer takes along."""
        norm = gather = None
        edge = op.inputs[0]
        for kind in ("wanted_rows", "layer_norm"):
            producer = self.graph.producers[edge]
            if producer is not None and edge not in self.places and self.graph.ops[producer].kind == kind:
                if kind == "wanted_rows":
                    gather = self.graph.ops[producer]
                else:
                    norm = self.graph.ops[producer]
                edge = self.graph.ops[producer].inputs[0]
        return norm, gather

    def _chosen(self, op: Op) -> bool:
        """Whether an operation's input has the wanted rows only."""
        return self.narrowed or self.graph.edges[op.inputs[0]].axes[0] == "wanted"

    # Where values lie.

    def _comes_in(self, edge: int) -> bool:
        return any(one.edge == edge for one in self.inputs)

    def _new_slot(self, edge: int, *, array: bool = False) -> Place:
        cols = 1
        for axis in self.graph.edges[edge].axes[1:]:
            cols *= int(axis)
        at = len(self.instructions)
        self.slots.append(Slot(cols, at, at, array or edge == self.graph.names["logits"] or self._is_kept(edge)))
        return Place(len(self.slots) - 1, 0, cols)

    def _is_kept(self, edge: int) -> bool:
        """Whether a value is kept, or one that is only a view of it."""
        views = [op for op in self.graph.consumers[edge] if self.graph.ops[op].kind in ("split_heads", "merge_heads")]
        return edge in self.kept or any(not self.kept.isdisjoint(self.graph.ops[op].outputs) for op in views)

    def _new_slot_for(self, op: Op) -> Place:
        self.places[op.outputs[0]] = self._new_slot(op.outputs[0])
        return self.places[op.outputs[0]]

    def _read(self, edge: int) -> Place:
        """Where a value is, for the instruction that is about to be emitted."""
        place = self.places[edge]
        self.slots[place.slot].end = len(self.instructions)
        return place

    def _weight_and_bias(self, op: Op) -> tuple[int, int]:
        return self.vector(op.weights[0]), self.vector(op.weights[1]) if len(op.weights) > 1 else -1

    def _emit(self, kind: str, **fields: Any) -> None:
        self.instructions.append((kind, fields))

    def _finish(self, beside: dict[int, int]) -> Compiled:
        """Slots that are not in use at the same time become one."""
        number: dict[int, int] = {}
        arrays = [i for i, slot in enumerate(self.slots) if slot.array]
        number.update({i: n for n, i in enumerate(arrays)})
        widths = [self.slots[i].width for i in arrays]
        free_from: list[int] = [-1] * len(widths)  # the instruction from which each slot may be used again
        for i, slot in enumerate(self.slots):
            if slot.array:
                continue
            found = next(
                (n for n in range(len(arrays), len(widths)) if widths[n] == slot.width and free_from[n] < slot.begin),
                None,
            )
            if found is None:
                found = len(widths)
                widths.append(slot.width)
                free_from.append(-1)
            number[i], free_from[found] = found, slot.end
        made = [self._instruction(kind, fields, number) for kind, fields in self.instructions]
        views = {
            edge: (self.module.View(number[place.slot], place.column), place.cols)
            for edge, place in self.places.items()
        }
        kept = {
            edge: (number[place.slot], place.column, place.cols)
            for edge, place in self.places.items()
            if edge in self.kept and not self._comes_in(edge)
        }
        return Compiled(made, widths, self.inputs, kept, views, self.ends, beside)

    def _instruction(self, kind: str, fields: dict[str, Any], number: dict[int, int]) -> Any:
        made = self.module.Instruction()
        made.kind = self.module.kinds[kind]
        for name, value in fields.items():
            if value is None:
                continue
            if isinstance(value, Place):
                value = self.module.View(number[value.slot], value.column)
            setattr(made, name, value)
        return made
