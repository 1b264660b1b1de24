"""Edits within the compiled lists of the native engine: those of a pass that stops behind each edited value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.engine.base import MASKED, Batch, EditRows
from starscope.engine.edited import forward_edited
from starscope.engine.native_engine import LISTS_KEPT, ROWS_AT_ONCE, NativeEngine
from starscope.engine.passes import attention_of
from starscope.graph import Graph
from support.native_passes import FORMAT, KIND, after_a_past, assert_same, engines
from support.stored import make_graph, prompts, stored_weights


class Edits:
    """The same changes at every row of any step. Implements `StepEdits`.

    `wishes`: edge -> (first_col, cols, scale, value, first_head, heads). The values are different for each position and
    column, whatever piece of a step they come in.
    """

    def __init__(self, graph: Graph, wishes: Mapping[int, Sequence[tuple[Any, ...]]], every: int = 1) -> None:
        self.graph, self.wishes, self.every = graph, wishes, every

    @property
    def edges(self) -> Set[int]:
        return self.wishes.keys()

    def key(self, prompt_length: int, row: int) -> object:
        return id(self)

    def of_step(self, batch: Batch, start: int, stop: int) -> dict[int, list[EditRows]]:
        found: dict[int, list[EditRows]] = {}
        for edge, wishes in self.wishes.items():
            of_wanted = self.graph.edges[edge].axes[0] == "wanted"
            rows = (
                batch.wanted[(batch.wanted >= start) & (batch.wanted < stop)] if of_wanted else np.arange(start, stop)
            )
            numbers = np.flatnonzero(batch.positions[rows] % self.every == 0)
            if not len(numbers):
                continue
            positions = batch.positions[rows][numbers]
            found[edge] = []
            for first, cols, scale, value, first_head, heads in wishes:
                values = np.sin(positions[:, None] + np.arange(cols)).astype(np.float32) * np.float32(value)
                if value == 0:
                    values = np.zeros((1, 1), np.float32)
                found[edge].append(EditRows(numbers, first, cols, scale, values, first_head, heads))
        return found


def wish(data: st.DataObject, graph: Graph, edge: int) -> tuple[Any, ...]:
    axes = graph.edges[edge].axes
    scale, value = data.draw(st.sampled_from([0.0, 1.0, -0.5])), data.draw(st.sampled_from([0.0, 1.0]))
    if "query" in axes:
        first_head = data.draw(st.integers(0, graph.hp.num_heads - 1))
        heads = data.draw(st.integers(1, graph.hp.num_heads - first_head))
        return data.draw(st.integers(0, 20)), data.draw(st.integers(1, 200)), scale, value, first_head, heads
    width = int(np.prod([axis for axis in axes if isinstance(axis, int)]))
    first = data.draw(st.integers(0, width - 1))
    return first, data.draw(st.integers(1, width - first)), scale, value, 0, 0


def edge_sets(graph: Graph) -> st.SearchStrategy[set[int]]:
    made = [edge for op in graph.ops for edge in op.outputs]
    return st.sets(st.sampled_from(made), min_size=1, max_size=4)


@FORMAT
@KIND
@given(data=st.data())
@settings(max_examples=25)
def test_edits_in_the_list_have_the_bits_of_those_between_its_parts(name: str, kind: str, data: st.DataObject) -> None:
    engine, _ = engines(name, kind)
    graph, lengths = engine.graph, data.draw(st.sampled_from([[1], [1, 1], [5, 1, 30], [140]]))
    wishes = {
        e: [wish(data, graph, e) for _ in range(data.draw(st.integers(1, 2)))] for e in data.draw(edge_sets(graph))
    }
    edits, texts, wanted = Edits(graph, wishes), prompts(graph, lengths), data.draw(st.sampled_from(["last", "all"]))
    inside, between = after_a_past(engine, lengths), after_a_past(engine, lengths)
    found = engine.forward(texts, inside, wanted, edits=edits)
    assert_same(found, forward_edited(engine, texts, between, wanted, edits))
    again = prompts(graph, [2] * len(lengths), seed=9)  # what the caches keep is the same
    assert_same(engine.forward(again, inside), engine.forward(again, between))


@FORMAT
@KIND
@given(data=st.data())
@settings(max_examples=12)
def test_edited_logits_do_not_depend_on_how_a_text_is_cut(name: str, kind: str, data: st.DataObject) -> None:
    engine, _ = engines(name, kind)
    graph, [text] = engine.graph, prompts(engine.graph, [150])
    wishes = {edge: [wish(data, graph, edge)] for edge in data.draw(edge_sets(graph))}
    edits = Edits(graph, wishes, every=data.draw(st.sampled_from([1, 3])))
    [expected] = engine.forward([text], None, "all", edits=edits)
    cache, start = engine.new_cache(), 0
    for stop in sorted({*data.draw(st.sets(st.integers(1, 149), max_size=4)), 150}):
        [found] = engine.forward([text[start:stop]], [cache], "all", edits=edits)
        assert_same(found, expected[start:stop])
        start = stop


def test_a_step_of_several_pieces_is_edited_in_each() -> None:
    graph = make_graph(positions=700)
    engine = NativeEngine(graph, stored_weights(graph, "Q8_0"), threads=2)
    edges = [graph.names[f"layers.0.{name}"] for name in ("layer_output", "self_attn.attention_values")]
    edits = Edits(graph, {edge: [(1, 3, 1.0, 1.0, 0, 0)] for edge in [*edges, graph.names["logits"]]})
    texts = prompts(graph, [30, ROWS_AT_ONCE + 40])
    for wanted in ("last", "all"):
        found = engine.forward(texts, None, wanted, edits=edits)
        assert_same(found, forward_edited(engine, texts, None, wanted, edits))


@FORMAT
def test_every_value_can_be_edited(name: str) -> None:
    engine, definition = engines(name, "multi_head")
    graph, texts = engine.graph, prompts(engine.graph, [4, 9])
    plain = engine.forward(texts)
    for op in graph.ops:
        for edge in op.outputs:
            is_pattern = "query" in graph.edges[edge].axes
            wishes = {edge: [(0, 3, 0.5, 1.0, 1, 2) if is_pattern else (0, 3, 0.5, 1.0, 0, 0)]}
            found = engine.forward(texts, edits=Edits(graph, wishes))
            assert any((a != b).any() for a, b in zip(found, plain, strict=True)), graph.edges[edge]
            expected = forward_edited(definition, texts, None, "last", Edits(graph, wishes))
            for a, b in zip(found, expected, strict=True):
                assert np.abs(a - b).max() <= (2e-5 if name == "F32" else 0.06) * np.abs(b).max(), graph.edges[edge]
    assert_same(engine.forward(texts), plain)
    assert len(engine._lists) <= LISTS_KEPT


def test_what_is_set_is_exact_and_what_is_masked_has_no_weight() -> None:
    engine, _ = engines("Q8_0", "multi_query")
    graph, [text] = engine.graph, prompts(engine.graph, [140])
    stream, scores = graph.names["layers.0.layer_output"], graph.names["layers.1.self_attn.attention_scores"]

    class Fixed(Edits):
        def of_step(self, batch: Batch, start: int, stop: int) -> dict[int, list[EditRows]]:
            rows, nothing = np.arange(stop - start), np.full((1, 1), MASKED, np.float32)
            infinite = EditRows(rows, 0, 256, 0.0, np.full((1, 1), np.inf, np.float32))
            number = EditRows(rows, 0, 256, 0.0, np.arange(256, dtype=np.float32)[None])
            return {stream: [infinite, number], scores: [EditRows(rows, 1, 10**6, 0.0, nothing, 0, 8)]}

    found = engine.forward([text], None, "all", edits=Fixed(graph, {stream: [], scores: []}))[0]
    assert np.isfinite(found).all()
    # Every position has the same stream and attends to the first alone.
    assert_same(found, np.repeat(found[:1], 140, axis=0))


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_open_attention_meets_no_value_that_it_gives_no_weight(name: str, value: float) -> None:
    """A later token of the same step whose values are not finite does not reach earlier ones."""
    engine, _ = engines(name, "multi_query")
    graph, [text] = engine.graph, prompts(engine.graph, [140])
    pattern, values = (graph.names[f"layers.1.self_attn.attention_{one}"] for one in ("probabilities", "values"))

    class Late(Edits):
        def of_step(self, batch: Batch, start: int, stop: int) -> dict[int, list[EditRows]]:
            found = super().of_step(batch, start, stop)
            late = np.flatnonzero(batch.positions[start:stop] == 71)
            return {**found, values: [EditRows(late, 5, 2, 0.0, np.full((1, 1), value, np.float32))]}

    edits = Late(graph, {pattern: [(0, 60, 0.5, 0.0, 2, 3)], values: []})
    [whole] = engine.forward([text], None, "all", edits=edits)
    cache, rows = engine.new_cache(), []
    for token in text:
        rows += engine.forward([[token]], [cache], edits=edits)
    assert np.isfinite(whole[:71]).all()
    assert not np.isfinite(whole[71:]).any()
    assert_same(whole[:71], np.concatenate(rows[:71]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.array([1, 4])}, "row is out of range"),
        ({"rows": np.array([-1, 3])}, "row is out of range"),
        ({"first_col": 250}, "past its value"),
        ({"first_col": 2**63}, "past its value"),
        ({"cols": 257}, "other columns"),
        ({"values": np.ones((3, 1), np.float32)}, "other rows"),
        ({"values": np.ones((1, 7), np.float32)}, "other columns"),
    ],
)
def test_edits_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    engine, _ = engines("F32", "multi_query")
    graph, texts = engine.graph, prompts(engine.graph, [4])
    edge = graph.names["layers.0.layer_output"]
    good = EditRows(np.array([1, 3]), 6, 10, 1.0, np.ones((2, 10), np.float32))

    class One(Edits):
        def of_step(self, batch: Batch, start: int, stop: int) -> dict[int, list[EditRows]]:
            return {edge: [self.change]}

    edits, cache = One(graph, {edge: []}), engine.new_cache()
    edits.change = good
    engine.forward(texts, edits=edits)
    edits.change = good._replace(**change)
    with pytest.raises(ValueError, match=message):
        engine.forward(texts, [cache], edits=edits)
    assert cache.length == 0


def test_edits_of_patterns_that_do_not_fit_are_refused() -> None:
    engine, _ = engines("F32", "multi_query")
    graph, texts = engine.graph, prompts(engine.graph, [4])
    edge = graph.names["layers.0.self_attn.attention_scores"]
    assert attention_of(graph, edge) is None
    for first_head, heads in ((0, 9), (8, 1), (2**40, 1)):
        edits = Edits(graph, {edge: [(0, 1, 1.0, 1.0, first_head, heads)]})
        with pytest.raises(ValueError, match="past its value"):
            engine.forward(texts, edits=edits)
