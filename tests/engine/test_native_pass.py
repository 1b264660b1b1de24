"""A step of the native engine that stops anywhere: the bits of `forward`, and at each stop the definition's values."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope import native
from starscope.engine.native_engine import NativeEngine
from starscope.engine.native_pass import NativePass
from starscope.engine.passes import RowReader, attention_of, read_rows
from starscope.graph import Graph
from support.native_passes import (
    FORMAT,
    KIND,
    STEPS,
    after_a_past,
    as_list,
    assert_close,
    assert_same,
    engines,
    graph_of,
)
from support.numbers import TOLERANCE, ulps
from support.rounding import RoundingEngine
from support.stored import distance, prompts, stored_weights

module = native.kernels()
assert module is not None, native.why_missing()


def changed_value(graph: Graph, edge: int, value: np.ndarray) -> np.ndarray:
    """Something else: whatever is masked stays so."""
    noise = np.random.default_rng(edge).normal(0, 0.2, value.shape).astype(np.float32)
    if "query" not in graph.edges[edge].axes:
        return np.float32(1.5) * value + noise
    return np.where(value == 0, value, value + np.abs(noise))


@FORMAT
@KIND
@given(data=st.data())
@settings(max_examples=15)
def test_a_pass_has_the_bits_of_forward_wherever_it_stops_and_whatever_is_read(
    name: str, kind: str, data: st.DataObject
) -> None:
    engine, _ = engines(name, kind)
    graph, lengths, wanted = (
        engine.graph,
        data.draw(st.sampled_from(STEPS)),
        data.draw(st.sampled_from(["last", "all"])),
    )
    texts = prompts(graph, lengths)
    plain, stopped = after_a_past(engine, lengths), after_a_past(engine, lengths)
    expected = engine.forward(texts, plain, wanted)
    one = engine.begin(texts, stopped, wanted)
    for stop in sorted(data.draw(st.sets(st.integers(0, len(graph.ops) - 1)))):
        one.run(stop)
        live = [e.index for e in graph.edges if (graph.producers[e.index] or 0) < stop <= graph.last_use(e.index)]
        for edge in data.draw(st.sets(st.sampled_from(live or [graph.inputs["positions"]]), max_size=4)):
            one.read(edge)
    one.run(len(graph.ops))
    one.finish()
    assert_same(one.batch.split_wanted(one.read(graph.names["logits"])), expected)
    again = prompts(graph, [2] * len(lengths), seed=9)
    assert_same(engine.forward(again, stopped), engine.forward(again, plain))


@FORMAT
@KIND
@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_every_value_is_that_of_its_definition(name: str, kind: str, lengths: list[int]) -> None:
    engine, definition = engines(name, kind)
    graph, texts = engine.graph, prompts(engine.graph, lengths)
    one = engine.begin(texts, after_a_past(engine, lengths), "all")
    other = definition.begin(texts, after_a_past(definition, lengths), "all")
    for edge in graph.inputs.values():
        assert_same(one.read(edge), other.read(edge))
    for op in graph.ops:
        one.run(op.index + 1)
        other.run(op.index + 1)
        for edge in op.outputs:
            assert_close(name, one.read(edge), other.read(edge))
        for edge in op.outputs:  # on from the same value, so that roundings do not add up
            other.write(edge, one.read(edge))


@FORMAT
@pytest.mark.parametrize("lengths", [[1], [5, 1, 30]], ids=str)
def test_what_is_written_is_what_the_step_goes_on_with(name: str, lengths: list[int]) -> None:
    engine, definition = engines(name, "multi_query" if name == "F32" else "multi_head")
    graph, texts = engine.graph, prompts(engine.graph, lengths)
    logits = graph.names["logits"]
    plain = np.concatenate(engine.forward(texts, after_a_past(engine, lengths), "all"))
    for op in graph.ops:
        for edge in op.outputs:
            one = engine.begin(texts, after_a_past(engine, lengths), "all")
            other = definition.begin(texts, after_a_past(definition, lengths), "all")
            for each in (one, other):
                each.run(op.index + 1)
            value = one.read(edge)
            changed = [changed_value(graph, edge, v) for v in as_list(value)]
            changed = changed if isinstance(value, list) else changed[0]
            for each in (one, other):
                each.write(edge, changed)
            if attention_of(graph, edge) is None or name == "F32":
                assert_same(one.read(edge), changed)
            for each in (one, other):
                each.run(len(graph.ops))
            found, expected = one.read(logits), other.read(logits)
            assert distance(found, plain) > 1e-3, graph.edges[edge]
            limit = 2e-5 if name == "F32" else 0.06
            assert distance(found, expected) <= limit, graph.edges[edge]


@FORMAT
@KIND
@pytest.mark.parametrize("lengths", STEPS, ids=str)
@pytest.mark.parametrize("value", ["attention_scores", "attention_probabilities"])
def test_patterns_written_back_as_they_were_read_change_little(
    name: str, kind: str, lengths: list[int], value: str
) -> None:
    engine, _ = engines(name, kind)
    graph, texts = engine.graph, prompts(engine.graph, lengths)
    edge, heads = (graph.names[f"layers.0.self_attn.{one}"] for one in (value, "attention_head_outputs"))
    one, other = (engine.begin(texts, after_a_past(engine, lengths), "all") for _ in range(2))
    one.run(graph.producers[edge] + 1)
    one.write(edge, one.read(edge))
    for each in (one, other):
        each.run(graph.producers[heads] + 1)
    found, expected = one.read(heads), other.read(heads)
    difference = np.abs(found - expected) / np.abs(expected).max()
    # Scores went to natural units and back: a weight may be on the other side of a border between two bfloat16.
    assert np.median(difference) <= 1e-7
    assert difference.max() <= (1e-6 if name == "F32" else 2.0**-8)


@FORMAT
def test_a_mask_is_not_applied_again(name: str) -> None:
    engine, definition = engines(name, "multi_query")
    graph, texts = engine.graph, prompts(engine.graph, [5, 150])
    scores = graph.names["layers.0.self_attn.attention_scores"]
    pattern = graph.names["layers.0.self_attn.attention_probabilities"]
    heads = graph.names["layers.0.self_attn.attention_head_outputs"]
    found = []
    for each in (engine.begin(texts), definition.begin(texts)):
        each.run(graph.producers[scores] + 1)
        masked = each.read(scores)
        for one in masked:
            query, key = np.indices(one.shape[1:])
            assert ((one == np.finfo(np.float32).min) == (key > query)).all()
        each.write(scores, [one * 0 for one in masked])
        each.run(graph.producers[pattern] + 1)
        for one in each.read(pattern):
            np.testing.assert_allclose(one, 1 / one.shape[-1], rtol=1e-6)
        each.run(graph.producers[heads] + 1)
        found.append(each.read(heads))
    assert distance(*found) <= 1e-4


def test_keys_and_values_written_stay_in_the_cache_and_those_of_an_abandoned_step_do_not() -> None:
    for name in ("F32", "Q8_0"):
        engine, _ = engines(name, "multi_query")
        graph, [text, more] = engine.graph, prompts(engine.graph, [9, 4])
        keys = graph.names["layers.1.self_attn.attention_keys"]
        fresh, cache = engine.new_cache(), engine.new_cache()
        [expected] = engine.forward([more], [fresh])
        one = engine.begin([text], [cache])
        one.run(len(graph.ops))
        assert cache.length == 0
        assert_same(engine.forward([more], [cache]), [expected])

        one = engine.begin([text], [cache])
        one.run(graph.producers[keys] + 1)
        [old] = one.read(keys)
        assert old.shape == (1, 4 + 9, 32)
        new = old + np.float32(1 / 3)
        one.write(keys, [new])
        [kept] = one.read(keys)
        assert_same(kept, new if name == "F32" else new.astype(np.float16).astype(np.float32))
        one.run(len(graph.ops))
        one.finish()
        assert cache.length == 13
        later = engine.begin([[1]], [cache])
        later.run(graph.producers[keys] + 1)
        assert_same(later.read(keys)[0][:, :13], kept)


@FORMAT
def test_kept_values_are_readable_until_the_end(name: str) -> None:
    engine, _ = engines(name, "multi_query")
    graph, lengths = engine.graph, [5, 1, 30]
    texts = prompts(graph, lengths)
    edges = [edge.index for edge in graph.edges]
    one = engine.begin(texts, after_a_past(engine, lengths))
    two = engine.begin(texts, after_a_past(engine, lengths))
    one.keep(edges)
    one.run(len(graph.ops))
    for op in graph.ops:
        two.run(op.index + 1)
        for edge in op.outputs:
            assert_same(one.read(edge), two.read(edge))
    assert_same(one.read(graph.inputs["input_ids"]), np.concatenate(texts))
    mid = graph.names["layers.0.layer_mid"]
    one = engine.begin(texts, after_a_past(engine, lengths))
    one.keep([mid])
    one.run(graph.producers[mid] + 1)
    one.write(mid, one.read(mid) * 2)
    changed = one.read(mid)
    one.run(len(graph.ops))
    assert_same(one.read(mid), changed)


def test_operations_that_are_skipped_do_not_run() -> None:
    engine, definition = engines("F32", "multi_head")
    graph, lengths = engine.graph, [5, 1, 30]
    texts = prompts(graph, lengths)
    start, end = graph.names["layers.1.layer_input"], graph.names["layers.1.layer_output"]

    def skipped(engine: Any) -> Any:
        one = engine.begin(texts, after_a_past(engine, lengths), "all")
        one.keep([end])
        one.run(graph.producers[start] + 1)
        value = one.read(start)
        one.skip(graph.producers[end] + 1, {end: value})
        assert_same(one.read(end), value)
        one.run(len(graph.ops))
        assert_same(one.read(end), value)
        return one.read(graph.names["logits"]), value

    (found, stream), (expected, _) = skipped(engine), skipped(definition)
    assert ulps(found, expected) <= 4 * TOLERANCE
    assert_same(engine.run_tail(end, stream), found)


@FORMAT
def test_the_tail_of_any_rows_is_that_of_the_step(name: str) -> None:
    engine, _ = engines(name, "multi_query")
    graph, [text] = engine.graph, prompts(engine.graph, [300])
    last = graph.hp.num_layers - 1
    one = engine.begin([text], None, "all")
    streams = {}
    for value in (f"layers.{last}.layer_output", "final_norm_output"):
        edge = graph.names[value]
        one.run(graph.producers[edge] + 1)
        streams[edge] = one.read(edge)
    paused = engine.run_tail(edge, streams[edge][:1])
    one.run(len(graph.ops))
    logits = one.read(graph.names["logits"])
    assert_same(paused, logits[:1])
    for edge, rows in streams.items():
        assert_same(engine.run_tail(edge, rows), logits)
        assert_same(engine.run_tail(edge, np.concatenate([rows, rows])), np.concatenate([logits, logits]))
        assert engine.run_tail(edge, rows[:0]).shape == (0, graph.hp.vocab_size)


def test_embeddings_may_come_in() -> None:
    engine, _ = engines("Q8_0", "multi_query")
    graph, rng = engine.graph, np.random.default_rng(0)
    rows = rng.normal(0, 1, (6, graph.hp.hidden_size)).astype(np.float32)
    [expected] = engine.forward([rows], None, "all")
    one = engine.begin([rows], None, "all")
    assert one.done == 1
    assert_same(one.read(graph.names["token_embeddings"]), rows)
    one.run(len(graph.ops))
    assert_same(one.read(graph.names["logits"]), expected)


def test_two_passes_under_way_do_not_meet() -> None:
    engine, _ = engines("Q8_0", "multi_query")
    graph, texts = engine.graph, prompts(engine.graph, [20, 7])
    expected = [engine.forward([text], None, "all")[0] for text in texts]
    passes: list[NativePass] = [engine.begin([text], None, "all") for text in texts]
    for stop in range(1, len(graph.ops) + 1):
        for one in passes:
            one.run(stop)
        if stop % 7 == 0:
            engine.forward([[1, 2, 3]])
    for one, logits in zip(passes, expected, strict=True):
        assert_same(one.read(graph.names["logits"]), logits)


def test_values_of_another_shape_are_refused() -> None:
    engine, _ = engines("F32", "multi_query")
    graph, [text] = engine.graph, prompts(engine.graph, [4])
    one = engine.begin([text])
    one.run(graph.producers[graph.names["layers.0.layer_output"]] + 1)
    with pytest.raises(ValueError, match="reshape"):
        one.write(graph.names["layers.0.layer_output"], np.zeros((4, 255), np.float32))
    one = engine.begin([text])
    keys = graph.names["layers.0.self_attn.attention_keys"]
    one.run(graph.producers[keys] + 1)
    for wrong in (np.zeros((1, 3, 32)), np.zeros((1, 4, 31)), np.zeros((2, 4, 32))):
        with pytest.raises(ValueError, match=r"positions|shape"):
            one.write(keys, [wrong])


@FORMAT
@KIND
@pytest.mark.parametrize("value", ["attention_scores", "attention_probabilities"])
@given(data=st.data())
@settings(max_examples=8)
def test_patterns_of_some_queries_are_those_of_all(name: str, kind: str, value: str, data: st.DataObject) -> None:
    engine, _ = engines(name, kind)
    graph, lengths = engine.graph, data.draw(st.sampled_from(STEPS))
    edge = graph.names[f"layers.1.self_attn.{value}"]
    rows = [np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=6)), np.int64) for n in lengths]
    one, other = (engine.begin(prompts(graph, lengths), after_a_past(engine, lengths), "all") for _ in range(2))
    for each in (one, other):
        each.run(graph.producers[edge] + 1)
    assert isinstance(one, RowReader)
    whole = other.read(edge)
    assert_same(read_rows(one, edge, rows), [v[:, some].copy() for v, some in zip(whole, rows, strict=True)])
    assert_same(one.read(edge), whole)
    for each in (one, other):
        each.run(len(graph.ops))
    assert_same(one.read(graph.names["logits"]), other.read(graph.names["logits"]))


@pytest.mark.parametrize("isa", module.isas())
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
@KIND
def test_every_instruction_set_computes_patterns(isa: str, name: str, kind: str) -> None:
    """With heads of an odd size where the format has them, and more queries than are taken together."""
    hidden, heads = (96, 8) if name == "Q8_0" else (4 * 37, 4)
    graph = graph_of(kind, hidden=hidden, heads=heads, layers=1, positions=400)
    weights = stored_weights(graph, name)
    before = module.isa()
    native.use_isa(isa)
    try:
        engine = NativeEngine(graph, weights, threads=3)
    finally:
        native.use_isa(before)
    definition, lengths = RoundingEngine(graph, weights), [1, 7, 150]
    attention = [f"layers.0.self_attn.attention_{v}" for v in ("queries", "keys", "values", "scores", "probabilities")]
    heads_at = graph.names["layers.0.self_attn.attention_head_outputs"]
    one, other = (each.begin(prompts(graph, lengths), after_a_past(each, lengths)) for each in (engine, definition))
    for value in attention:
        edge = graph.names[value]
        for each in (one, other):
            each.run(graph.producers[edge] + 1)
        assert_close(name, one.read(edge), other.read(edge))
        if value.endswith(("scores", "probabilities")):
            one.write(edge, [changed_value(graph, edge, v) for v in one.read(edge)])
        other.write(edge, one.read(edge))
    for each in (one, other):
        each.run(graph.producers[heads_at] + 1)
    assert distance(one.read(heads_at), other.read(heads_at)) <= 2e-6


def test_a_thousand_passes_take_no_more_memory_than_a_hundred() -> None:
    engine, _ = engines("Q8_0", "multi_query")
    graph, [text] = engine.graph, prompts(engine.graph, [40])
    scores = graph.names["layers.0.self_attn.attention_scores"]
    stream = graph.names["layers.0.layer_output"]
    cache = engine.new_cache()

    def run(count: int) -> int:
        for i in range(count):
            cache.truncate(0)
            one = engine.begin([text], [cache])
            one.keep([stream] if i % 3 else [])
            one.run(graph.producers[scores] + 1)
            one.write(scores, one.read(scores))
            if i % 5:  # the others are abandoned
                one.run(len(graph.ops))
                one.finish()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = run(100)
    assert run(900) - before < 2 << 20
