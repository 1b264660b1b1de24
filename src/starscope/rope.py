"""Rotary position embedding: the frequencies, and the angles of positions.

Dimensions i and i + dim/2 of a head are a pair, turned by position · frequency[i]; frequency[i] = base^(-2i/dim),
divided by what extends the context. All is float32, rounded where transformers rounds, so that far positions agree:

    frequencies = inverse_frequencies(dim=128, base=500_000.0, scale=1.0, factors=None)       # float32 [dim/2]
    cos, sin = rotation(positions, frequencies)                                                # float32 [rows dim/2]

The frequencies are those of RoFormer (arXiv:2104.09864); `llama3_factors` is the scaling of LLaMA 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def inverse_frequencies(dim: int, base: float, scale: float = 1.0, factors: Array | None = None) -> Array:
    """Radians a position, float32 `[dim/2]`. Divided by `scale` (linear scaling) and each by its own of `factors`."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    frequencies: Array = np.float32(1) / powers
    if scale != 1:
        frequencies = frequencies / np.float32(scale)
    return frequencies if factors is None else frequencies / np.asarray(factors, np.float32)


def rotation(positions: Array, frequencies: Array) -> tuple[Array, Array]:
    """Cosines and sines of positions `[rows]`, float32 `[rows dim/2]`: of angles rounded to float32."""
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def dynamic_base(base: float, dim: int, factor: float, trained: int, length: int) -> float:
    """The base that NTK-aware scaling takes for texts of `length` tokens, `trained` of which a model was trained on."""
    if length <= trained:
        return base
    grown: float = base * ((factor * length / trained) - (factor - 1)) ** (dim / (dim - 2))
    return grown


def llama3_factors(dim: int, base: float, factor: float, low: float, high: float, trained: int) -> Array:
    """What LLaMA 3.1 divides each frequency by, float32 `[dim/2]`.

    1 for wavelengths (tokens a turn) below trained/high, `factor` above trained/low, and smoothly between.
    """
    wavelengths = 2 * math.pi / inverse_frequencies(dim, base).astype(np.float64)
    smooth = (trained / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelengths < trained / high, 1.0, np.where(wavelengths > trained / low, factor, between))
    return factors.astype(np.float32)
