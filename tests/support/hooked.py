"""What plain hooks on transformers' GPT-BigCode see, under the standard names: written down apart from the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from transformers.cache_utils import DynamicCache
from transformers.models.gpt_bigcode import modeling_gpt_bigcode as modeling


def hooked_values(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
    """Run steps of one prompt with a cache; the values of each by full name, `[1 seq ...]` as the layouts say."""
    oracle.set_attn_implementation("eager")
    cache = DynamicCache(config=oracle.config)
    return [_step(oracle, cache, ids) for ids in steps]


def _step(oracle: Any, cache: DynamicCache, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    handles = []

    def note(name: str, value: Any) -> None:
        seen[name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    def on_output(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, out: note(name, out)))

    def on_input(module: torch.nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _m, args: note(name, args)))

    body = oracle.transformer
    on_output(body.wte, "token_embeddings")
    on_output(body.wpe, "position_embeddings")
    on_output(body.ln_f, "final_norm_output")
    on_output(oracle.lm_head, "lm_head_output")
    heads, dim = oracle.config.n_head, oracle.config.n_embd // oracle.config.n_head
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
        seen[name] = seen[name].unflatten(-1, (heads, dim))
    return seen
