"""From a graph to the instructions of the native module: which operations become one, and where values lie.

A normalization goes with the linear layer that reads it, an activation and a residual sum with the layer before them,
the operations of attention with one another: wherever nothing else reads what is between them. Splitting and merging
heads move nothing, they are other views of the same columns. Every other value gets a slot, some columns of each row in
one buffer, which is given on to a later value once nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable
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
    inputs: list[Input]  # the arrays, in order; after them the logits

    @property
    def arrays(self) -> int:
        return len(self.inputs) + 1


@dataclass
class Compiler:
    """One pass over a graph's operations. `matrix` and `vector` give a weight's number in the module."""

    graph: Graph
    module: Any
    matrix: Callable[[str], int]
    vector: Callable[[str], int]
    slots: list[Slot] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    instructions: list[Any] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # operations that went into another's instruction

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
        return self._finish()

    # Operations, by the name of their kind.

    def _embed(self, op: Op) -> None:
        edge = op.outputs[0]
        self.inputs.append(Input(edge, op.weights[0], self.graph.inputs[op.attrs["source"]]))
        self.places[edge] = self._new_slot(edge, array=True)

    def _add(self, op: Op) -> None:
        a, b = (self._read(edge) for edge in op.inputs)
        self._emit(ADD, a=a, b=b, out=self._new_slot_for(op), cols=a.cols)

    def _layer_norm(self, op: Op) -> None:
        if self._follower(op.outputs[0], ("linear",)) or self._gathered_linear(op):
            return  # the linear layer takes it along
        a = self._read(op.inputs[0])
        weight, bias = self._weight_and_bias(op)
        self._emit(
            NORM, a=a, out=self._new_slot_for(op), cols=a.cols, weight=weight, bias=bias, epsilon=op.attrs["epsilon"]
        )

    def _linear(self, op: Op) -> None:
        norm, gather = self._before(op)
        source = (norm or gather or op).inputs[0]
        fields: dict[str, Any] = {"a": self._read(source), "matrix": self.matrix(op.weights[0]), "gather": bool(gather)}
        if len(op.weights) > 1:
            fields["bias"] = self.vector(op.weights[1])
        if norm:
            weight, bias = self._weight_and_bias(norm)
            fields.update(norm_weight=weight, norm_bias=bias, epsilon=norm.attrs["epsilon"])
        out = op.outputs[0]
        activation = self._follower(out, tuple(ACTIVATIONS))
        if activation:
            fields["activation"] = ACTIVATIONS[activation.kind]
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
        self._emit(LINEAR, out=place, cols=place.cols, **fields)

    def _gelu(self, op: Op) -> None:
        a = self._read(op.inputs[0])
        self._emit(ACTIVATE, a=a, out=self._new_slot_for(op), cols=a.cols, activation=ACTIVATIONS[op.kind])

    _gelu_tanh = _gelu

    def _wanted_rows(self, op: Op) -> None:
        if self._follower(op.outputs[0], ("linear",)):
            return
        a = self._read(op.inputs[0])
        self._emit(GATHER, a=a, out=self._new_slot_for(op), cols=a.cols)

    def _split_heads(self, op: Op) -> None:
        whole = self.places[op.inputs[0]]
        column = whole.column
        for edge in op.outputs:
            _, heads, dim = self.graph.edges[edge].axes
            cols = int(heads) * int(dim)
            self.places[edge] = Place(whole.slot, column, cols)
            column += cols

    def _cache(self, op: Op) -> None:
        """Taken along by the attention that reads it."""

    def _scores(self, op: Op) -> None:
        ops, graph = self.graph.ops, self.graph
        softmax, mix, merge = ops[op.index + 1 : op.index + 4]
        if (softmax.kind, mix.kind, merge.kind) != ("softmax", "mix", "merge_heads"):
            raise UnsupportedError(f"the native engine cannot run this form of attention of {graph.family.name}.")
        keys, values = (ops[graph.producers[edge] or 0] for edge in (op.inputs[1], mix.inputs[1]))
        _, heads, dim = graph.edges[op.inputs[0]].axes
        _, kv_heads, _ = graph.edges[keys.inputs[0]].axes
        a, b, c = (self._read(edge) for edge in (op.inputs[0], keys.inputs[0], values.inputs[0]))
        self.done |= {softmax.index, mix.index, merge.index}
        out = self._new_slot(merge.outputs[0])
        self.places[merge.outputs[0]] = out
        self._emit(
            ATTENTION,
            a=a,
            b=b,
            c=c,
            out=out,
            cols=out.cols,
            layer=op.layer,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scale=op.attrs["scale"],
        )

    # What may go together.

    def _follower(self, edge: int, kinds: tuple[str, ...]) -> Op | None:
        """The one operation that reads a value, when it is of these kinds."""
        consumers = self.graph.consumers[edge]
        if len(consumers) != 1 or self.graph.ops[consumers[0]].kind not in kinds:
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

    # Where values lie.

    def _comes_in(self, edge: int) -> bool:
        return self.slots[self.places[edge].slot].array

    def _new_slot(self, edge: int, *, array: bool = False) -> Place:
        cols = 1
        for axis in self.graph.edges[edge].axes[1:]:
            cols *= int(axis)
        at = len(self.instructions)
        self.slots.append(Slot(cols, at, at, array or edge == self.graph.names["logits"]))
        return Place(len(self.slots) - 1, 0, cols)

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

    def _emit(self, kind: int, **fields: Any) -> None:
        self.instructions.append((kind, fields))

    def _finish(self) -> Compiled:
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
        return Compiled(made, widths, self.inputs)

    def _instruction(self, kind: int, fields: dict[str, Any], number: dict[int, int]) -> Any:
        made = self.module.Instruction()
        made.kind = kind
        for name, value in fields.items():
            if isinstance(value, Place):
                value = self.module.View(number[value.slot], value.column)
            setattr(made, name, value)
        return made
