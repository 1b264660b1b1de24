"""float32 or bfloat16 for the products of a training run: by what the processor has, and a short probe."""

from __future__ import annotations

import math
import time

import torch

PROBE_SECONDS = 0.2  # for both together
WORTHWHILE = 1.2  # bfloat16 is used when it is at least this many times faster
PRODUCT = (256, 512, 512)  # short enough that some of many run undisturbed on a busy machine


def choose_precision() -> tuple[torch.dtype, str]:
    """bfloat16 where the processor has instructions for it and a short probe shows that it pays; and why."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32, "float32: this processor has no bfloat16 arithmetic"
    seconds = _probe()
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen, name = (torch.bfloat16, "bfloat16") if ratio >= WORTHWHILE else (torch.float32, "float32")
    return chosen, f"{name}: a product in bfloat16 is {ratio:.1f} times as fast as in float32"


def _probe() -> dict[torch.dtype, float]:
    """Seconds for one matrix product, the least of as many as the time allows: in turns, so that what else the machine
    does hits both alike.
    """
    end = time.perf_counter() + PROBE_SECONDS
    rows, inner, columns = PRODUCT
    dtypes = (torch.float32, torch.bfloat16)
    operands = {
        dtype: (torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)) for dtype in dtypes
    }
    for a, b in operands.values():
        a @ b  # the first one chooses its kernel
    least = dict.fromkeys(dtypes, math.inf)
    while True:
        for dtype, (a, b) in operands.items():
            start = time.perf_counter()
            a @ b
            least[dtype] = min(least[dtype], time.perf_counter() - start)
        if time.perf_counter() >= end:
            return least
