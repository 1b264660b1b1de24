"""`scan`: shapes and types of a trace, without a run."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.errors import ContextOverflowError, OutOfOrder, Stopped, Unavailable, UsageError, ValueShapeError
from starscope.microscope import scan as scanning
from starscope.microscope import tensors

PROMPTS = ["def add(a, b):\n    return a", "x = 1"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> starscope.Model:
    """A model that cannot run."""
    loaded = starscope.load("demo", engine="numpy")
    monkeypatch.setattr(loaded.engine, "kernels", {})
    return loaded


@pytest.fixture(params=["torch", "numpy"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tensors that are handed out."""
    if request.param == "numpy":
        monkeypatch.setattr(tensors, "_from_numpy", lambda: None)
        monkeypatch.setattr(scanning, "has_torch", lambda: False)
    return str(request.param)


def facts(value: Any) -> tuple[tuple[int, ...], str]:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def made(model: starscope.Model, name: str) -> int:
    edge = model.scope.reading(name).edge
    return 0 if edge is None else model.scope.edges.facts[edge].made


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS], ids=["one", "two lengths"])
def test_every_value_has_the_shape_and_type_of_a_trace(model: starscope.Model, kind: str, prompt: Any) -> None:
    names = [*model.graph.names, "attention_mask", "layers.1.self_attn.c_attn.output", "lm_head.input"]
    names += ["embed_tokens.input"]
    names = [*sorted(names, key=lambda name: made(model, name)), "next_token_probs"]
    with model.scan(prompt):
        scanned = {name: facts(model.scope.get(name)) for name in names}
        size = tuple(model.input_size)
    running = starscope.load("demo", engine="numpy")
    with running.trace(prompt):
        assert scanned == {name: facts(running.scope.get(name)) for name in names}
        assert size == tuple(running.input_size)


def test_a_value_takes_no_memory(model: starscope.Model, kind: str) -> None:
    tracemalloc.start()
    try:
        with model.scan([1] * 512):
            for layer in model.layers:
                layer.self_attn.attention_scores[:, 0] += 1.0
                layer.layer_output[:, -1] = 0
            assert tuple(model.logits.shape) == (1, 512, 2560)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 4 * 512 * 512  # the scores of one of six blocks; NumPy's += takes those of a head for itself


def test_a_body_that_reads_edits_steers_and_projects_goes_through(model: starscope.Model, kind: str) -> None:
    with model.scan(PROMPTS) as t:
        q = model.layers[0].self_attn.attention_queries
        q[:, 0] = 0
        model.layers[0].self_attn.attention_queries = q
        model.steer([1, 2], np.ones(model.hidden_size, np.float32), factor=2.0, token_positions=-1, batch_index=0)
        model.skip_layers(3, 4)
        model.layers[5].mlp.mlp_output = model.layers[5].mlp.mlp_neurons[..., : model.hidden_size] * 0
        h = model.layers[5].layer_output
        assert tuple(model.project_on_vocab(h).shape) == (2, 10, model.vocab_size)
        logits = model.logits
        assert logits.shape == t.result.logits.shape


def test_what_a_trace_refuses_a_scan_refuses(model: starscope.Model) -> None:
    with model.scan(PROMPTS[0]):
        with pytest.raises(ValueShapeError, match=r"layers.1.layer_output was given a tensor \[1, 2\]"):
            model.layers[1].layer_output = torch.zeros(1, 2)
        with pytest.raises(ValueShapeError, match="was given integers"):
            model.layers[1].layer_output = torch.zeros(1, 10, 256, dtype=torch.int64)
        _ = model.layers[3].layer_output
        with pytest.raises(OutOfOrder, match=r"layers.0.layer_output was asked for after"):
            _ = model.layers[0].layer_output
        h = model.layers[3].layer_output
        _ = model.layers[4].layer_output
        h += 1
        with pytest.raises(OutOfOrder, match=r"layers.3.layer_output was changed after"):
            _ = model.layers[5].layer_output
    with model.scan(PROMPTS[0]):
        model.skip_layer(2)
        with pytest.raises(Unavailable, match="block 2 was skipped"):
            _ = model.layers[2].mlp.mlp_output
    with pytest.raises(ContextOverflowError, match="the context is 512 tokens"):
        model.scan([1] * 513)
    with model.scan(PROMPTS[0]) as t:
        t.stop()
        with pytest.raises(Stopped):
            _ = model.logits


def test_a_generation_has_its_steps_and_nothing_is_chosen(model: starscope.Model, kind: str) -> None:
    shapes = []
    with model.scan(PROMPTS, max_new_tokens=4) as t:
        for step in t.steps():
            shapes.append((step, tuple(model.layers[1].self_attn.attention_probabilities.shape)))
            assert tuple(model.attention_mask.shape) == (2, 10 + step)
    assert shapes == [(0, (2, 4, 10, 10)), *((step, (2, 4, 1, 10 + step)) for step in (1, 2, 3))]
    assert tuple(t.result.shape) == (2, 14)
    with model.scan(PROMPTS, max_new_tokens=3) as t:
        for _ in t.steps():
            break
    assert tuple(t.result.shape) == (2, 13)
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        model.scan(PROMPTS, max_new_tokens=0)


def test_keep_makes_earlier_values_readable(model: starscope.Model) -> None:
    with model.scan(PROMPTS[0]) as t:
        t.keep("layers.0.layer_mid")
        _ = model.layers[4].layer_mid
        assert tuple(model.layers[0].layer_mid.shape) == (1, 10, 256)


def test_the_inputs_of_a_scan_are_the_real_ones(model: starscope.Model) -> None:
    with model.scan(PROMPTS[0]):
        assert model.input_ids.tolist() == [model.tokenizer.encode(PROMPTS[0])]
        model.input_ids = torch.ones(1, 7, dtype=torch.int64)
        assert tuple(model.layers[0].layer_output.shape) == (1, 7, 256)
    with model.scan(np.zeros((3, model.hidden_size), np.float32)):
        assert tuple(model.token_embeddings.shape) == (1, 3, 256)
