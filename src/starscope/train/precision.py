"""float32 or bfloat16 for the products of a training run: by what the processor has, and a short probe."""

from __future__ import annotations

import math
import time

import torch

PROBE_SECONDS = 0.2
WORTHWHILE = 1.2  # bfloat16 is used when it is at least this many times faster


def choose_precision() -> tuple[torch.dtype, str]:
    """bfloat16 where the processor has instructions for it and a short probe shows that it pays; and why."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32, "float32: this processor has no bfloat16 arithmetic"
    seconds = {dtype: _probe(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen, name = (torch.bfloat16, "bfloat16") if ratio >= WORTHWHILE else (torch.float32, "float32")
    return chosen, f"{name}: a product in bfloat16 is {ratio:.1f} times as fast as in float32"


def _probe(dtype: torch.dtype) -> float:
    """Seconds for one matrix product, the least of as many as half the probe's time allows."""
    a, b = torch.randn(1024, 512).to(dtype), torch.randn(512, 512).to(dtype)
    a @ b
    least, end = math.inf, time.perf_counter() + PROBE_SECONDS / 2
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        least = min(least, time.perf_counter() - start)
    return least
