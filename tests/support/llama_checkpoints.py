"""Small random LLaMA and Mistral folders, written by transformers itself.

    model = make_llama(tmp_path / "model", kv_heads=2, scaling="llama3", tied=True)

`LLAMAS` has every value of the options that change a folder's form; a window makes it a Mistral.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
