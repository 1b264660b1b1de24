"""Every name by which a part of a model or one of its values may be asked for, and what it stands for.

The standard names come first; the checkpoint's own names (`transformer.h.3.attn`), GGUF's (`blk.3.attn_qkv`), the
nodes of llama.cpp's graphs (`KQ_soft_max`) and the hooks of TransformerLens (`blocks.3.attn.hook_pattern`) are aliases.

    names = Names(graph)
    names.reading("layers[3].layer_output")     # the edge, and how it is shown
    names.reading("transformer.h.3.attn.c_attn.output")
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starscope.errors import TraceError
from starscope.graph import Graph
from starscope.values import ATTENTION, BESIDE_THE_GRAPH, BLOCK, MLP, MODEL, VALUES

# Nodes of llama.cpp's graph -> the value at that place.
NODES: Mapping[str, str] = {
    "inp_tokens": "input_ids",
    "Q": "attention_queries",
    "K": "attention_keys",
    "V": "attention_values",
    "KQ_masked": "attention_scores",
    "KQ_soft_max": "attention_probabilities",
    "KQV_merged": "attention_head_outputs",
    "KQV_merged_contiguous": "attention_premix",
    "result_norm": "final_norm_output",
    "result_output": "logits",
}

# Hooks of TransformerLens -> names here; `{i}` is the block. Layouts stay those of the standard values.
HOOKS: Mapping[str, str] = {
    "hook_embed": "token_embeddings",
    "embed.hook_out": "token_embeddings",
    "hook_pos_embed": "position_embeddings",
    "pos_embed.hook_out": "position_embeddings",
    "blocks.{i}.hook_resid_pre": "layers.{i}.layer_input",
    "blocks.{i}.hook_in": "layers.{i}.layer_input",
    "blocks.{i}.ln1.hook_normalized": "layers.{i}.attention_norm_output",
    "blocks.{i}.ln1.hook_out": "layers.{i}.attention_norm_output",
    "blocks.{i}.attn.hook_in": "layers.{i}.attention_norm_output",
    "blocks.{i}.attn.hook_q": "layers.{i}.self_attn.attention_queries",
    "blocks.{i}.attn.hook_k": "layers.{i}.self_attn.attention_keys",
    "blocks.{i}.attn.hook_v": "layers.{i}.self_attn.attention_values",
    "blocks.{i}.attn.q.hook_out": "layers.{i}.self_attn.attention_queries",
    "blocks.{i}.attn.k.hook_out": "layers.{i}.self_attn.attention_keys",
    "blocks.{i}.attn.v.hook_out": "layers.{i}.self_attn.attention_values",
    "blocks.{i}.attn.hook_attn_scores": "layers.{i}.self_attn.attention_scores",
    "blocks.{i}.attn.hook_pattern": "layers.{i}.self_attn.attention_probabilities",
    "blocks.{i}.attn.hook_z": "layers.{i}.self_attn.attention_head_outputs",
    "blocks.{i}.attn.o.hook_in": "layers.{i}.self_attn.attention_premix",
    "blocks.{i}.hook_attn_out": "layers.{i}.self_attn.attention_output",
    "blocks.{i}.attn.hook_out": "layers.{i}.self_attn.attention_output",
    "blocks.{i}.hook_resid_mid": "layers.{i}.layer_mid",
    "blocks.{i}.ln2.hook_normalized": "layers.{i}.mlp_norm_output",
    "blocks.{i}.ln2.hook_out": "layers.{i}.mlp_norm_output",
    "blocks.{i}.mlp.hook_in": "layers.{i}.mlp_input",
    "blocks.{i}.mlp.hook_pre": "layers.{i}.mlp.act_fn.input",
    "blocks.{i}.mlp.hook_post": "layers.{i}.mlp.mlp_neurons",
    "blocks.{i}.hook_mlp_out": "layers.{i}.mlp.mlp_output",
    "blocks.{i}.mlp.hook_out": "layers.{i}.mlp.mlp_output",
    "blocks.{i}.hook_resid_post": "layers.{i}.layer_output",
    "blocks.{i}.hook_out": "layers.{i}.layer_output",
    "ln_final.hook_normalized": "final_norm_output",
    "ln_final.hook_out": "final_norm_output",
    "unembed.hook_out": "logits",
}

# What goes into a part that has no weights, and what comes out, by standard names.
ENDS: Mapping[str, tuple[str, str]] = {
    BLOCK: ("layers.{i}.layer_input", "layers.{i}.layer_output"),
    ATTENTION: ("layers.{i}.attention_norm_output", "layers.{i}.self_attn.attention_output"),
    MLP: ("layers.{i}.mlp_input", "layers.{i}.mlp.mlp_output"),
}


@dataclass(frozen=True)
class Part:
    """A module of the model: its path here, in the checkpoint and in GGUF, and the class it has in transformers.

    `weights` are the names of its tensors; `op` is the operation that it is, if it is one.
    """

    path: str
    hf: str
    gguf: str | None
    kind: str
    weights: tuple[str, ...] = ()
    op: int | None = None


@dataclass(frozen=True)
class Reading:
    """A value to be read: an edge, as its standard layout or, with `rest`, as `[batch seq *rest]`; or one beside the
    graph, by its name.
    """

    name: str
    edge: int | None
    rest: tuple[int, ...] | None = None


class Names:
    """The parts of a model, by all their paths, and the values, by all their names."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parts = {part.path: part for part in _parts(graph)}
        self.native = {part.hf: part.path for part in self.parts.values() if part.hf}
        self.gguf = {part.gguf: part.path for part in self.parts.values() if part.gguf}

    def part(self, path: str) -> str | None:
        """The path here of a part under any of its paths, or under one put together from several of them, as
        `layers.3.self_attn.c_attn`; None when there is none.
        """
        if (direct := self._known(path)) is not None:
            return direct
        owner, _, name = path.rpartition(".")
        above = self.parts.get(self.part(owner) or "") if owner else None
        if above is None or not above.path:
            return None
        paths = (f"{prefix}.{name}" for prefix in (above.path, above.hf, above.gguf) if prefix)
        return next((found for one in paths if (found := self._known(one)) is not None), None)

    def _known(self, path: str) -> str | None:
        return path if path in self.parts else self.native.get(path, self.gguf.get(path))

    def has_prefix(self, prefix: str) -> bool:
        """Whether the checkpoint or GGUF have parts below such a path, as `transformer` and `blk`."""
        start = f"{prefix}."
        return any(path.startswith(start) for path in (*self.native, *self.gguf))

    def ends(self, path: str) -> tuple[int, int] | None:
        """The edges that go into a part and come out of it; None for a part that holds others in a row."""
        part = self.parts[path]
        if part.op is not None:
            op = self.graph.ops[part.op]
            source = op.inputs[0]
            producer = self.graph.producers[source]
            if producer is not None and self.graph.ops[producer].kind == "wanted_rows":
                source = self.graph.ops[producer].inputs[0]  # of all rows, as other values are
            return source, op.outputs[0]
        layer = re.search(r"\d+", path)
        pattern = re.sub(r"\d+", "{i}", path)
        if layer is None or pattern not in ENDS:
            return None
        ends = [self.graph.names.get(name.format(i=layer[0])) for name in ENDS[pattern]]
        return None if None in ends else (ends[0], ends[1])  # type: ignore[return-value]

    @functools.cached_property
    def begins(self) -> dict[str, int]:
        """The first operation of every part, of those in it."""
        first: dict[str, int] = {}
        for part in self.parts.values():
            path = part.path
            while path and part.op is not None:
                first[path] = min(first.get(path, part.op), part.op)
                path = path.rpartition(".")[0]
        return first

    def reading(self, name: str) -> Reading:
        """What a name stands for. TraceError, with the nearest names, when it is nothing."""
        if not isinstance(name, str):
            raise TraceError(f"a value's name is {name!r}; expected a text, as layers.3.layer_output.")
        found = self.find(name)
        if found is None:
            if _normal(name).rpartition(".")[2] in VALUES.keys() - {one.rpartition(".")[2] for one in self.graph.names}:
                raise TraceError(f"{self.graph.family.name} has no {_normal(name)}; models of other families do.")
            raise TraceError(f"no value is called {name!r}.", hint=self._near(_normal(name)))
        return found

    def find(self, name: str) -> Reading | None:
        """What a name stands for; None when it is nothing."""
        path = _normal(name)
        path = self._hook(path) or self._node(path) or path
        if path in self.graph.names:
            return Reading(path, self.graph.names[path])
        if path in BESIDE_THE_GRAPH:
            return Reading(path, None)
        owner, _, last = path.rpartition(".")
        if last in ("input", "output"):
            found = self.part(owner) if owner else ""
            if found == "":
                return Reading("logits", self.graph.names["logits"])
            if found is not None and (ends := self.ends(found)) is not None:
                return self._plainly(f"{found}.{last}", ends[last == "output"])
        if last in VALUES and (found := self.part(owner)) is not None and f"{found}.{last}" in self.graph.names:
            return Reading(f"{found}.{last}", self.graph.names[f"{found}.{last}"])
        block = re.fullmatch(r"layers\.(\d+)", self.part(owner) or "")
        if last in VALUES and block:  # of a part of the block, by the block alone
            full = f"{VALUES[last].host.format(i=block[1])}.{last}"
            return Reading(full, self.graph.names[full]) if full in self.graph.names else None
        found = self.part(path)
        if found and (ends := self.ends(found)) is not None:  # a part's name alone: what comes out
            return self._plainly(f"{found}.output", ends[1])
        return None

    def _plainly(self, name: str, edge: int) -> Reading:
        axes = self.graph.edges[edge].axes
        if self.graph.edges[edge].per_sequence or axes[0] == "wanted":
            return Reading(name, edge)
        return Reading(name, edge, tuple(int(axis) for axis in axes[1:]))

    def _hook(self, path: str) -> str | None:
        layer = re.match(r"blocks\.(\d+)\.", path)
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.{i}.", path)
        return HOOKS[pattern].format(i=layer[1] if layer else "") if pattern in HOOKS else None

    def _node(self, path: str) -> str | None:
        """`KQ_soft_max-3`, `layers.3.self_attn.KQ_soft_max`, `result_norm`."""
        owner, _, last = path.rpartition(".")
        node, _, layer = last.partition("-")
        if node not in NODES:
            return None
        host = VALUES[NODES[node]].host
        if host == MODEL:
            return NODES[node]
        if layer.isdigit():
            return f"{host.format(i=layer)}.{NODES[node]}"
        found = self.part(owner) if owner else None
        return f"{found}.{NODES[node]}" if found else None

    def _near(self, path: str) -> str:
        found = re.search(r"\d+", path)
        if found and int(found[0]) >= self.graph.hp.num_layers:
            return f"This model has layers 0 to {self.graph.hp.num_layers - 1}."
        near = difflib.get_close_matches(path, [*self.graph.names, *self.parts], 3)
        return f"Near: {', '.join(near)}." if near else "`starscope graph` lists the names."


def _normal(name: str) -> str:
    """`model.layers[3].mlp` -> `layers.3.mlp`."""
    path = re.sub(r"\[(\d+)\]", r".\1", name.strip())
    return path.removeprefix("model.")


def _parts(graph: Graph) -> Iterator[Part]:
    family, hp = graph.family, graph.hp
    users = {op.weights[0]: op for op in graph.ops if op.weights}
    activations = {op.layer: op.index for op in graph.ops if op.kind in ("gelu", "gelu_tanh", "silu")}
    for row in family.modules:
        for layer in range(hp.num_layers) if "{i}" in row.name else [None]:
            path = row.name.format(i=layer)
            op = activations.get(layer) if path.endswith("act_fn") else None
            gguf = f"blk.{layer}" if row.name == BLOCK else None
            yield Part(path, row.hf.format(i=layer), gguf, row.kind_of(hp), op=op)
    for tensor in (row for row in family.tensors if not row.made):
        for layer in range(hp.num_layers) if "{i}" in tensor.name else [None]:
            path, hf, gguf = (text.format(i=layer) for text in (tensor.name, tensor.hf, tensor.gguf))
            used = users[f"{path}.weight"]
            weights = tuple(name for name in (f"{path}.weight", f"{path}.bias") if name in graph.weights)
            yield Part(path, hf, gguf, KINDS[used.kind], weights, used.index)


# The class in transformers of a part that is one operation.
KINDS: Mapping[str, str] = {"embed": "Embedding", "linear": "Linear", "layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
