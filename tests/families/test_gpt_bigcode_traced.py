"""GPT-BigCode under the microscope: every check of the suite, and what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from families.traced import TracedSuite
from support.checkpoints import PAIRWISE, make_checkpoint
from support.hooked import hooked_values


class TestGPTBigCodeTraced(TracedSuite):
    traced_settings = PAIRWISE[:2]

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        return make_checkpoint(folder, **setting.options())

    @staticmethod
    def hooked(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        return hooked_values(oracle, steps)
