"""Floats and quant blocks of 32 values: how GGUF stores them, as NumPy has it.

Every format has a decoder and, if starscope writes it, an encoder; CODECS lists them. A block of 32 is a scale
(float16), sometimes a minimum, and small integers q: a value is `scale * q + minimum`. Infinities and NaN are values
like others here: a q that cannot be computed is 0, and the scale tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Codec(NamedTuple):
    """The two directions of a format, for n quant blocks, and where its float16 numbers are."""

    decode: Callable[[Bytes], Floats]  # [n block_bytes] -> [n block_size]
    encode: Callable[[Floats], Bytes] | None = None  # [n block_size] -> [n block_bytes]
    halves: tuple[int, int] = (0, 2)  # the bytes of a quant block, from and to, that are its scale and minimum


def half(b: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [n 1]."""
    return b[:, at : at + 2].view(np.float16).astype(np.float32)


def unpack(packed: Bytes, width: int, group: int) -> Bytes:
    """Fields of `width` bits -> uint8 [n fields]: of each `group` bytes, the low field of every byte, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, group) >> shifts  # [n groups 8/width group]
    return (runs & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _steps(x: Floats, inverse_scale: Floats, offset: float, top: int) -> Bytes:
    """`trunc(x / scale + offset)`, at most `top`; 0 where that is not finite, as for a scale too small to divide by."""
    q = x * inverse_scale + np.float32(offset)
    return np.where(np.isfinite(q), np.minimum(q, np.float32(top)), np.float32(0)).astype(np.uint8)


def inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _around_zero(x: Floats, top: int) -> tuple[Floats, Bytes]:
    """The scale with which the value of largest magnitude, the first of them, is the lowest of `top + 1` steps, of
    which the middle one is 0; and the steps.
    """
    middle = (top + 1) // 2
    scale = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) / np.float32(-middle)
    return scale, _steps(x, inverse(scale), middle + 0.5, top)


def _from_minimum(x: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """The scale with which the smallest value is step 0 and the largest step `top`; the smallest, the first of equals
    (0 and -0) and of NaN; and the steps.
    """
    minimum = np.take_along_axis(x, x.argmin(axis=1, keepdims=True), axis=1)
    scale = (np.take_along_axis(x, x.argmax(axis=1, keepdims=True), axis=1) - minimum) / np.float32(top)
    return scale, minimum, _steps(x - minimum, inverse(scale), 0.5, top)


def _packed(halves: Sequence[Floats], q: Bytes) -> Bytes:
    """A block of 32: its float16 numbers, then the low four bits of q, values 0-15 in the low nibbles."""
    numbers = [number.astype(np.float16).view(np.uint8) for number in halves]
    return np.concatenate([*numbers, (q[:, :16] & 15) | q[:, 16:] << 4], axis=1)


def _packed_5(halves: Sequence[Floats], q: Bytes) -> Bytes:
    """As `_packed`, with 4 bytes of fifth bits, the first value's lowest, before the low four."""
    packed, at = _packed(halves, q), 2 * len(halves)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")
    return np.concatenate([packed[:, :at], fifth, packed[:, at:]], axis=1)


# float formats


def _decode_f32(b: Bytes) -> Floats:
    return b.view(np.float32)


def _encode_f32(x: Floats) -> Bytes:
    return x.view(np.uint8)


def _decode_f16(b: Bytes) -> Floats:
    return b.view(np.float16).astype(np.float32)


def _encode_f16(x: Floats) -> Bytes:
    return x.astype(np.float16).view(np.uint8)


def _decode_bf16(b: Bytes) -> Floats:
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _encode_bf16(x: Floats) -> Bytes:
    """Round to nearest, ties to even; a NaN keeps its sign and its high bits and becomes quiet."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    quiet = bits >> 16 | np.uint32(0x40)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16).view(np.uint8)


# blocks of 32


def _decode_q4_0(b: Bytes) -> Floats:
    return half(b, 0) * (unpack(b[:, 2:], 4, 16).astype(np.float32) - 8)


def _encode_q4_0(x: Floats) -> Bytes:
    scale, q = _around_zero(x, 15)
    return _packed([scale], q)


def _decode_q4_1(b: Bytes) -> Floats:
    return half(b, 0) * unpack(b[:, 4:], 4, 16).astype(np.float32) + half(b, 2)


def _encode_q4_1(x: Floats) -> Bytes:
    scale, minimum, q = _from_minimum(x, 15)
    return _packed([scale, minimum], q)


def _decode_q5_0(b: Bytes) -> Floats:
    q = unpack(b[:, 6:], 4, 16) | unpack(b[:, 2:6], 1, 1) << 4
    return half(b, 0) * (q.astype(np.float32) - 16)


def _encode_q5_0(x: Floats) -> Bytes:
    scale, q = _around_zero(x, 31)
    return _packed_5([scale], q)


def _decode_q5_1(b: Bytes) -> Floats:
    q = unpack(b[:, 8:], 4, 16) | unpack(b[:, 4:8], 1, 1) << 4
    return half(b, 0) * q.astype(np.float32) + half(b, 2)


def _encode_q5_1(x: Floats) -> Bytes:
    scale, minimum, q = _from_minimum(x, 31)
    return _packed_5([scale, minimum], q)


def _decode_q8_0(b: Bytes) -> Floats:
    return half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _encode_q8_0(x: Floats) -> Bytes:
    """The scale makes the largest magnitude 127; halves round away from zero."""
    largest = (
        np.abs(x).view(np.uint32).max(axis=1, keepdims=True)
    )  # magnitudes in the order of their bits, NaN above all
    scale = largest.view(np.float32) / np.float32(127)
    scaled = x * inverse(scale)
    whole = np.trunc(scaled)
    rounded = whole + np.trunc(2 * (scaled - whole))
    q = np.where(np.isfinite(rounded), rounded, np.float32(0)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=1)


_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _decode_iq4_nl(b: Bytes) -> Floats:
    return half(b, 0) * _IQ4_NL_VALUES[unpack(b[:, 2:], 4, 16)]


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "F32": Codec(_decode_f32, _encode_f32),
        "F16": Codec(_decode_f16, _encode_f16),
        "BF16": Codec(_decode_bf16, _encode_bf16),
        "Q8_0": Codec(_decode_q8_0, _encode_q8_0),
        "Q4_0": Codec(_decode_q4_0, _encode_q4_0),
        "Q4_1": Codec(_decode_q4_1, _encode_q4_1, halves=(0, 4)),
        "Q5_0": Codec(_decode_q5_0, _encode_q5_0),
        "Q5_1": Codec(_decode_q5_1, _encode_q5_1, halves=(0, 4)),
        "IQ4_NL": Codec(_decode_iq4_nl),
    }
)
