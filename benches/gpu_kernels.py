"""What single operations give on a GPU, against float64: products with stored matrices, attention. For `gpu.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from starscope.engine import Weights
from starscope.engine.gpu.products import linear
from starscope.engine.gpu.stored import LAYOUTS, read_stored
from starscope.engine.torch_kernels import Group, Step, fused_attention
from starscope.family import Slot
from starscope.formats import decode, encode, find_format

BLOCK = 1024  # threads of a block, at the most: of torch's softmax too
ULP = 2.0**-23


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in parts of the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


class OneMatrix:
    """A matrix in memory, as weights have it."""

    def __init__(self, format_name: str, raw: np.ndarray) -> None:
        self._format_name, self._raw = format_name, raw

    def has(self, slot: Slot) -> bool:
        return True

    def format_name(self, slot: Slot) -> str:
        return self._format_name

    def read_stored(self, slot: Slot, start: int, stop: int, into: Any) -> Any:
        return self._raw[start:stop]


def kernels(bench: Any) -> Iterator[dict[str, Any]]:
    """Errors of products, in ulp of float32 of the same product of magnitudes."""
    rows, cols = (67, 512) if bench.smoke else (1027, 2048)
    rng = np.random.default_rng(1)
    for name in LAYOUTS:
        fmt = find_format(name)
        raw = encode(fmt, rng.normal(0, 0.05, (rows, cols)).astype(np.float32))
        w = decode(fmt, raw).astype(np.float64)
        slots = [Slot("w", "w", "w", (rows, cols), always_f32=False)]
        weights = Weights(slots, OneMatrix(name, raw))  # type: ignore[arg-type]
        matrix = read_stored(weights, "w", bench.device, by_triton=bench.ways.triton)
        assert (matrix.decode().cpu().numpy() == w).all(), f"{name} does not decode to its bits"
        for n in (1, 2, 17, 64, 300):
            x = rng.normal(size=(n, cols)).astype(np.float32)
            given = bench.there(x)
            found = linear(given, matrix).cpu().numpy()
            error = np.abs(found - x.astype(np.float64) @ w.T) / (np.abs(x).astype(np.float64) @ np.abs(w).T)
            timed = statistics.median(bench.seconds(lambda m=matrix, t=given: linear(t, m)) for _ in range(5))  # type: ignore[misc]
            yield {"format": name, "rows": n, "ulp": round(float(error.max() / ULP), 2), "us": round(timed * 1e6)}


def attention(bench: Any) -> Iterator[dict[str, Any]]:
    """Rows of one query of every length, as decoding has them, and all of them in one call, as a prompt has them."""
    count, heads, dim = (64 if bench.smoke else 2 * BLOCK), 4, 64
    rng = np.random.default_rng(2)
    for kv_heads in (1, 2, heads):
        q = rng.normal(size=(count, heads, dim)).astype(np.float32)
        k, v = (rng.normal(size=(1, kv_heads, count, dim)).astype(np.float32) for _ in range(2))
        attrs = {"scale": dim**-0.5, "window": None}
        expected = expected_attention(q, k[0], v[0])
        tq, tk, tv = (bench.there(x) for x in (q, k, v))
        many = fused_attention(Step([Group(1, count, 0, None)], None), attrs, tq, [tk], [tv]).cpu().numpy()
        ones, recorded = [], []
        for i in range(count):
            one = Step([Group(1, 1, i, None)], None)
            ones.append(fused_attention(one, attrs, tq[i : i + 1], [tk[:, :, : i + 1]], [tv[:, :, : i + 1]]))
            place = Step([Group(1, 1, 0, None, torch.tensor([i], device=bench.device))], None)
            recorded.append(fused_attention(place, attrs, tq[i : i + 1], [tk], [tv]))
        ways = {
            "prompt": many,
            "decoding": torch.cat(ones).cpu().numpy(),
            "recorded": torch.cat(recorded).cpu().numpy(),
        }
        for way, found in ways.items():
            yield {"kv_heads": kv_heads, "way": way, "lengths": count, "ulp": round(distance(found, expected) / ULP, 1)}


def expected_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence in float64, [query heads dim]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // len(x), 0) for x in (k, v))
    made = np.empty(q.shape)
    for i in range(len(q)):
        s = np.einsum("hd,hkd->hk", q[i], k[:, : i + 1]) * q.shape[2] ** -0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        made[i] = np.einsum("hk,hkd->hd", p / p.sum(-1, keepdims=True), v[:, : i + 1])
    return made
