"""Small random LLaMA and Mistral folders, written by transformers itself, and what plain hooks on them see.

    model = make_llama(tmp_path / "model", kv_heads=2, scaling="llama3", tied=True)

`LLAMAS` has every value of the options that change a folder's form; a window makes it a Mistral.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from support.checkpoints import make_tokenizer

if TYPE_CHECKING:
    import torch

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Llama:
    """One combination of options; `options` gives those of `make_llama`."""

    kv_heads: int
    scaling: str = "none"
    tied: bool = False
    dtype: str = "float32"
    bias: bool = False
    head_dim: int | None = None
    window: int | None = None
    theta: float = 10000.0

    def __str__(self) -> str:
        parts = [f"kv{self.kv_heads}", self.scaling, "tied" if self.tied else "untied", self.dtype]
        parts += ["bias"] * self.bias + [f"dim{self.head_dim}"] * bool(self.head_dim)
        return "-".join(parts + [f"window{self.window}"] * bool(self.window))

    def options(self) -> dict[str, Any]:
        return asdict(self)


LLAMAS = (
    Llama(4),
    Llama(2, "linear", tied=True, dtype="float16", bias=True),
    Llama(1, "dynamic", dtype="bfloat16", theta=5e5),
    Llama(2, "llama3", tied=True, head_dim=24),
    Llama(4, "llama3", dtype="float16", bias=True, theta=5e5),
    Llama(1, "linear", head_dim=32),
    Llama(2, "none", dtype="bfloat16", window=9),
    Llama(4, "dynamic", tied=True, window=200),
)


def make_llama(
    folder: Path | str,
    *,
    kv_heads: int = 2,
    scaling: str = "none",
    tied: bool = False,
    dtype: str = "float32",
    bias: bool = False,
    head_dim: int | None = None,
    window: int | None = None,
    theta: float = 10000.0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    inner: int = 96,
    positions: int = 128,
    vocab_size: int = 320,
    seed: int = 0,
) -> torch.nn.Module:
    """Write a random checkpoint and its tokenizer into `folder`; return the model as saved (in `dtype`, eval mode)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rope_scaling": SCALINGS[scaling],
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    model: Any
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=bias, mlp_bias=bias))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.1 if weight.dim() == 1 else 1.5 / weight.shape[1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            if "norm" in name:
                weight.add_(1.0)
    model = model.to(getattr(torch, dtype)).eval()
    rotary = model.model.rotary_emb  # its frequencies were rounded too, which no loaded checkpoint's are
    model.model.rotary_emb = type(rotary)(model.config)
    model.save_pretrained(folder)
    make_tokenizer(Path(folder), vocab_size)
    made: torch.nn.Module = model
    return made


def hooked_llama_values(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Run steps of one prompt with a cache; the values of each by full name, `[1 seq ...]` as the layouts say."""
    from transformers.cache_utils import DynamicCache

    oracle.set_attn_implementation("eager")
    cache = DynamicCache(config=oracle.config)
    return [_step(oracle, cache, ids) for ids in steps]


def _step(oracle: Any, cache: Any, ids: Sequence[int]) -> dict[str, Any]:
    import torch

    seen: dict[str, torch.Tensor] = {}
    handles = []

    def note(name: str, value: Any) -> None:
        seen[name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    def on_output(module: Any, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, out: note(name, out)))

    def on_input(module: Any, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _m, args: note(name, args)))

    body = oracle.model
    on_output(body.embed_tokens, "token_embeddings")
    on_output(body.norm, "final_norm_output")
    on_output(oracle.lm_head, "lm_head_output")
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
