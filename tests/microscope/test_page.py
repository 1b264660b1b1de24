"""The snippets of the family's page, as they are there but for what is easier here.

Queries are changed in place; nothing depends on how the model was loaded; the attention's output is
`self_attn.output[0]`. On quantized files the native engine multiplies with activations rounded to int8: there
`h @ W` is exact for `round_activation(h)`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from support.checkpoints import make_checkpoint
from support.numbers import TOLERANCE
from support.rounding import LN_2, LOG2_E, to_bfloat16
from support.traces import all_values, logits_of, multiplied, same, value_ulps

PROMPT = "def add(a, b):\n    return a"


def is_rounded(model: starscope.Model) -> bool:
    return model.engine.name == "native" and model.weights.half_cache


def test_the_block_in_order(model: starscope.Model) -> None:
    for block in model.layers:
        with model.trace(PROMPT):
            x = block.input
            normed = block.input_layernorm.output
            attention = block.self_attn.output[0]
            h = block.layer_mid
            feed = block.mlp.output
            out = block.output
        assert isinstance(out, torch.Tensor)
        assert same(x + attention, h)
        assert same(h + feed, out)
        with model.trace(PROMPT):
            assert same(block.self_attn.input, normed)


def test_one_key_head_and_one_value_head_serve_every_query_head(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        q = model.layers[1].self_attn.attention_queries.save()  # num_heads heads
        k = model.layers[1].self_attn.attention_keys.save()  # one head
        scores = model.layers[1].self_attn.attention_scores.save()

    n = scores.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    again = q @ k.transpose(-1, -2) * model.head_dim**-0.5  # k broadcasts
    if is_rounded(model):  # attention in bfloat16
        scaled = to_bfloat16(q.numpy() * (np.float32(model.head_dim**-0.5) * LOG2_E))
        again = torch.from_numpy(scaled @ to_bfloat16(k.numpy()).swapaxes(-1, -2) * LN_2)
    assert value_ulps(again[..., causal], scores[..., causal]) <= TOLERANCE
    assert model.num_kv_heads == 1
    assert k.shape == (1, 1, n, model.head_dim)
    assert q.shape == (1, model.num_heads, n, model.head_dim)


def test_an_edit_of_the_one_key_head_reaches_the_scores_of_every_query_head(model: starscope.Model) -> None:
    attention = model.layers[1].self_attn
    with model.trace(PROMPT):
        before = attention.attention_scores
    with model.trace(PROMPT):
        attention.attention_keys[:, 0, 2] = 0
        after = attention.attention_scores
    for head in range(model.num_heads):
        assert not after[0, head, 2:, 2].any()
        assert before[0, head, 2:, 2].all()
        assert same(after[0, head, :, 3:], before[0, head, :, 3:])
    with model.trace(PROMPT):
        attention.attention_values[:, 0] = 0
        assert not attention.attention_head_outputs.any()


def test_queries_keys_and_values_are_cut_from_one_linear(model: starscope.Model) -> None:
    E, d = model.hidden_size, model.head_dim
    W_Q, W_K, W_V = model.layers[1].self_attn.c_attn.weight.split([E, d, d])
    b_Q, b_K, b_V = model.layers[1].self_attn.c_attn.bias.split([E, d, d])

    with model.trace(PROMPT):
        h = model.layers[1].self_attn.input.save()  # ln_1's output
        q = model.layers[1].self_attn.attention_queries.save()
        k = model.layers[1].self_attn.attention_keys.save()
        v = model.layers[1].self_attn.attention_values.save()

    h = multiplied(model, h, "layers.1.self_attn.qkv_proj.weight")
    q_again = (h @ W_Q.T + b_Q).unflatten(-1, (model.num_heads, d)).transpose(1, 2)
    assert value_ulps(q_again, q) <= TOLERANCE
    cached = 2.0**-10 * 2**23 if model.weights.half_cache else TOLERANCE  # rounded to float16
    assert value_ulps((h @ W_K.T + b_K)[:, None], k) <= cached
    assert value_ulps((h @ W_V.T + b_V)[:, None], v) <= cached


def test_queries_are_edited_by_assignment_or_in_place(model: starscope.Model) -> None:
    with model.trace(PROMPT) as t:
        q = model.layers[1].self_attn.attention_queries.clone()
        q[:, 0] = 0  # head 0's queries
        model.layers[1].self_attn.attention_queries = q
        pattern = model.layers[1].self_attn.attention_probabilities
    with model.trace(PROMPT) as in_place:
        model.layers[1].self_attn.attention_queries[:, 0] = 0
    assert same(in_place.result.logits, t.result.logits)
    assert not same(t.result.logits, logits_of(model, PROMPT))
    n = pattern.shape[-1]
    even = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    assert (pattern[0, 0] - even).abs().max() <= 2.0**-20  # no queries: every key alike


def test_positions_are_added_after_embed_tokens(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        tokens = model.token_embeddings.save()
        positions = model.transformer.wpe.output.save()
        x0 = model.layers[0].input.save()

    assert torch.equal(tokens + positions, x0)
    assert same(positions[0], model.transformer.wpe.weight[: positions.shape[1]])
    with model.trace(PROMPT):
        model.token_embeddings[:] = 0
        assert same(model.layers[0].input, positions)
    ids = model.tokenizer.encode(PROMPT)
    assert model.tokenizer.decode(ids) == PROMPT  # no BOS before it


def test_the_readout_is_the_head_with_nothing_after_it(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        last = model.layers[-1].layer_output
        normed = model.final_norm_output
        head = model.lm_head.output
        logits = model.logits
    assert same(head, logits)
    assert float((model.project_on_vocab(last) - logits).abs().max()) == 0.0
    assert model.lm_head.bias is None
    assert model.lm_head.weight is model.embed_tokens.weight
    again = multiplied(model, normed, "embed_tokens.weight") @ model.lm_head.weight.T
    assert value_ulps(again, logits) <= TOLERANCE
    with model.trace(PROMPT):
        model.layers[-1].layer_output[:] = 0  # a norm of zeros is its bias
        assert same(model.final_norm_output[0, 0], model.norm.bias)
        constant = model.logits
    bias = multiplied(model, model.norm.bias[None], "embed_tokens.weight") @ model.lm_head.weight.T
    assert value_ulps(constant[0], bias.expand_as(constant[0])) <= TOLERANCE
    assert float(bias.std()) > 0


@pytest.mark.parametrize("engine", ["native", "numpy", "torch"])
def test_without_multi_query_transformers_lays_the_projection_out_by_heads_and_here_it_is_sorted(
    tmp_path: Path, engine: str
) -> None:
    oracle = make_checkpoint(tmp_path, multi_query=False)
    model = starscope.load(convert(tmp_path, to="f32").out, engine=engine)
    E, d = model.hidden_size, model.head_dim
    assert model.num_kv_heads == model.num_heads
    theirs = oracle.transformer.h[1].attn.c_attn.weight.detach().view(model.num_heads, 3, d, E)
    ours = model.layers[1].self_attn.c_attn.weight.view(3, model.num_heads, d, E)
    assert torch.equal(theirs.transpose(0, 1), ours)
    with model.trace(PROMPT):
        h = model.layers[1].self_attn.input
        q, k = model.layers[1].self_attn.attention_queries, model.layers[1].self_attn.attention_keys
    projected = h @ model.layers[1].self_attn.c_attn.weight.T + model.layers[1].self_attn.c_attn.bias
    parts = projected.unflatten(-1, (3, model.num_heads, d)).permute(2, 0, 3, 1, 4)
    assert value_ulps(parts[0], q) <= TOLERANCE
    assert value_ulps(parts[1], k) <= TOLERANCE


def test_the_six_values_of_the_eager_forward_are_there_however_the_model_was_loaded(model: starscope.Model) -> None:
    inner = ("queries", "keys", "values", "scores", "probabilities", "head_outputs")
    reasons = model.support()
    assert all(reasons[f"self_attn.attention_{name}"] is None for name in inner)
    with model.trace(PROMPT):
        values = all_values(model, [f"layers.0.self_attn.attention_{name}" for name in inner])
    assert all(torch.isfinite(value).all() for value in values.values())


def released(name: str) -> starscope.Model:
    """A checkpoint of the hub's cache; the test is skipped where it is not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        pytest.skip(f"{name} is not in the hub's cache")
    return starscope.load(Path(found).parent)


FUNCTION = '''def fibonacci(n):
    """Return the n-th number."""
    if n < 2:
        return n
    a, b = 0, 1
    for _ in range(n - 1):
        a, b = b, a + b
    return b
'''


def test_the_released_tiny_model_looks_at_its_first_token_from_block_12_on() -> None:
    model = released("bigcode/tiny_starcoder_py")
    assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == (20, 768, 12, 64)
    assert (model.context_length, model.num_kv_heads, model.intermediate_size) == (8192, 1, 3072)
    ids = model.tokenizer.encode(FUNCTION)[:58]
    with model.trace(ids):
        shares = [
            float(block.self_attn.attention_probabilities[0, :, len(ids) // 2 :, 0].mean()) for block in model.layers
        ]
    assert all(0.4 <= share <= 0.9 for share in shares[12:])
    assert np.mean(shares[12:]) > np.mean(shares[:12])
    bias = model.norm.bias @ model.lm_head.weight.T
    assert float(bias.std()) == pytest.approx(0.12, abs=0.01)


def test_the_released_santacoder_has_the_sizes_of_the_page() -> None:
    model = released("bigcode/gpt_bigcode-santacoder")
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim)
    assert sizes == (24, 2048, 16, 1, 128)
    assert (model.vocab_size, model.intermediate_size, model.context_length) == (49280, 8192, 2048)
