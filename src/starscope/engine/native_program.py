"""From a graph to the instructions of the native module: which operations become one, and where values lie.

A normalization goes with the linear layers that read it, an activation and a residual sum with the layer before them,
layers of one input with one another (a gate with what it multiplies), the operations of attention with one another:
wherever nothing else reads what is between them. Splitting and merging heads move nothing, they are other views of the
same columns, and rotary positions turn theirs in place. Every other value gets a slot, some columns of each row in one
buffer, which is given on to a later value once nothing reads it any more. Behind the last attention only the rows whose
logits are wanted go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starscope.engine.native_slots import Compiled, Input, Place, Slot, share
from starscope.engine.weights import Weights
from starscope.errors import UnsupportedError
from starscope.graph import Graph, Op
from starscope.rope import inverse_frequencies

NORMS = ("layer_norm", "rms_norm")
MOST_TOGETHER = 3  # linear layers in one instruction


@dataclass
class Compiler:
    """One pass over a graph's operations. `matrix` and `vector` give a weight's number in the module; `vector` takes
    a function, too, of what no tensor has as it is.

    `split`: every operation by itself. `edited`: edges that are changed behind their producers, by the number that a
    step gives its changes under; they are values of their own, and attention goes openly where its patterns are edited.
    `kept`: edges that are made in the caller's own arrays. (Values that are in a cache or in patterns cannot be.)
    """

    graph: Graph
    module: Any
    matrix: Callable[[str], int]
    vector: Callable[..., int]
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
            self._add_op(op)
            for edge in op.outputs:
                if edge in self.edited:
                    self._edit(op, edge)
            self.ends.append(len(self.instructions))
        return self._finish()

    def _add_op(self, op: Op) -> None:
        """The instructions of an operation that went into no other's."""
        if op.index in self.done:
            return
        handler = getattr(self, f"_{op.kind}", None)
        if handler is None:
            raise UnsupportedError(
                f"the native engine has no {op.kind}, which {self.graph.family.name} needs.",
                hint="Use the torch or numpy engine.",
            )
        handler(op)

    # Operations, by the name of their kind.

    def _embed(self, op: Op) -> None:
        edge = op.outputs[0]
        self.inputs.append(Input(edge, op.weights[0], self.graph.inputs[op.attrs["source"]]))
        self.places[edge] = self._new_slot(edge, array=True)

    def _add(self, op: Op) -> None:
        a, b = (self._read(edge) for edge in op.inputs)
        self._emit(op.kind, a=a, b=b, out=self._new_slot_for(op), cols=a.cols, wanted=self._chosen(op))

    _multiply = _add

    def _layer_norm(self, op: Op) -> None:
        if self._is_taken_along(op) or self._gathered_linear(op):
            return
        a = self._read(op.inputs[0])
        weight, bias = self._weight_and_bias(op)
        fields = {"weight": weight, "bias": bias, "epsilon": op.attrs["epsilon"], "rms": op.kind == "rms_norm"}
        self._emit("norm", a=a, out=self._new_slot_for(op), cols=a.cols, wanted=self._chosen(op), **fields)

    _rms_norm = _layer_norm

    def _linear(self, op: Op) -> None:
        together = self._together(op)
        gated = self._gated(op)
        norm, gather = self._before(op)
        source = (norm or gather or op).inputs[0]
        fields: dict[str, Any] = {
            "a": self._read(source),
            "matrices": [self.matrix(one.weights[0]) for one in together],
            "wanted": self._chosen(op),
        }
        if gather and not self.narrowed:
            fields.update(gather=True, wanted=False)
        if any(len(one.weights) > 1 for one in together):
            fields["biases"] = [self.vector(one.weights[1]) if len(one.weights) > 1 else -1 for one in together]
        if norm:
            weight, bias = self._weight_and_bias(norm)
            fields.update(norm_weight=weight, norm_bias=bias, epsilon=norm.attrs["epsilon"])
            fields["rms"] = norm.kind == "rms_norm"
        outputs = [one.outputs[0] for one in together]
        if gated:
            activation, _, product = gated
            fields.update(gated=True, activation=self.module.activations[activation.kind])
            outputs = [product.outputs[0]]
            self.done |= {activation.index, product.index}
        elif follows := self._activation(op):
            fields["activation"] = self.module.activations[follows.kind]
            outputs = [follows.outputs[0]]
            self.done.add(follows.index)
        residual = self._residual(outputs[0]) if len(outputs) == 1 else None
        if residual:
            add, other = residual
            fields["b"] = self._read(other)
            outputs = [add.outputs[0]]
            self.done.add(add.index)
        self.done |= {one.index for one in together}
        out = self._new_slot(*outputs)
        column = 0
        for edge in outputs:
            self.places[edge] = Place(out.slot, column, self._columns(edge))
            column += self._columns(edge)
        self._emit("linear", out=out, cols=out.cols, **fields)

    def _gelu(self, op: Op) -> None:
        a = self._read(op.inputs[0])
        activation = self.module.activations[op.kind]
        self._emit(
            "activate", a=a, out=self._new_slot_for(op), cols=a.cols, activation=activation, wanted=self._chosen(op)
        )

    _gelu_tanh = _silu = _gelu

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

    def _rope(self, op: Op) -> None:
        """Keys that lie behind the queries are turned with them."""
        turned = [op]
        places = [self._read(op.inputs[0])]
        after = self.graph.ops[op.index + 1]
        if after.kind == "rope" and (after.attrs, after.weights) == (op.attrs, op.weights):
            behind = self.places.get(after.inputs[0])
            follows = Place(places[0].slot, places[0].column + places[0].cols, behind.cols) if behind else None
            if follows and follows == behind and self._is_in_place(op) and self._is_in_place(after):
                turned.append(after)
                places.append(follows)
        if self._is_in_place(op):
            self.places.update({one.outputs[0]: place for one, place in zip(turned, places, strict=True)})
            out = places[0]
        else:
            out = self._new_slot_for(op)
        self.done |= {one.index for one in turned}
        dim = int(self.graph.edges[op.inputs[0]].axes[-1])
        base, scale = op.attrs["base"], op.attrs["scale"]

        def frequencies(weights: Weights) -> Any:
            return inverse_frequencies(dim, base, scale, weights[op.weights[0]] if op.weights else None)

        number = self.vector(f"frequencies {dim} {base} {scale} {op.weights}", frequencies)
        cols = sum(place.cols for place in places)
        self._emit("rope", a=places[0], out=out, cols=cols, heads=cols // dim, dim=dim, frequencies=number)

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
        fields["window"] = scores.attrs["window"] or 0
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

    def _activation(self, op: Op) -> Op | None:
        return self._follower(op.outputs[0], tuple(self.module.activations))

    def _residual(self, edge: int) -> tuple[Op, int] | None:
        """The sum that alone reads a value, and its other term, when that is there already."""
        add = self._follower(edge, ("add",))
        other = next((one for one in add.inputs if one != edge), None) if add else None
        return (add, other) if add and other in self.places else None

    def _gated(self, op: Op) -> tuple[Op, Op, Op] | None:
        """The activation of a gate, a layer of the same input that is not there yet, and the product of the two."""
        activation = self._activation(op)
        product = self._follower(activation.outputs[0], ("multiply",)) if activation else None
        if activation is None or product is None:
            return None
        factor = next((edge for edge in product.inputs if edge != activation.outputs[0]), activation.outputs[0])
        other = self.graph.ops[self.graph.producers[factor] or 0]
        is_alike = (other.kind, other.inputs) == ("linear", op.inputs) and other.index > op.index
        return (activation, other, product) if is_alike and self._follower(factor, ("multiply",)) else None

    def _together(self, op: Op) -> list[Op]:
        """The linear layers that are one instruction with this one: those of the same input that nothing else goes
        with, or a gate and what it multiplies.
        """
        if gated := self._gated(op):
            return [op, gated[1]]
        if self.split or self._goes_with_others(op):
            return [op]
        others = [self.graph.ops[i] for i in self.graph.consumers[op.inputs[0]] if i > op.index]
        alike = [one for one in others if one.kind == "linear" and not self._goes_with_others(one)]
        return [op, *alike][:MOST_TOGETHER]

    def _goes_with_others(self, op: Op) -> bool:
        return bool(self._activation(op) or self._residual(op.outputs[0])) or op.index in self.done

    def _is_taken_along(self, norm: Op) -> bool:
        """Whether all that reads a normalization is one instruction, of linear layers."""
        edge = norm.outputs[0]
        readers = [self.graph.ops[i] for i in self.graph.consumers[edge]]
        is_seen = self.split or edge in self.edited or edge in self.kept
        if is_seen or not readers or any(one.kind != "linear" for one in readers):
            return False
        return len(self._together(readers[0])) == len(readers)

    def _gathered_linear(self, op: Op) -> bool:
        gather = self._follower(op.outputs[0], ("wanted_rows",))
        return gather is not None and self._follower(gather.outputs[0], ("linear",)) is not None

    def _before(self, op: Op) -> tuple[Op | None, Op | None]:
        """The normalization and the choice of rows that a linear layer takes along."""
        norm = gather = None
        edge = op.inputs[0]
        for kinds in (("wanted_rows",), NORMS):
            producer = self.graph.producers[edge]
            if producer is not None and edge not in self.places and self.graph.ops[producer].kind in kinds:
                if kinds != NORMS:
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

    def _columns(self, edge: int) -> int:
        return math.prod(int(axis) for axis in self.graph.edges[edge].axes[1:])

    def _new_slot(self, *edges: int, array: bool = False) -> Place:
        """Room for values side by side."""
        cols, at = sum(map(self._columns, edges)), len(self.instructions)
        array = array or any(edge == self.graph.names["logits"] or self._is_kept(edge) for edge in edges)
        self.slots.append(Slot(cols, at, at, array))
        return Place(len(self.slots) - 1, 0, cols)

    def _is_kept(self, edge: int) -> bool:
        """Whether a value is kept, or one that lies where it does."""
        return edge in self.kept or any(self._is_kept(one) for one in self._carried(edge))

    def _carried(self, edge: int) -> Sequence[int]:
        """The values that lie where this one does."""
        readers = (self.graph.ops[i] for i in self.graph.consumers[edge])
        views = (op for op in readers if op.kind in ("split_heads", "merge_heads") or self._is_in_place(op))
        return [one for op in views for one in op.outputs]

    def _is_in_place(self, op: Op) -> bool:
        """Whether a rotation may take the place of what it turns, which nothing else reads."""
        if op.kind != "rope" or self.split:
            return False
        before, producer = [op.inputs[0]], self.graph.producers[op.inputs[0]]
        if producer is not None and self.graph.ops[producer].kind == "split_heads":
            before.append(self.graph.ops[producer].inputs[0])
        return all(edge not in self.kept and len(self.graph.consumers[edge]) == 1 for edge in before)

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

    def _finish(self) -> Compiled:
        beside: dict[int, int] = {}
        if self.split:
            for layer, fields in self.attentions.items():
                beside[layer] = len(self.instructions)
                for kind in ("scores", "softmax", "mix"):
                    self._emit(kind, **fields)
        number, widths = share(self.slots)
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

    def _instruction(self, kind: str, fields: dict[str, Any], number: Sequence[int]) -> Any:
        made = self.module.Instruction()
        made.kind = self.module.kinds[kind]
        for name, value in fields.items():
            if value is None:
                continue
            if isinstance(value, Place):
                value = self.module.View(number[value.slot], value.column)
            setattr(made, name, value)
        return made
