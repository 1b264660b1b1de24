"""What the native engine rounds, spelled out in NumPy: the definition that it is tested against.

Two things are rounded besides the float32 results of each op, so that an error of indexing cannot hide behind them:

- rows of activations, to int8 in blocks of 32, where they meet weights that are multiplied as integers;
- in files that are not float32 throughout, the operands of attention to bfloat16: queries times scale and log2(e), keys
  and values as cached, and the weights 2^(score - largest), where `largest` is that of a tile of 128 keys.

Named values are those of the NumPy engine up to these roundings. Scores are multiplied by ln(2) for whoever looks at
them, and by log2(e) on their way into the softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from starscope.engine import numpy_engine
from starscope.engine.base import MASKED, Array, Batch
from starscope.engine.numpy_engine import KERNELS, Kernel, NumpyEngine
from starscope.formats import INTEGER_FORMATS, decode, encode, find_format, round_activation
from starscope.graph import Op

TILE_KEYS = 128
LOG2_E, LN_2 = np.float32(1.44269504), np.float32(0.693147181)


def to_bfloat16(x: Array) -> Array:
    """Float32 -> the nearest float32 values that bfloat16 can hold."""
    bfloat16 = find_format("BF16")
    return decode(bfloat16, encode(bfloat16, x))


def linear(engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> Array:
    """The layer's input rounded to int8 where its weight is multiplied as integers."""
    if engine.weights.format_name(op.weights[0]) in INTEGER_FORMATS:
        inputs = [round_activation(inputs[0])]
    return numpy_engine.linear(engine, batch, op, inputs)


def scores(engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> list[Array]:
    """The scale is in the queries before they are rounded, and with it the change to powers of two and back."""
    if not engine.weights.half_cache:
        return numpy_engine.scores(engine, batch, op, inputs)
    queries = to_bfloat16(inputs[0] * (np.float32(op.attrs["scale"]) * LOG2_E))
    keys = [to_bfloat16(k) for k in inputs[1]]
    return numpy_engine.scores(engine, batch, replace(op, attrs={**op.attrs, "scale": LN_2}), [queries, keys])


def softmax(engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> list[Array]:
    """Probabilities as the rounded weights of tiles make them: a tile's weights, brought to a common largest score."""
    if not engine.weights.half_cache:
        return numpy_engine.softmax(engine, batch, op, inputs)
    made = []
    for x, past in zip(inputs[0], batch.pasts, strict=False):  # [num_heads query key]
        tiles = -(-x.shape[-1] // TILE_KEYS)
        padded = np.full((*x.shape[:-1], tiles * TILE_KEYS), MASKED, np.float32)
        with np.errstate(over="ignore"):
            padded[..., : x.shape[-1]] = np.maximum(x * LOG2_E, np.float32(MASKED))  # a masked score stays one
        padded = padded.reshape(*x.shape[:-1], tiles, TILE_KEYS)
        largest = padded.max(axis=-1, keepdims=True)
        weights = to_bfloat16(np.exp2(padded - largest))
        weights *= np.exp2(largest - largest.max(axis=-2, keepdims=True))
        weights = weights.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
        numpy_engine.hide_behind(weights, x.max(axis=-1, keepdims=True), past)
        made.append(weights / weights.sum(axis=-1, keepdims=True))
    return made


def mix(engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> Array:
    """The values as rounded, by the probabilities."""
    if engine.weights.half_cache:
        inputs = [inputs[0], [to_bfloat16(v) for v in inputs[1]]]
    return numpy_engine.mix(engine, batch, op, inputs)


class RoundingEngine(NumpyEngine):
    """The NumPy engine with the native engine's roundings."""

    kernels: Mapping[str, Kernel] = {**KERNELS, "linear": linear, "scores": scores, "softmax": softmax, "mix": mix}
