"""Random models for `gpu.py`: folders that transformers reads too, and GGUF files of them in several formats.

Three shapes: StarCoder's tiny and 1B ones, and a small LLaMA with grouped queries. Norms are near 1 and a product keeps
the size of what goes in, so that every block moves the logits and a wrong one shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from starscope.convert import convert
from starscope.family import find_family_for_config, read_config
from starscope.quantize import quantize
from starscope.tokenizer.bytelevel import ALPHABET

BLOCK = 1 << 22  # values drawn once and used over and over
FORMATS = {"tiny": ("q4_0", "q8_0", "q4_k", "q6_k", "f16"), "llama": ("q4_k", "q8_0"), "1b": ("q4_0", "q4_k", "q8_0")}


def _starcoder(layers: int, hidden: int, heads: int, positions: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
        "activation_function": "gelu_pytorch_tanh",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _llama(layers: int, hidden: int, heads: int, inner: int, positions: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


CONFIGS = {
    "tiny": _starcoder(20, 768, 12, 8192, 49152),
    "llama": _llama(12, 1024, 16, 2816, 4096, 32000),
    "1b": _starcoder(24, 2048, 16, 8192, 49152),
}
SMOKE = {
    "tiny": _starcoder(2, 256, 4, 256, 300),
    "llama": _llama(2, 256, 4, 512, 256, 300),
    "1b": _starcoder(3, 256, 4, 256, 300),
}


def make_models(work: Path, shape: str, *, smoke: bool) -> tuple[Path, dict[str, Path]]:
    """The folder of a shape, and its files by name; whatever is in `work` already stays as it is."""
    folder, files = work / shape, {}
    if not (folder / "config.json").is_file():
        _make_folder(folder, (SMOKE if smoke else CONFIGS)[shape])
    whole = work / f"{shape}-f16.gguf"
    if not whole.is_file():
        convert(folder, whole, to="f16")
    for to in FORMATS[shape]:
        path = work / f"{shape}-{to}.gguf"
        if not path.is_file():
            quantize(whole, path, to=to)
        files[path.stem] = path
    return folder, files


def _make_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint in float16 with a byte-level vocabulary, which the conversion pads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ["<|endoftext|>", *ALPHABET]
    tokenizer = {
        "added_tokens": [{"id": 0, "content": tokens[0], "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    family = find_family_for_config(config)
    tied = config.get("tie_word_embeddings", True)
    slots = [one for one in family.slots(read_config(family, config)) if not (one.made or (tied and one.tied_to))]
    entries: dict[str, Any] = {}
    at = 0
    for slot in slots:
        end = at + slot.parameters * 2
        entries[slot.hf] = {"dtype": "F16", "shape": list(slot.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = 0
        for slot in slots:
            is_norm = "norm" in slot.name and slot.name.endswith("weight")
            spread = 0.1 if len(slot.shape) == 1 else slot.shape[1] ** -0.5
            part = (values * np.float32(spread) + np.float32(is_norm)).astype(np.float16)
            left = slot.parameters
            while left:
                some = part[start : start + left]
                file.write(some.tobytes())
                left, start = left - len(some), (start + len(some)) % BLOCK
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")  # last: what is there is whole
