"""The checks of a model's parts, of its inputs and of what its methods do to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import starscope
from families.traced_support import OTHER, PROMPT
from starscope.microscope.hosts import Part
from starscope.values import MODEL, VALUES
from support.traces import logits_of, part_of, same, value_names


class PartsSuite:
    def test_parts_are_the_same_objects_under_all_their_names(self, model: starscope.Model) -> None:
        for names in (model.scope.names.native, model.scope.names.gguf):
            for alias, path in names.items():
                if path and alias != "output":  # GGUF's head: model.output is what the model gives
                    assert part_of(model, f"{alias}.x")[0] is part_of(model, f"{path}.x")[0], alias
        with pytest.raises(AttributeError):
            model.no_such_part  # noqa: B018

    def test_every_block_has_the_same_values_each_a_descriptor_of_its_class(self, model: starscope.Model) -> None:
        assert model.num_layers > 1
        for name in value_names(model):
            part, last = part_of(model, name)
            assert last in dir(part)
            descriptor = getattr(type(part), last)
            assert descriptor.__doc__
            if VALUES[last].host != MODEL:
                assert isinstance(part, Part)
                assert descriptor.__doc__ == VALUES[last].meaning
        for of in (lambda b: b, lambda b: b.self_attn, lambda b: b.mlp):
            kinds: set[type] = {type(of(block)) for block in model.layers}
            assert len(kinds) == 1

    def test_sizes_agree_with_the_weights(self, model: starscope.Model) -> None:
        assert len(model.layers) == model.num_layers
        assert 1 <= model.num_kv_heads <= model.num_heads
        assert model.num_heads % model.num_kv_heads == 0
        for block in model.layers:
            attention = block.self_attn
            sizes = ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim")
            assert all(getattr(attention, size) == getattr(model, size) > 0 for size in sizes)
            assert attention.o_proj.weight.shape == (model.hidden_size, model.num_heads * model.head_dim)
            assert block.mlp.intermediate_size == model.intermediate_size == block.mlp.down_proj.weight.shape[1]
        assert model.embed_tokens.weight.shape == (model.vocab_size, model.hidden_size)

    # Input.

    def test_inputs_are_those_of_the_prompt(self, model: starscope.Model) -> None:
        text = "def add(a, b):\n    return a"
        ids = model.tokenizer.encode(text)
        with model.trace(text):
            assert model.input_ids.tolist() == [ids]
            assert model.attention_mask.tolist() == [[1] * len(ids)]
            assert model.input_size == torch.Size([1, len(ids)])
            assert model.token_embeddings.shape[1] == len(ids)

    def test_the_ids_of_another_prompt_give_its_logits(self, model: starscope.Model) -> None:
        for other in (OTHER, OTHER[:4], [*OTHER, *OTHER]):
            with model.trace(PROMPT) as t:
                model.input_ids = torch.tensor([other])
                assert tuple(model.input_size) == (1, len(other))
                assert model.attention_mask.tolist() == [[1] * len(other)]
            assert same(t.result.logits, logits_of(model, other))
        with model.trace(PROMPT) as t:
            model.input_ids[0] = torch.tensor(OTHER)
        assert same(t.result.logits, logits_of(model, OTHER))

    def test_embeddings_stand_for_the_token_embeddings(self, model: starscope.Model) -> None:
        with model.trace(PROMPT) as t:
            embeddings = model.token_embeddings
        with model.trace(embeddings[0]) as embedded:
            assert same(model.token_embeddings, embeddings)
            assert tuple(model.input_size) == (1, len(PROMPT))
        assert same(embedded.result.logits, t.result.logits)

    # Methods.

    def test_layers_that_are_skipped_pass_on_what_enters_the_first(self, model: starscope.Model) -> None:
        plain, last = logits_of(model, PROMPT), model.num_layers - 1
        with model.trace(PROMPT) as t:
            first = model.layers[0].layer_output
            model.skip_layers(1, last)
            assert same(model.layers[last].layer_output, first)
            logits = model.logits
        assert same(logits, model.project_on_vocab(first))
        assert same(t.result.logits, logits)
        assert not same(logits, plain)
        with model.trace(PROMPT) as t:
            model.skip_layer(-model.num_layers, skip_with=torch.zeros(1, len(PROMPT), model.hidden_size))
            assert not model.layers[0].layer_output.any()
            assert not model.layers[1].layer_input.any()
        assert torch.isfinite(t.result.logits).all()
        assert same(logits_of(model, PROMPT), plain)

    def test_steering_adds_a_vector_where_it_is_told(self, model: starscope.Model) -> None:
        vector = torch.from_numpy(np.random.default_rng(1).normal(size=model.hidden_size).astype(np.float32))
        with model.trace(PROMPT) as t:
            plain = model.layers[0].layer_output
        with model.trace(PROMPT) as steered:
            model.steer(0, vector, factor=2, token_positions=-1)
            out = model.layers[0].layer_output
        assert same(out[:, -1], plain[:, -1] + 2 * vector)
        assert same(out[:, :-1], plain[:, :-1])
        assert not same(steered.result.logits[:, -1], t.result.logits[:, -1])
        with model.trace(PROMPT) as by_hand:
            model.layers[0].layer_output[:, -1] += 2 * vector
        assert same(by_hand.result.logits, steered.result.logits)

    def test_projecting_the_last_stream_is_the_logits(self, model: starscope.Model) -> None:
        with model.trace(PROMPT):
            stream, logits, probs = model.layers[-1].layer_output, model.logits, model.next_token_probs
        assert same(model.project_on_vocab(stream), logits)
        assert same(probs, logits[:, -1].softmax(-1))
        with model.trace(PROMPT):  # within a trace too, on the way
            assert same(model.project_on_vocab(model.layers[-1].layer_output), logits)
            assert same(model.logits, logits)
        [top] = model.get_topk_closest_tokens(stream[0, -1], k=3)
        assert len(top) == 3
        assert all(isinstance(name, str) and 0 < p <= 1 for name, p in top.items())
        assert sum(top.values()) <= 1 + 1e-4
        assert list(top.values()) == sorted(top.values(), reverse=True)
        np.testing.assert_allclose(max(top.values()), float(probs.max()), rtol=1e-5)
        assert len(model.get_topk_closest_tokens(stream, k=1)) == len(PROMPT)
