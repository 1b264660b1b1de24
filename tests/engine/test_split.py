"""A graph split by device against the same graph on one: logits, values, edits, text; and nothing on a wrong device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.engine import ENGINES, Engine, Weights, make_engine
from starscope.engine.base import make_batch
from starscope.engine.passes import read_rows
from starscope.errors import UnsupportedError
from starscope.family import find_family_for_config, read_config
from starscope.graph import Graph, record
from starscope.placement import Device
from support.ladder import MODELS
from support.numbers import ulps
from support.split import Counted, fake_devices, is_fake, plan_for, split_engine
from support.stored import StoredSource, _encoded, make_graph, prompts, stored_weights

LAYERS = 3
TOLERANCE = 32
FAMILIES = ("gpt_bigcode", "llama")
RUNGS = range(LAYERS + 5)
LLAMA = {
    **MODELS["llama-7b"],
    "max_position_embeddings": 320,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


@cache
def model_of(family: str, kind: str = "F32") -> tuple[Graph, Weights]:
    """A small graph of a family, and random weights for it."""
    if family == "gpt_bigcode":
        graph = make_graph(layers=LAYERS, positions=320, hidden=64, heads=4, inner=96)
        return graph, stored_weights(graph, kind)
    found = find_family_for_config(LLAMA)
    graph = record(found, read_config(found, LLAMA))
    rng, tensors = np.random.default_rng(0), {}
    for slot in found.slots(graph.hp):
        stored = "F32" if slot.always_f32 else kind
        centre, spread = (1, 0.1) if "norm" in slot.name else (0, 1.5 / slot.shape[-1] ** 0.5)
        tensors[slot.name] = stored, _encoded(stored, rng.normal(centre, spread, slot.shape), rng)
    return graph, Weights(found.slots(graph.hp), StoredSource(tensors))


@cache
def alone(family: str, engine: str) -> Engine:
    """The engine that runs all of it."""
    try:
        return make_engine(engine, *model_of(family), threads=1)
    except UnsupportedError:
        pytest.skip(f"the {engine} engine has not all of {family}'s operations")


@pytest.fixture(params=[(f, h) for f in FAMILIES for h in ENGINES], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family, and the engine of the host."""
    alone(*request.param)
    found: tuple[str, str] = request.param
    return found


@pytest.mark.parametrize("low_vram", [False, True])
@pytest.mark.parametrize("layers", RUNGS)
def test_logits_of_any_number_of_layers_are_those_of_one_engine(
    pair: tuple[str, str], layers: int, low_vram: bool
) -> None:
    family, host = pair
    graph, weights = model_of(family)
    texts = prompts(graph, [20, 1, 40])
    expected = alone(*pair).forward(texts, None, "all")
    for devices in (1, 2):
        for batch in (16, 512):
            split = split_engine(graph, weights, layers, host, low_vram=low_vram, devices=devices, batch=batch)
            for found, rows in zip(split.forward(texts, None, "all"), expected, strict=True):
                assert ulps(found, rows) <= TOLERANCE
            for found, rows in zip(split.forward(texts), expected, strict=True):
                assert ulps(found, rows[-1:]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [n for n in RUNGS if n != LAYERS + 2])  # there attention is no one call
def test_where_every_part_is_one_engines_arithmetic_the_bits_are_the_same(family: str, layers: int) -> None:
    graph, weights = model_of(family)
    texts = prompts(graph, [20, 1, 40])
    expected = alone(family, "torch").forward(texts, None, "all")
    for found, rows in zip(split_engine(graph, weights, layers).forward(texts, None, "all"), expected, strict=True):
        np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("layers", [1, LAYERS + 1, LAYERS + 2, LAYERS + 3])
def test_decoding_with_a_cache_at_several_places_equals_the_whole_text(pair: tuple[str, str], layers: int) -> None:
    family, host = pair
    graph, weights = model_of(family)
    split = split_engine(graph, weights, layers, host)
    texts = prompts(graph, [12, 5])
    expected = alone(*pair).forward(texts, None, "all")
    caches = [split.new_cache() for _ in texts]
    found = [split.forward([text[:3] for text in texts], caches, "all")]
    found += [split.forward([text[i : i + 1] for text in texts], caches, "all") for i in (3, 4)]
    for i, rows in enumerate(expected):
        assert ulps(np.concatenate([step[i] for step in found]), rows[:5]) <= TOLERANCE
    caches[0].truncate(4)
    assert ulps(split.forward([texts[0][4:]], caches[:1], "all")[0], expected[0][4:]) <= TOLERANCE


@pytest.mark.parametrize("layers", [2, LAYERS + 2, LAYERS + 3])
def test_softmax_rows_of_every_length_up_to_two_blocks(pair: tuple[str, str], layers: int) -> None:
    family, host = (
        pair  # 128 keys are a tile of the native engine; a row shorter than its block reads nothing behind it
    )
    graph, weights = model_of(family)
    text = prompts(graph, [260])[0]
    [expected] = alone(*pair).forward([text], None, "all")
    split = split_engine(graph, weights, layers, host)
    [found] = split.forward([text], None, "all")
    assert ulps(found, expected) <= TOLERANCE
    cache = split.new_cache()
    one_by_one = [split.forward([[token]], [cache])[0] for token in text]
    assert ulps(np.concatenate(one_by_one), expected) <= TOLERANCE


def test_embeddings_take_the_place_of_token_embeddings(pair: tuple[str, str]) -> None:
    family, host = pair
    graph, weights = model_of(family)
    [text] = prompts(graph, [9])
    rows = weights.rows("embed_tokens.weight", np.array(text))
    for layers in (1, LAYERS + 3):
        split = split_engine(graph, weights, layers, host)
        assert ulps(split.forward([rows])[0], alone(*pair).forward([text])[0]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("layers", [1, LAYERS + 1, LAYERS + 3])
def test_matrices_that_stay_stored_on_a_device_give_the_numbers_of_decoded_ones(kind: str, layers: int) -> None:
    graph, weights = model_of("gpt_bigcode", kind)
    texts = prompts(graph, [20, 7])
    expected = make_engine("torch", graph, weights).forward(texts)
    for found, rows in zip(split_engine(graph, weights, layers).forward(texts), expected, strict=True):
        assert ulps(found, rows) <= 2**13  # keys and values are rounded to float16


# Passes: looking and changing.


@pytest.mark.parametrize("layers", [1, LAYERS, LAYERS + 1, LAYERS + 2, LAYERS + 3])
@pytest.mark.parametrize("low_vram", [False, True])
def test_every_value_is_what_one_engine_has(pair: tuple[str, str], layers: int, low_vram: bool) -> None:
    family, host = pair
    graph, weights = model_of(family)
    texts = prompts(graph, [9, 4])
    one = alone(family, "numpy").begin(texts)
    other = split_engine(graph, weights, layers, host, low_vram=low_vram).begin(texts)
    for op in graph.ops:
        one.run(op.index + 1)
        other.run(op.index + 1)
        for edge in op.outputs:
            expected, found = one.read(edge), other.read(edge)
            for a, b in zip(*((v if isinstance(v, list) else [v]) for v in (found, expected)), strict=True):
                assert a.shape == b.shape
                assert ulps(a, b) <= TOLERANCE, (op.index, graph.edges[edge].names)
            if graph.ops[graph.producers[edge] or 0].kind in ("scores", "softmax"):
                picked = read_rows(other, edge, [np.array([3, 1]), np.array([0])])
                assert ulps(picked[0], expected[0][:, [3, 1]]) <= TOLERANCE
    assert ulps(other.finish(), one.finish()) <= TOLERANCE


@pytest.mark.parametrize("layers", [2, LAYERS + 1, LAYERS + 2, LAYERS + 3])
def test_a_value_that_is_written_is_what_every_device_goes_on_with(pair: tuple[str, str], layers: int) -> None:
    family, host = pair
    graph, weights = model_of(family)
    texts = prompts(graph, [9])
    for name in graph.names:
        edge = graph.names[name]
        if graph.producers[edge] is None:
            continue
        passes = [alone(family, "numpy").begin(texts), split_engine(graph, weights, layers, host).begin(texts)]
        logits = []
        for one in passes:
            one.run(graph.producers[edge] + 1)
            value = one.read(edge)
            scaled = [each * np.float32(0.5) for each in value] if isinstance(value, list) else value * np.float32(0.5)
            one.write(edge, scaled)
            one.run(len(graph.ops))
            logits.append(one.finish())
        assert ulps(logits[1], logits[0]) <= TOLERANCE, name


@pytest.fixture(scope="module")
def demo() -> starscope.Model:
    return starscope.load("demo", engine="torch", threads=1)


def demo_split(demo: starscope.Model, layers: int) -> starscope.Model:
    engine = split_engine(demo.graph, demo.weights, layers)
    return starscope.Model(demo.path, demo.weights, demo.tokenizer, engine)


@pytest.mark.parametrize("above", [-1, 1, 3])
def test_text_traces_and_edits_are_those_of_one_engine(demo: starscope.Model, above: int) -> None:
    split = demo_split(demo, demo.num_layers + above)
    prompt = "def add(a, b):\n    return"
    assert split.generate(prompt, max_new_tokens=12).text == demo.generate(prompt, max_new_tokens=12).text
    seen = []
    for model in (demo, split):
        with model.trace(prompt):
            pattern = model.layers[1].self_attn.attention_probabilities.clone()
            model.layers[1].layer_output[:, -1] *= 2
            logits = model.logits.clone()
        cached = model.run_with_cache(prompt, "layers.1.layer_output")[1]["layers.1.layer_output"]
        edit = starscope.Edit("layer_output", "scale", layers=1, factor=2)
        with model.editing([edit]):
            seen.append((pattern, logits, model.forward(model.tokenizer.encode(prompt)), cached))
    for found, expected in zip(seen[1], seen[0], strict=True):
        assert ulps(found.numpy(), expected.numpy()) <= 2**13  # keys and values are rounded to float16


def test_gradients_are_refused_with_the_engine_that_has_them(demo: starscope.Model) -> None:
    with (
        pytest.raises(UnsupportedError, match="split engine has no gradients"),
        demo_split(demo, 1).trace("a", grad=True),
    ):
        pass


# Devices that are not there.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", RUNGS)
@pytest.mark.parametrize("low_vram", [False, True])
def test_no_operation_has_values_of_two_devices(
    family: str, layers: int, low_vram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = model_of(family)
    plan = plan_for(graph, weights, layers, low_vram=low_vram, devices=2)
    with fake_devices(monkeypatch):
        from starscope.engine.split.engine import SplitEngine

        split = SplitEngine(plan, weights, host="torch", threads=1)
        texts = prompts(graph, [7, 3])
        caches = [split.new_cache() for _ in texts]
        for step in (texts, [[1], [2]]):
            batch = make_batch(split, step, caches, "last")
            logits = split.run(batch)
            assert is_fake(logits)
            assert logits.shape == (2, graph.hp.vocab_size)
            assert str(logits.device) == (plan.main if layers > LAYERS else "cpu")
            batch.advance()


def test_the_fake_devices_notice_what_is_on_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_devices(monkeypatch):
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        with pytest.raises(Exception, match="same device"):
            here + there


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 2, LAYERS, LAYERS + 1, LAYERS + 3])
@pytest.mark.parametrize("low_vram", [False, True])
def test_what_is_allocated_is_what_the_plan_says(
    family: str, layers: int, low_vram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = wide_model_of(family)
    plan = plan_for(graph, weights, layers, low_vram=low_vram, context_length=256, batch=32)
    with fake_devices(monkeypatch), Counted() as counted:
        from starscope.engine.split.engine import SplitEngine

        split = SplitEngine(plan, weights, host="torch", threads=1)
        cache = split.new_cache()
        done = 0
        while done < 256:
            batch = make_batch(split, [[1] * min(plan.batch, 256 - done)], [cache], "last")
            split.run(batch)
            batch.advance()
            done = cache.length
    assert 0.95 <= counted.most["cuda"] / plan.on_gpus.total <= 1.0


@cache
def wide_model_of(family: str) -> tuple[Graph, Weights]:
    """Sizes at which weights are most of it, as they are in every real model; the numbers are all zeros."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    if family == "gpt_bigcode":
        graph = make_graph(layers=LAYERS, positions=256, hidden=512, heads=8, inner=2048, vocab=4096)
    else:
        found = find_family_for_config(LLAMA)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
        graph = record(found, read_config(found, {**LLAMA, **sizes, **heads}))
    from starscope.engine.weights import ArraySource

    slots = graph.family.slots(graph.hp)
    return graph, Weights(slots, ArraySource({slot.name: np.zeros(slot.shape, np.float32) for slot in slots}))


def test_a_context_that_the_model_does_not_have_is_refused_wherever_it_runs() -> None:
    from starscope.engine.split.choose import Placing, place
    from starscope.errors import ContextOverflowError

    graph, weights = model_of("gpt_bigcode")
    too_long = graph.hp.context_length + 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("starscope.engine.split.choose.find_devices", lambda *_: [Device("cuda", 1 << 34)])
        with pytest.raises(ContextOverflowError, match=str(too_long)):
            place(graph, weights, "auto", "auto", Placing(gpu_layers=1), context_length=too_long)


def test_what_the_parts_have_to_say_is_the_engines_to_say() -> None:
    graph, weights = model_of("gpt_bigcode")
    split = split_engine(graph, weights, 1)
    next(iter(split.parts.values())).notes = ["one thing", "one thing"]  # type: ignore[attr-defined]
    assert split.notes.count("one thing") == 1
