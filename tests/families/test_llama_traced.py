"""LLaMA under the microscope: every check of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from families.traced import TracedSuite
from support.hooked import hooked_values
from support.llama_checkpoints import Llama, make_llama


class TestLlamaTraced(TracedSuite):
    traced_settings = (Llama(2, "llama3", head_dim=24), Llama(4, "linear", tied=True, bias=True))

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        return make_llama(folder, **setting.options())

    @staticmethod
    def hooked(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        return hooked_values(oracle, steps)
