"""Random adapters: as PEFT folders that the peft library writes, or put together by hand.

model = make_adapter(checkpoint, tmp_path / "adapter", targets=["c_attn"], r=4)      # a peft model, in eval mode
write_folder(tmp_path / "by-hand", {"r": 2, "lora_alpha": 4}, {"transformer.h.0.attn.c_attn": (a, b)})
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
SPREAD = 0.05  # of the halves' values: the logits differ clearly from the base's


def make_adapter(
    checkpoint: Path, folder: Path, *, targets: Sequence[str] | str, seed: int = 0, **options: Any
) -> torch.nn.Module:
    """An adapter with random halves on a checkpoint, saved into `folder`; returns what peft computes with it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, **options})
    with warnings.catch_warnings():  # of the two libraries about one another
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * SPREAD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model.eval()


def load_adapter(checkpoint: Path, folder: Path, **options: Any) -> torch.nn.Module:
    """What peft makes of a folder, in eval mode."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), folder, **options).eval()


def logits_of(model: torch.nn.Module, ids: Sequence[int]) -> np.ndarray:
    """A transformers or peft model's logits, `[len(ids) vocab_size]`."""
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([list(ids)])).logits[0].float().numpy()
    return found


def halves(shape: Sequence[int], rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A `[rank in]` and B `[out rank]` of a matrix `[out in]`."""
    rng = np.random.default_rng(seed)
    return tuple(  # type: ignore[return-value]
        (rng.standard_normal(size) * SPREAD).astype(np.float32) for size in ((rank, shape[1]), (shape[0], rank))
    )


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A PEFT folder by hand: halves by Hugging Face's names of modules, and other tensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(extra or {})
    for module, (a, b) in pairs.items():
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}), encoding="utf-8")
    return folder
