"""What plain hooks on transformers' models see, under the standard names: written down apart from the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from transformers.cache_utils import DynamicCache

Hook = Callable[[torch.nn.Module, str], None]


def hooked_values(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
    """Run steps of one prompt with a cache; the values of each by full name, `[1 seq ...]` as the layouts say."""
    oracle.set_attn_implementation("eager")
    cache = DynamicCache(config=oracle.config)
    return [_step(oracle, cache, ids) for ids in steps]


def _hook_gpt_bigcode(oracle: Any, on_input: Hook, on_output: Hook) -> None:
    body = oracle.transformer
    on_output(body.wte, "token_embeddings")
    on_output(body.wpe, "position_embeddings")
    on_output(body.ln_f, "final_norm_output")
    for i, block in enumerate(body.h):
        host = f"layers.{i}"
        on_input(block, f"{host}.layer_input")
        on_output(block.ln_1, f"{host}.attention_norm_output")
        on_input(block.attn.c_proj, f"{host}.self_attn.attention_premix")
        on_output(block.attn, f"{host}.self_attn.attention_output")
        on_input(block.ln_2, f"{host}.layer_mid")
        on_output(block.ln_2, f"{host}.mlp_norm_output")
        on_input(block.mlp, f"{host}.mlp_input")
        on_output(block.mlp.act, f"{host}.mlp.mlp_activation")
        on_input(block.mlp.c_proj, f"{host}.mlp.mlp_neurons")
        on_output(block.mlp, f"{host}.mlp.mlp_output")
        on_output(block, f"{host}.layer_output")


def _hook_llama(oracle: Any, on_input: Hook, on_output: Hook) -> None:
    body = oracle.model
    on_output(body.embed_tokens, "token_embeddings")
    on_output(body.norm, "final_norm_output")
    for i, block in enumerate(body.layers):
        host = f"layers.{i}"
        on_input(block, f"{host}.layer_input")
        on_output(block.input_layernorm, f"{host}.attention_norm_output")
        on_input(block.self_attn.o_proj, f"{host}.self_attn.attention_premix")
        on_output(block.self_attn, f"{host}.self_attn.attention_output")
        on_input(block.post_attention_layernorm, f"{host}.layer_mid")
        on_output(block.post_attention_layernorm, f"{host}.mlp_norm_output")
        on_input(block.mlp, f"{host}.mlp_input")
        on_output(block.mlp.act_fn, f"{host}.mlp.mlp_activation")
        on_input(block.mlp.down_proj, f"{host}.mlp.mlp_neurons")
        on_output(block.mlp, f"{host}.mlp.mlp_output")
        on_output(block, f"{host}.layer_output")


HOOKS = {"gpt_bigcode": _hook_gpt_bigcode, "llama": _hook_llama}


def _step(oracle: Any, cache: DynamicCache, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    handles = []

    def note(name: str, value: Any) -> None:
        seen[name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    def on_output(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, out: note(name, out)))

    def on_input(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _m, args: note(name, args)))

    HOOKS[oracle.config.model_type](oracle, on_input, on_output)
    on_output(oracle.lm_head, "lm_head_output")
    modeling = sys.modules[type(oracle).__module__]
    eager, softmax = modeling.eager_attention_forward, torch.nn.functional.softmax

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        host = f"layers.{module.layer_idx}.self_attn"
        for name, one in (("queries", query), ("keys", key), ("values", value)):
            note(f"{host}.attention_{name}", one)

        def watched(x: Any, *args: Any, **options: Any) -> Any:
            note(f"{host}.attention_scores", x)
            return softmax(x, *args, **options)

        with mock.patch.object(torch.nn.functional, "softmax", watched):
            out, weights = eager(module, query, key, value, *args, **options)
        note(f"{host}.attention_probabilities", weights)
        note(f"{host}.attention_head_outputs", out)
        return out, weights

    with mock.patch.object(modeling, "eager_attention_forward", attend), torch.no_grad():
        result = oracle(torch.tensor([list(ids)]), cache=cache, use_cache=True)
    for handle in handles:
        handle.remove()
    seen["logits"] = result.logits.detach()
    for name in [name for name in seen if name.endswith("attention_premix")]:
        seen[name] = seen[name].unflatten(-1, (oracle.config.num_attention_heads, -1))
    return seen
