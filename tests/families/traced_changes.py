"""The checks of values that are written: what follows from them, and what is refused without harm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import starscope
from families.traced_support import HALF, PROMPT, assert_equal_but_for_attention, shape_of
from starscope.errors import OutOfOrder, OutsideTrace, ValueShapeError
from support.numbers import TOLERANCE
from support.traces import all_values, changed, logits_of, read, same, value_names, value_ulps, write


class ChangesSuite:
    def test_every_write_moves_the_logits_and_in_place_is_assignment_to_the_bit(self, model: starscope.Model) -> None:
        plain = logits_of(model, PROMPT)
        with model.trace(PROMPT):
            values = all_values(model)
        for name, value in values.items():
            new = changed(value)
            with model.trace(PROMPT) as t:
                write(model, name, new)
            assigned = t.result.logits
            assert not same(assigned, plain), name
            assert torch.isfinite(assigned).all()
            with model.trace(PROMPT) as t:
                read(model, name)[...] = new
            assert same(t.result.logits, assigned), name
            with model.trace(PROMPT) as t:  # read, then assigned
                assert same(read(model, name), value), name
                write(model, name, new)
                assert same(read(model, name), new), name
            assert same(t.result.logits, assigned), name
            with model.trace(PROMPT) as t:
                write(model, name, value)
            assert_equal_but_for_attention(model, name, t.result.logits, plain)
        assert same(logits_of(model, PROMPT), plain)

    def test_a_value_written_is_what_those_after_it_are_made_of(self, model: starscope.Model) -> None:
        # Zeroed, each of them leaves what its consumers make of zeros.
        block = model.layers[1]
        with model.trace(PROMPT):
            block.self_attn.attention_head_outputs[:] = 0
            attention = block.self_attn.attention_output
        assert same(attention, bias_of(block.self_attn.o_proj).expand_as(attention))
        with model.trace(PROMPT):
            block.mlp.mlp_neurons[:] = 0
            assert same(block.mlp.mlp_output, bias_of(block.mlp.down_proj).expand(1, len(PROMPT), -1))
        with model.trace(PROMPT):
            before = block.layer_input
            block.self_attn.attention_output[:] = 0
            assert same(block.layer_mid, before)

    def test_zeroing_a_head_moves_the_logits_by_whichever_of_its_values(self, model: starscope.Model) -> None:
        plain, results = logits_of(model, PROMPT), {}
        for name in ("queries", "scores", "probabilities", "head_outputs"):
            with model.trace(PROMPT) as t:
                value = read(model, f"layers.0.self_attn.attention_{name}")
                if name == "head_outputs":
                    value[:, :, 0] = 0
                else:
                    value[:, 0] = 0
            assert not same(t.result.logits, plain), name
            results[name] = t.result.logits
        limit = HALF * 2**23 if model.weights.half_cache else TOLERANCE
        assert value_ulps(results["probabilities"], results["head_outputs"]) <= limit  # no weight is no output

    def test_what_is_written_to_the_logits_is_what_comes_out(self, model: starscope.Model) -> None:
        with model.trace(PROMPT) as t:
            model.logits = model.logits * 0
            assert not model.logits.any()
        assert not t.result.logits.any()
        with model.trace(PROMPT) as t:
            model.logits[:, -1, 5] = 1e4
            assert float(model.next_token_probs[0, 5]) == 1
        assert int(t.result.logits[0, -1].argmax()) == 5

    # Refusals.

    def test_every_refusal_leaves_the_model_and_the_trace_unharmed(self, model: starscope.Model) -> None:
        plain = logits_of(model, PROMPT)
        for name in value_names(model):
            with model.trace(PROMPT) as t:
                shape = shape_of(model, name)
                for wrong in ([*shape[:-1], shape[-1] + 1], shape[1:], [2, *shape[1:]]):
                    with pytest.raises(ValueShapeError, match=f"{len(wrong)}|expected") as error:
                        write(model, name, torch.zeros(wrong))
                    assert str(shape) in str(error.value)
                    assert str(wrong) in str(error.value)
                with pytest.raises(ValueShapeError, match="integers"):
                    write(model, name, torch.zeros(shape, dtype=torch.int64))
            assert same(t.result.logits, plain), name

    def test_a_value_is_out_of_order_once_all_that_use_it_have_run(self, model: starscope.Model) -> None:
        plain = logits_of(model, PROMPT)
        for name in value_names(model)[:-2]:
            with model.trace(PROMPT) as t:
                _ = model.logits
                with pytest.raises(OutOfOrder, match="keep"):
                    read(model, name)
                with pytest.raises(OutOfOrder, match=r"assign|asked"):
                    write(model, name, torch.zeros(shape_of(model, name)))
            assert same(t.result.logits, plain), name

    def test_a_value_used_may_be_read_again_and_a_change_of_it_is_refused(self, model: starscope.Model) -> None:
        plain = logits_of(model, PROMPT)
        for name in value_names(model)[:-2]:
            with pytest.raises(OutOfOrder, match="did nothing"), model.trace(PROMPT):  # noqa: PT012
                value = read(model, name)
                _ = model.logits
                assert read(model, name) is value
                value += 1
            with model.trace(PROMPT) as t:
                value = read(model, name)
                _ = model.logits
                with pytest.raises(OutOfOrder, match="assigned after"):
                    write(model, name, value.clone())
            assert same(t.result.logits, plain)

    def test_what_is_kept_can_be_read_in_any_order(self, model: starscope.Model) -> None:
        names = value_names(model)
        with model.trace(PROMPT):
            expected = all_values(model)
        with model.trace(PROMPT) as t:
            t.keep(names)
            _ = model.logits
            for name in reversed(names):
                assert same(read(model, name), expected[name]), name

    def test_outside_a_trace_every_value_says_where_it_can_be_read(self, model: starscope.Model) -> None:
        for name in [*value_names(model), "input_ids", "attention_mask", "next_token_probs", "input_size"]:
            with pytest.raises(OutsideTrace, match=r"model\.trace"):
                read(model, name)
            if name not in ("next_token_probs", "input_size"):
                with pytest.raises(OutsideTrace):
                    write(model, name, torch.zeros(1))

    def test_names_that_are_none_are_attribute_errors(self, model: starscope.Model) -> None:
        for part in (model, model.layers[0], model.layers[0].self_attn, model.layers[0].mlp, model.norm):
            with pytest.raises(AttributeError):
                part.attention_everything  # noqa: B018
            with pytest.raises(AttributeError):
                part.attention_everything = torch.zeros(1)
        with pytest.raises(AttributeError, match="Did you mean 'layer_output'"):
            model.layers[0].layer_outptu = torch.zeros(1)
        with pytest.raises(IndexError, match=f"layer {model.num_layers} is out of range.*0 to {model.num_layers - 1}"):
            model.layers[model.num_layers]
        with pytest.raises(IndexError):
            model.layers[-model.num_layers - 1]
        assert model.layers[-1] is model.layers[model.num_layers - 1]

    def test_derived_values_are_read_only_and_say_what_to_assign(self, model: starscope.Model) -> None:
        for inside in (False, True):
            with model.trace(PROMPT) if inside else pytest.MonkeyPatch.context():
                with pytest.raises(AttributeError, match=r"assign model\.logits"):
                    model.next_token_probs = torch.zeros(1, model.vocab_size)
                with pytest.raises(AttributeError, match="assign input_ids"):
                    model.input_size = (1, 2)
                with pytest.raises(AttributeError, match="read-only"):
                    model.lm_head.weight = torch.zeros(1)
                with pytest.raises(AttributeError, match="attention_output"):
                    model.layers[0].self_attn.output = torch.zeros(1)
                with pytest.raises(AttributeError):
                    model.hidden_size = 3


def bias_of(layer: Any) -> torch.Tensor:
    """A linear layer's bias, zeros where it has none."""
    return torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
