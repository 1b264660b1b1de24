"""Gradients of every value in float64, against central differences made by writing the value in a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.engine.base import MASKED
from starscope.engine.torch_engine import TorchEngine
from starscope.errors import OutOfOrder
from support.traces import logits_of, read, same, value_names, write

PROMPT = [40, 33, 250, 7, 61, 33]
STEP = 1e-5
RELATIVE = 1e-6  # of the largest entry of a gradient: what central differences of that step leave in float64


@pytest.fixture(scope="module", params=["f32", "q8_0"])
def double(request: pytest.FixtureRequest, opened: Any) -> starscope.Model:
    """The torch engine in float64, by hand."""
    model = opened("torch", request.param)
    engine = TorchEngine(model.graph, model.weights, dtype=torch.float64)
    return starscope.Model(model.path, model.weights, model.tokenizer, engine)


def score(logits: Any) -> Any:
    """A number that all logits have a part in."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape).sin()
    return (logits * weights).sum()


def entries(value: Any, count: int = 4) -> list[tuple[int, ...]]:
    """Some places of a value that are not masked."""
    plain = value.detach().as_subclass(torch.Tensor)
    there = ((plain != 0) & (plain > MASKED)).nonzero().tolist()
    chosen = np.random.default_rng(0).choice(len(there), count, replace=False)
    return [tuple(there[i]) for i in chosen]


def assert_gradient(model: starscope.Model, name: str, value: Any, edit: Any = None) -> None:
    """`value.grad` against differences."""
    assert value.grad is not None, name
    largest = float(value.grad.abs().max())
    assert largest > 0, name
    for place in entries(value):
        results = []
        for sign in (1, -1):
            with model.trace(PROMPT) as t:
                new = read(model, name).clone()
                new[place] += sign * STEP
                write(model, name, new)
                if edit:
                    edit(model)
            results.append(float(score(t.result.logits)))
        expected = (results[0] - results[1]) / (2 * STEP)
        assert abs(float(value.grad[place]) - expected) <= RELATIVE * max(largest, 1), (name, place)


def names_of(double: starscope.Model) -> list[str]:
    """All values; of a file whose keys are kept in float16 without those, since rounding has no differences."""
    names = value_names(double, [0, 2])
    if not double.weights.half_cache:
        return names
    rounded = [f"layers.{layer}.self_attn.attention_{part}" for layer in range(3) for part in ("keys", "values")]
    late = ("layers.2.", "final", "lm_head", "logits")
    return [
        name
        for name in names
        if name not in rounded and name.startswith(late) and not name.endswith(("layer_input", "norm_output"))
    ]


def test_every_value_has_the_gradient_that_differences_say(double: starscope.Model) -> None:
    names = names_of(double)
    with double.trace(PROMPT, grad=True):
        values = {name: read(double, name) for name in names}
        score(double.logits).backward()
    for name, value in values.items():
        assert value.dtype == torch.float64
        assert_gradient(double, name, value)


def test_gradients_go_through_edits(opened: Any) -> None:
    model = opened("torch", "f32")
    double = starscope.Model(
        model.path, model.weights, model.tokenizer, TorchEngine(model.graph, model.weights, dtype=torch.float64)
    )
    direction = torch.linspace(-1, 1, double.hidden_size, dtype=torch.float64)

    def edit(model: starscope.Model) -> None:
        block = model.layers[1]
        block.self_attn.attention_scores[:, 1] *= 0.5
        block.self_attn.attention_probabilities[:, 0] = block.self_attn.attention_probabilities[:, 1] * 0.7
        block.self_attn.attention_head_outputs[:, :, 2] = 0
        block.mlp.mlp_neurons = block.mlp.mlp_neurons.tanh()
        block.layer_output[:, -1] += direction

    with double.trace(PROMPT, grad=True):
        value = double.layers[0].layer_output
        edit(double)
        later = double.layers[2].layer_mid
        score(double.logits).backward()
    assert_gradient(double, "layers.0.layer_output", value, edit)
    assert later.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["queries", "keys", "values", "scores", "probabilities", "head_outputs"])
def test_a_value_changed_in_place_or_assigned_has_the_gradient_of_what_was_used(opened: Any, name: str) -> None:
    model = opened("torch", "f32")
    path = f"layers.1.self_attn.attention_{name}"
    with model.trace(PROMPT, grad=True):
        value = read(model, path)
        value[:, 0] *= 2
        score(model.logits).backward()
    with model.trace(PROMPT, grad=True):
        factor = torch.ones(())
        write(model, path, read(model, path) * factor)
        assigned = read(model, path)
        assigned[:, 0] *= 2
        score(model.logits).backward()
    assert value.grad is not None
    assert assigned.grad is not None
    torch.testing.assert_close(value.grad, assigned.grad, rtol=1e-5, atol=1e-6)
    with model.trace(PROMPT):
        read(model, path)[:, 0] *= 2
        plain = model.logits
    with model.trace(PROMPT, grad=True):
        read(model, path)[:, 0] *= 2
        torch.testing.assert_close(model.logits.detach(), plain, rtol=1e-5, atol=1e-5)


def test_an_assigned_tensor_of_the_users_own_gets_its_gradient(opened: Any) -> None:
    model = opened("torch", "f32")
    vector = torch.zeros(model.hidden_size, requires_grad=True)
    with model.trace(PROMPT, grad=True):
        out = model.layers[1].layer_output
        model.layers[1].layer_output = out + vector
        score(model.logits).backward()
    assert vector.grad is not None
    assert vector.grad.abs().max() > 0
    torch.testing.assert_close(vector.grad, out.grad.sum((0, 1)).as_subclass(torch.Tensor), rtol=1e-4, atol=1e-5)


def test_backward_may_come_behind_the_block(opened: Any) -> None:
    model = opened("torch", "f32")
    with model.trace(PROMPT, grad=True) as t:
        inside = model.layers[1].layer_output
        score(model.logits).backward()
    with model.trace(PROMPT, grad=True) as t:
        behind = model.layers[1].layer_output
    score(t.result.logits).backward()
    with model.trace(PROMPT, grad=True):
        later = model.layers[1].layer_output
        logits = model.logits
    score(logits).backward()
    assert same(inside.grad, behind.grad)
    assert same(inside.grad, later.grad)


def test_the_same_numbers_under_a_modules_name_have_the_gradient_too(opened: Any) -> None:
    model = opened("torch", "f32")
    with model.trace(PROMPT, grad=True):
        block = model.layers[1]
        found = [block.input, block.self_attn.o_proj.input, block.mlp.input, block.mlp.output, block.output]
        score(model.logits).backward()
    with model.trace(PROMPT, grad=True):
        expected = [
            block.layer_input,
            block.self_attn.attention_premix,
            block.mlp_input,
            block.mlp.mlp_output,
            block.layer_output,
        ]
        score(model.logits).backward()
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None
        assert same(one.grad, other.grad.reshape(one.shape))


def test_a_value_under_both_names_has_its_gradient_under_each(opened: Any) -> None:
    model = opened("torch", "f32")
    block = model.layers[1]
    for first in (0, 1):
        with model.trace(PROMPT, grad=True):
            reads = [lambda: block.self_attn.attention_premix, lambda: block.self_attn.o_proj.input]
            one = reads[first]()
            two = reads[1 - first]()
            two[:, -1] *= 2
            score(model.logits).backward()
        assert one.grad is not None
        assert two.grad is not None
        assert one.shape != two.shape


def test_a_value_changed_by_whatever_view_has_its_gradient(opened: Any) -> None:
    model = opened("torch", "f32")
    direction = torch.linspace(-1, 1, model.hidden_size)

    def by_slice(value: Any) -> None:
        value[:, -1] += direction

    def by_view(value: Any) -> None:
        value[:, -1].add_(direction)

    def by_view_of_view(value: Any) -> None:
        value.view(-1, model.hidden_size)[-1].add_(direction)

    def by_other_shape(value: Any) -> None:
        _ = value
        model.layers[1].output[:, -1].add_(direction)

    gradients = []
    for change in (by_slice, by_view, by_view_of_view, by_other_shape):
        with model.trace(PROMPT, grad=True):
            value = model.layers[1].layer_output
            change(value)
            score(model.logits).backward()
        gradients.append(value.grad)
    assert all(same(one, gradients[0]) for one in gradients)


def test_a_value_has_its_gradient_though_nothing_before_it_does_or_gradients_are_off(opened: Any) -> None:
    model = opened("torch", "f32")
    with model.trace(PROMPT, grad=True):
        model.token_embeddings = torch.zeros(1, len(PROMPT), model.hidden_size)
        model.layers[1].layer_output = torch.ones(1, len(PROMPT), model.hidden_size).cumsum(1).cumsum(2).sin()
        given = model.layers[1].layer_output
        with torch.no_grad():
            value = model.layers[2].layer_mid
            logits = model.logits
    score(logits).backward()
    assert value.grad.any()
    assert given.grad.any()


def test_looking_with_gradients_changes_no_logit_and_a_row_of_a_batch_has_its_own(opened: Any) -> None:
    for to in ("f32", "q8_0"):
        model = opened("torch", to)
        plain = logits_of(model, PROMPT)
        with model.trace(PROMPT, grad=True) as t:
            for name in value_names(model):
                read(model, name)
        torch.testing.assert_close(t.result.logits.detach().as_subclass(torch.Tensor), plain, rtol=1e-4, atol=1e-4)
        with model.trace([PROMPT, PROMPT[:3]], grad=True):
            value = model.layers[0].layer_output
            score(model.logits[1, -1]).backward()
        assert not value.grad[0].any()
        assert not value.grad[1, :3].any()
        assert value.grad[1, 3:].any()


def test_gradients_flow_through_steps_of_a_generation(opened: Any) -> None:
    model = opened("torch", "f32")
    bias = dict.fromkeys(model.tokenizer.stop_ids, -1e9)
    with model.trace(PROMPT, max_new_tokens=3, grad=True, logit_bias=bias) as t:
        kept = []
        for _ in t.steps():
            kept.append(model.layers[0].layer_output)
            last = model.logits
        score(last).backward()
    assert all(value.grad is not None and value.grad.abs().max() > 0 for value in kept)


def test_a_change_that_comes_too_late_is_refused_with_gradients_too(opened: Any) -> None:
    model = opened("torch", "f32")
    with pytest.raises(OutOfOrder, match=r"layers\.1\.layer_output"), model.trace(PROMPT, grad=True):  # noqa: PT012
        value = model.layers[1].layer_output
        _ = model.logits
        with torch.no_grad():
            value[:] = 0
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT, grad=True) as t, torch.no_grad():
        model.layers[1].layer_output[:, -1] = 0
    assert not same(t.result.logits.detach(), plain)


def test_the_weights_stay_as_they_are(opened: Any) -> None:
    model = opened("torch", "f32")
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT, grad=True):
        score(model.logits).backward()
    assert all(one.grad is None for one in model.engine.parameters.values())
    assert same(logits_of(model, PROMPT), plain)


@pytest.mark.parametrize("off", [torch.inference_mode, torch.no_grad])
def test_gradients_switched_off_around_a_trace_leave_its_own(opened: Any, off: Any) -> None:
    model = opened("torch", "f32")
    with model.trace(PROMPT, grad=True):
        expected = model.layers[1].layer_output
        score(model.logits).backward()
    with off(), model.trace(PROMPT, grad=True):
        value, shaped = model.layers[1].layer_output, model.layers[2].self_attn.o_proj.input
        logits = model.logits
    score(logits).backward()
    assert same(value.grad, expected.grad)
    assert shaped.grad.any()
    with off(), model.trace([PROMPT, PROMPT[:3]], grad=True) as t:
        rows = model.layers[1].layer_output
    score(t.result.logits).backward()
    assert rows.grad[1, 3:].any()
    assert not rows.grad[1, :3].any()
    with off():
        constant = torch.ones(1, len(PROMPT), model.hidden_size).cumsum(-1).cos()
    with model.trace(PROMPT, grad=True):
        model.layers[0].layer_output = constant
        given = model.layers[0].layer_output
        score(model.logits).backward()
    assert given.grad.any()
