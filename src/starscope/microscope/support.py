"""Which values a model has, and why one is not there: `model.support()`. Read off the graph; nothing runs.

{"logits": None, ..., "layer_output": None, "self_attn.attention_scores": {3: "block 3 was skipped"}, ...}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from starscope.microscope.names import Names
from starscope.values import BESIDE_THE_GRAPH, MODEL, VALUES

# [batch, seq] of the step: there wherever input_ids are, and no tensor.
INPUT_SIZE = "input_size"


def support_of(names: Names, reason: Callable[[int], str | None], path: str) -> dict[str, Any]:
    """The values of a part and of those in it, by their names from there: None, or `reason(edge)` of one.

    Of values of blocks, from above them, None when every block has it, else the reasons by block.
    """
    graph = names.graph
    if path in ("", "layers"):
        found: dict[str, Any] = {name: _root_reason(names, reason, name) for name in _root_values(names, path)}
        for name in _block_values(names):
            edges = {layer: graph.names.get(f"layers.{layer}.{name}") for layer in range(graph.hp.num_layers)}
            said = {
                layer: "this block has no such value" if edge is None else reason(edge) for layer, edge in edges.items()
            }
            missing = {layer: text for layer, text in said.items() if text is not None}
            found[name] = missing or None
        return found
    start = f"{path}."
    return {name.removeprefix(start): reason(edge) for name, edge in graph.names.items() if name.startswith(start)}


def _root_values(names: Names, path: str) -> Iterator[str]:
    if path:
        return
    there = {*names.graph.names, *BESIDE_THE_GRAPH}
    yield from (name for name, value in VALUES.items() if value.host == MODEL and name in there)
    yield INPUT_SIZE


def _root_reason(names: Names, reason: Callable[[int], str | None], name: str) -> str | None:
    edge = names.graph.names.get(name)
    return None if edge is None else reason(edge)


def _block_values(names: Names) -> list[str]:
    """What is below `layers.N.` of any block, in the order in which it is made."""
    found = (re.match(r"layers\.\d+\.(.*)", name) for name in names.graph.names)
    return list(dict.fromkeys(match[1] for match in found if match))
