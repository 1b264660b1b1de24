"""Small models on the native engine and on its definition in NumPy, with some tokens in their caches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from starscope.engine.native_engine import NativeEngine
from starscope.graph import Graph
from support.numbers import TOLERANCE, ulps
from support.rounding import RoundingEngine
from support.stored import distance, make_graph, make_llama_graph, prompts, stored_weights

NAMES = ["F32", "F16", "Q8_0", "Q4_K"]
FORMAT = pytest.mark.parametrize("name", NAMES)
KINDS = ["multi_query", "multi_head", "llama"]
KIND = pytest.mark.parametrize("kind", KINDS)
# New tokens of each sequence, all behind a past of their own: decoded, short, longer than a unit and a tile.
STEPS = [[1], [1, 1, 1], [5, 1, 30], [140]]
ROUNDED = 0.02  # of float16 and int8: a value on the other side of a border between two roundings


def graph_of(kind: str, **sizes: Any) -> Graph:
    """One of GPT-BigCode's two forms, or a LLaMA with groups of two heads and a window."""
    if kind == "llama":
        head_dim = sizes["hidden"] // sizes["heads"] // 2 * 2
        return make_llama_graph(**sizes, kv_heads=sizes["heads"] // 2, head_dim=head_dim, window=90)
    return make_graph(**sizes, multi_query=kind == "multi_query")


@functools.cache
def engines(name: str, kind: str) -> tuple[NativeEngine, RoundingEngine]:
    graph = graph_of(kind, hidden=256, heads=8, inner=512, positions=400)
    weights = stored_weights(graph, name)
    return NativeEngine(graph, weights, threads=2), RoundingEngine(graph, weights)


def after_a_past(engine: Any, lengths: list[int]) -> list[Any]:
    """A cache for each sequence with some tokens in it."""
    caches = [engine.new_cache() for _ in lengths]
    engine.forward(prompts(engine.graph, [3 + 50 * i for i in range(len(lengths))], seed=1), caches)
    return caches


def as_list(value: Any) -> list[np.ndarray]:
    return value if isinstance(value, list) else [value]


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(as_list(found), as_list(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def assert_close(name: str, found: Any, expected: Any) -> None:
    for a, b in zip(as_list(found), as_list(expected), strict=True):
        assert a.shape == b.shape
        if name == "F32":
            assert ulps(a, b) <= TOLERANCE
        else:
            assert distance(a, b) <= ROUNDED
            assert np.median(np.abs(a - b)) <= 1e-4 * np.abs(b).max()
