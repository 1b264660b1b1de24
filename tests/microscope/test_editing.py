"""Where edits hold: blocks, models of their own, traces, perplexity; and numbers that come from other prompts."""

from __future__ import annotations

import contextvars
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.engine import ENGINES
from starscope.errors import UsageError
from starscope.microscope import Edit
from starscope.microscope.ablation import mean_ablation, resample_ablation
from starscope.microscope.tensors import as_array
from starscope.perplexity import measure, measure_texts
from support.edited import make_model, random_prompts
from support.numbers import TOLERANCE, ulps
from support.traces import same

[PROMPT] = random_prompts(1, [7])
VECTOR = np.random.default_rng(2).normal(0, 1, 64).astype(np.float32)
ADD = Edit("layer_output", "add", layers=0, tensor=VECTOR)
HALVE = Edit("mlp_output", "scale", layers=1, factor=0.5)


@pytest.fixture(params=ENGINES)
def model(request: pytest.FixtureRequest) -> starscope.Model:
    return make_model(request.param)


def test_blocks_inside_one_another_add_their_edits_in_order(model: starscope.Model) -> None:
    plain = model.forward(PROMPT)
    double = Edit("layer_output", "scale", layers=0, factor=2)
    with model.editing(ADD):
        outer = model.forward(PROMPT)
        with model.editing([double]):
            inner = model.forward(PROMPT)
        assert torch.equal(model.forward(PROMPT), outer)
    assert torch.equal(model.forward(PROMPT), plain)
    with model.editing([ADD, double]):
        assert torch.equal(model.forward(PROMPT), inner)
    with model.editing([double, ADD]):
        assert not torch.equal(model.forward(PROMPT), inner)


def test_an_error_in_a_block_ends_its_edits(model: starscope.Model) -> None:
    plain = model.forward(PROMPT)
    with pytest.raises(RuntimeError, match="mine"), model.editing(ADD):
        raise RuntimeError("mine")
    assert torch.equal(model.forward(PROMPT), plain)


def test_a_block_is_of_its_context_and_its_model_alone(model: starscope.Model) -> None:
    plain, elsewhere = model.forward(PROMPT), contextvars.copy_context()
    other = model.with_edits([])
    with model.editing(ADD):
        assert torch.equal(elsewhere.run(model.forward, PROMPT), plain)
        assert torch.equal(other.forward(PROMPT), plain)
        assert not torch.equal(model.forward(PROMPT), plain)


def test_a_text_that_streams_keeps_the_edits_that_it_began_with(model: starscope.Model) -> None:
    with model.editing(ADD):
        pieces = model.generate(PROMPT, max_new_tokens=5, stream=True)
        expected = model.generate(PROMPT, max_new_tokens=5).token_ids
    *_, last = pieces
    assert last.completion is not None
    assert last.completion.token_ids == expected != model.generate(PROMPT, max_new_tokens=5).token_ids


def test_a_model_with_edits_shares_the_weights_and_leaves_the_other_as_it_was(model: starscope.Model) -> None:
    plain = model.forward(PROMPT)
    steered = model.with_edits([ADD])
    both = steered.with_edits(HALVE)
    assert steered.weights is model.weights
    assert steered.engine.graph is model.engine.graph
    with model.editing([ADD, HALVE]):
        expected = model.forward(PROMPT)
    assert torch.equal(both.forward(PROMPT), expected)
    with steered.editing(HALVE):
        assert torch.equal(steered.forward(PROMPT), expected)
    assert torch.equal(model.forward(PROMPT), plain)
    assert model.engine.edits is None


def test_traces_of_a_model_and_of_one_with_edits_do_not_meet(model: starscope.Model) -> None:
    steered = model.with_edits([ADD])
    with model.trace(PROMPT) as outer:
        before = model.layers[0].layer_output.clone()
        with steered.trace(PROMPT) as inner:
            after = steered.layers[0].layer_output.clone()
        last = model.layers[1].layer_output.clone()
    assert same(after, before + torch.from_numpy(VECTOR))
    assert not same(inner.result.logits, outer.result.logits)
    with model.trace(PROMPT):
        assert same(model.layers[1].layer_output, last)


def test_what_is_read_under_edits_is_edited_and_can_be_changed_again(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        plain = model.layers[0].layer_output.clone()
    with model.editing(ADD), model.trace(PROMPT) as t:
        value = model.layers[0].layer_output
        assert same(value, plain + torch.from_numpy(VECTOR))
        model.layers[0].layer_output = plain
    with model.trace(PROMPT) as unedited:
        pass
    assert same(t.result.logits, unedited.result.logits)


def test_embeddings_are_edited_as_those_of_tokens_are(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        rows = as_array(model.token_embeddings[0]).copy()
    with model.editing(Edit("token_embeddings", "scale", factor=0.5, positions=[1, -1])):
        assert torch.equal(model.forward(rows), model.forward(PROMPT))
        with model.trace(rows) as t:
            pass
        with model.trace(PROMPT) as u:
            pass
    assert same(t.result.logits, u.result.logits)
    assert not torch.equal(model.forward(rows), u.result.logits)


def test_edits_that_change_nothing_change_no_bit(model: starscope.Model) -> None:
    plain = model.forward(PROMPT)
    for name in ("layer_output", "attention_queries", "attention_keys", "mlp_neurons", "logits"):
        with model.editing(Edit(name, "scale", factor=1.0)):
            assert same(model.forward(PROMPT), plain)


def test_a_scale_keeps_the_sign_of_zero_and_a_scale_of_0_gives_0(model: starscope.Model) -> None:
    for factor, sign in ((1.0, True), (0.5, True), (-1.0, False), (0.0, False)):
        edits = [Edit("layer_output", "set", tensor=-0.0), Edit("layer_output", "scale", factor=factor)]
        with model.editing(edits), model.trace(PROMPT):
            value = as_array(model.layers[0].layer_output)
        assert (value == 0).all()
        assert (np.signbit(value) == sign).all()


def test_perplexity_is_that_of_the_edited_model(model: starscope.Model) -> None:
    text = "def add(a, b):\n    return a + b\n" * 3
    plain = measure_texts(model.engine, model.tokenizer, [text])
    with model.editing(ADD):
        block = measure_texts(model.engine, model.tokenizer, [text])
    assert block.nats == measure_texts(model.with_edits([ADD]).engine, model.tokenizer, [text]).nats
    assert abs(block.nats - plain.nats) > 1e-3
    last = model.with_edits([Edit("logits", "zero", positions=-1)]).engine
    found = measure(last, [PROMPT], 7, first=1, window=96, stride=48)
    expected = measure(model.engine, [PROMPT], 7, first=1, window=96, stride=48)
    assert found.nats != expected.nats


def test_a_long_window_is_one_prompt_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("native")
    engine = model.with_edits([Edit("layer_output", "zero", positions=-3), ADD]).engine
    [document] = random_prompts(3, [60])
    whole = measure(engine, [document], 60, first=1, window=96, stride=48)
    monkeypatch.setattr("starscope.perplexity.MOST_ROWS", 7)
    assert measure(engine, [document], 60, first=1, window=96, stride=48).nats == pytest.approx(whole.nats, rel=1e-12)


def test_gradients_flow_through_edits() -> None:
    model = make_model("torch")
    edits = [Edit("layer_output", "scale", layers=0, factor=3.0, positions=-1), Edit("layer_mid", "zero", positions=0)]
    with model.editing(edits), model.trace(PROMPT, grad=True):
        first = model.token_embeddings
        output = model.layers[0].layer_output
        model.logits[0, -1, 3].backward()
    assert output.grad is not None
    with model.trace(PROMPT, grad=True):
        again = model.token_embeddings
        for layer in range(model.num_layers):
            mid = model.layers[layer].layer_mid.clone()
            mid[:, 0] = 0
            model.layers[layer].layer_mid = mid
            if layer == 0:
                out = model.layers[0].layer_output.clone()
                out[:, -1] *= 3
                model.layers[0].layer_output = out
        model.logits[0, -1, 3].backward()
    assert ulps(as_array(first.grad), as_array(again.grad)) <= TOLERANCE


@pytest.mark.parametrize(
    "name", ["attention_head_outputs", "attention_queries", "attention_values", "attention_premix"]
)
def test_the_mean_of_a_head_is_that_of_other_prompts(model: starscope.Model, name: str) -> None:
    prompts = random_prompts(9, [5, 8])
    edit = mean_ablation(model, name, 1, 0, prompts)
    rows = []
    for prompt in prompts:
        with model.trace(prompt):
            value = as_array(getattr(model.layers[1].self_attn, name))[0]
        rows.append(value[:, 0] if name.endswith(("outputs", "premix")) else value[0])
    assert (edit.op, edit.layers, edit.heads) == ("set", (1,), (0,))
    assert ulps(edit.tensor, np.concatenate(rows).astype(np.float64).mean(0)[None]) <= 2
    with model.editing(edit), model.trace(PROMPT):
        value = as_array(getattr(model.layers[1].self_attn, name))[0]
    found = value[:, 0] if name.endswith(("outputs", "premix")) else value[0]
    assert same(found, np.broadcast_to(edit.tensor[0], found.shape))


def test_a_resampled_head_gives_what_it_gives_elsewhere(model: starscope.Model) -> None:
    [other] = random_prompts(10, [9])
    with model.trace(other):
        there = as_array(model.layers[1].self_attn.attention_head_outputs).copy()
    with model.trace(PROMPT):
        here = as_array(model.layers[1].self_attn.attention_head_outputs).copy()
    edit = resample_ablation(model, "attention_head_outputs", 1, [3, 1], other, positions=[2, 0])
    with model.editing(edit), model.trace(PROMPT):
        found = as_array(model.layers[1].self_attn.attention_head_outputs)
    expected = here.copy()
    expected[:, [0, 2], 1] = there[:, [0, 2], 1]
    expected[:, [0, 2], 3] = there[:, [0, 2], 3]
    assert same(found, expected)
    whole = resample_ablation(model, "layers.0.layer_output", None, None, PROMPT)
    with model.editing(whole), model.trace(other) as t:
        value = as_array(model.layers[0].layer_output)[0, : len(PROMPT)]
    assert same(value, whole.tensor)
    assert t.result.logits.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: mean_ablation(m, "attention_head_outputs", None, 0, [PROMPT]), "expected the layer"),
        (lambda m: mean_ablation(m, "attention_scores", 0, 0, [PROMPT]), "another size for every prompt"),
        (lambda m: mean_ablation(m, "layer_output", 0, 1, [PROMPT]), "has no heads"),
        (lambda m: mean_ablation(m, "attention_queries", 0, 4, [PROMPT]), "heads has 4"),
        (lambda m: mean_ablation(m, "attention_queries", 0, 0, []), "no prompt"),
        (lambda m: resample_ablation(m, "layer_output", 0, None, PROMPT, positions=7), "positions has 7"),
        (lambda m: resample_ablation(m, "layer_output", 0, None, PROMPT, positions="new"), "positions are new"),
    ],
)
def test_an_ablation_without_its_numbers_is_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(make_model("numpy"))
