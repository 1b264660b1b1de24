"""What the traces of one model share: its engine, the names of its parts and values, and the parts as objects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.engine import Engine, Weights
from starscope.errors import TraceError
from starscope.microscope.edges import Edges
from starscope.microscope.hosts import Layers, Module, Part, Prefix, host_class
from starscope.microscope.names import NODES, Names, Reading
from starscope.microscope.printout import print_part
from starscope.microscope.support import support_of
from starscope.microscope.tensors import as_value, has_torch
from starscope.microscope.trace import Trace, current_trace, entered_trace
from starscope.values import VALUES

if TYPE_CHECKING:
    from starscope.tokenizer import Tokenizer


class Scope:
    """The microscope of one model."""

    def __init__(self, engine: Engine, weights: Weights, tokenizer: Tokenizer) -> None:
        self.engine, self.weights, self.tokenizer = engine, weights, tokenizer
        self.graph, self.hp = engine.graph, engine.graph.hp
        self.names, self.edges = Names(self.graph), Edges(self.graph)
        self._classes: dict[str, type[Part]] = {}
        self._parts: dict[str, Any] = {}
        self._readings: dict[str, Reading] = {}
        self._weights: dict[str, Any] = {}

    # Parts.

    def part(self, path: str) -> Any:
        """The object that stands for a part, by its path here; the same one every time."""
        if path not in self._parts:
            self._parts[path] = self._make(path)
        return self._parts[path]

    def _make(self, path: str) -> Any:
        if path == "layers":
            return Layers(self)
        pattern, kind = re.sub(r"\d+", "{i}", path), self.names.parts[path].kind
        if self.names.parts[path].op is not None:
            return Module(self, path)
        if pattern not in self._classes:
            layer = re.search(r"\d+", path)
            prefix = pattern.format(i=layer[0]) if layer else path
            names = {name.rpartition(".")[2] for name in self.graph.names if name.rpartition(".")[0] == prefix}
            self._classes[pattern] = host_class(pattern, kind, names)
        return self._classes[pattern](self, path)

    def find(self, path: str) -> Any:
        """A part by any of its paths, or what is on the way to one; None when there is no such path."""
        found = self.names.part(path)
        if found is not None:
            return self.part(found)
        return Prefix(self, path) if self.names.has_prefix(path) else None

    def find_child(self, path: str, name: str) -> Any:
        """A part of a part, by its name here, in the checkpoint or in GGUF."""
        part = self.names.parts[path]
        for parent in dict.fromkeys((path, part.hf, part.gguf)):
            if parent is not None:
                found = self.find(f"{parent}.{name}" if parent else name)
                if found is not None:
                    return found
        if part.gguf is None and path.endswith((".self_attn", ".mlp")):  # GGUF has those of a block in one place
            return self.find_child(path.rpartition(".")[0], name)
        return None

    def find_value(self, path: str, name: str) -> str | None:
        """A value of a part by the name of a node of llama.cpp's graphs."""
        if name not in NODES:
            return None
        host = VALUES[NODES[name]].host
        layer = re.search(r"\d+", path)
        if "{i}" in host and layer is None:
            return None
        full = host.format(i=layer[0] if layer else "")
        return NODES[name] if host == "model" else f"{full}.{NODES[name]}"

    def children(self, path: str) -> list[str]:
        """The names of the parts right below a part."""
        start = f"{path}." if path else ""
        below = [name[len(start) :] for name in self.names.parts if name.startswith(start) and name != path]
        return [name for name in below if name and "." not in name]

    def shown(self, path: str) -> str:
        """A path as one writes it in Python: `model.layers[3].self_attn`."""
        return "model" + "".join(f"[{one}]" if one.isdigit() else f".{one}" for one in path.split(".") if one)

    # Values.

    def reading(self, name: str) -> Reading:
        if name not in self._readings:
            self._readings[name] = self.names.reading(name)
        return self._readings[name]

    def get(self, name: str) -> Any:
        """A value in the trace that is entered."""
        return self.read(current_trace(self.edges), self.reading(name))

    def read(self, trace: Trace, reading: Reading) -> Any:
        if reading.name == "input_ids":
            return trace.input_ids
        if reading.edge is None:
            return getattr(trace, reading.name)
        if reading.rest is None:
            return trace.get(reading.edge)
        return trace.get_shaped(reading.edge, reading.rest)

    def set(self, name: str, value: Any) -> None:
        """Replace a value in the trace that is entered."""
        reading = self.reading(name)
        if reading.name == "next_token_probs":
            raise AttributeError(f"{name} is derived and read-only; assign model.logits instead.")
        trace = current_trace(self.edges)
        if reading.name in ("input_ids", "attention_mask"):
            setattr(trace, reading.name, value)
        elif reading.edge is not None and reading.rest is None:
            trace.set(reading.edge, value)
        elif reading.edge is not None and reading.rest is not None:
            trace.set_shaped(reading.edge, reading.rest, value)

    # Weights.

    def weight(self, path: str, kind: str) -> Any:
        """A weight or a bias as float32; decoded once. None where a module has no such thing."""
        name = f"{path}.{kind}"
        if name not in self.names.parts[path].weights:
            return None
        slot = self.weights.slots[name]
        if slot.tied_to and self.weights.is_tied(name):
            name = slot.tied_to
        changes: int = getattr(self._weights.get(name), "_version", 0)  # in place, as torch counts them
        if changes:
            del self._weights[name]
            raise TraceError(
                f"{self.shown(path)}.{kind} was changed in place; the model did not change, its weights are read-only.",
                hint="Change a clone, or what the module gives in a trace.",
            )
        if name not in self._weights:
            array = np.array(self.weights[name], np.float32)
            array.flags.writeable = has_torch()  # torch has no tensors that cannot be written to
            self._weights[name] = as_value(array)
            if self.engine.name != "numpy":
                self.weights.forget(name)
        return self._weights[name]

    # What there is.

    def support_of(self, path: str) -> dict[str, Any]:
        """The values of a part and of those in it, from where it is; each None where it is there, or the reason."""
        return support_of(self.names, self._reason, path)

    def _reason(self, edge: int) -> str | None:
        trace = entered_trace(self.edges)
        return None if trace is None else trace.reason(edge)

    def print_part(self, path: str) -> str:
        """A part and all in it, as `print` shows it."""
        return print_part(self.names, path)
