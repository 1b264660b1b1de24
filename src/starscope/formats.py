"""How GGUF stores weights: each format packs `block_size` values into `block_bytes` bytes.

A quant block is a scale (float16), sometimes a minimum, and small integers q: a value is about `scale * q + minimum`.
The K formats pack 256 values and keep integer scales for groups of 16 or 32. The NumPy functions here are the
definition; compiled kernels of `starscope.native`, equal to them bit for bit, run in their place where they exist.

    q8_0 = find_format("q8_0")
    raw = encode(q8_0, weight)       # float32 [rows cols] -> uint8 [rows row_bytes]
    weight = decode(q8_0, raw)       # and back
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from starscope.errors import InvalidContentError, UnsupportedError
from starscope.native import kernels

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CHUNK_VALUES = 1 << 18
"""Values converted at a time by NumPy: 1 MiB of float32, which stays in a core's cache."""


class StoredType(NamedTuple):
    """A ggml tensor type: what its bytes are called and how large they are."""

    name: str
    block_size: int  # values
    block_bytes: int  # bytes


KNOWN_TYPES: Mapping[int, StoredType] = MappingProxyType(
    {
        0: StoredType("F32", 1, 4),
        1: StoredType("F16", 1, 2),
        2: StoredType("Q4_0", 32, 18),
        3: StoredType("Q4_1", 32, 20),
        6: StoredType("Q5_0", 32, 22),
        7: StoredType("Q5_1", 32, 24),
        8: StoredType("Q8_0", 32, 34),
        9: StoredType("Q8_1", 32, 36),
        10: StoredType("Q2_K", 256, 84),
        11: StoredType("Q3_K", 256, 110),
        12: StoredType("Q4_K", 256, 144),
        13: StoredType("Q5_K", 256, 176),
        14: StoredType("Q6_K", 256, 210),
        15: StoredType("Q8_K", 256, 292),
        16: StoredType("IQ2_XXS", 256, 66),
        17: StoredType("IQ2_XS", 256, 74),
        18: StoredType("IQ3_XXS", 256, 98),
        19: StoredType("IQ1_S", 256, 50),
        20: StoredType("IQ4_NL", 32, 18),
        21: StoredType("IQ3_S", 256, 110),
        22: StoredType("IQ2_S", 256, 82),
        23: StoredType("IQ4_XS", 256, 136),
        24: StoredType("I8", 1, 1),
        25: StoredType("I16", 1, 2),
        26: StoredType("I32", 1, 4),
        27: StoredType("I64", 1, 8),
        28: StoredType("F64", 1, 8),
        29: StoredType("IQ1_M", 256, 56),
        30: StoredType("BF16", 1, 2),
        34: StoredType("TQ1_0", 256, 54),
        35: StoredType("TQ2_0", 256, 66),
        39: StoredType("MXFP4", 32, 17),
        40: StoredType("NVFP4", 64, 36),
        41: StoredType("Q1_0", 128, 18),
        42: StoredType("Q2_0", 64, 18),
    }
)
"""Every type id that ggml still defines, decoded here or not: sizes are checked, and an error can name the type."""


@dataclass(frozen=True)
class Format:
    """One row of the table of formats. `decode` and `encode` work on n quant blocks, as the functions below say."""

    name: str
    type_id: int
    block_size: int  # values
    block_bytes: int  # bytes
    decode: Callable[[Bytes], Floats]  # [n block_bytes] -> [n block_size]
    encode: Callable[[Floats], Bytes] | None  # [n block_size] -> [n block_bytes]; None: starscope does not write it
    leading_halves: int = 1  # float16 numbers that an encoded quant block begins with: its scale, then its minimum

    def row_bytes(self, cols: int) -> int:
        """The bytes of a row of `cols` values; InvalidContentError when they are not whole quant blocks."""
        if cols % self.block_size:
            raise InvalidContentError(
                f"a row of {cols} values cannot be stored as {self.name}, which packs {self.block_size} at a time."
            )
        return cols // self.block_size * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a tensor of this shape in torch order [.. rows cols]."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


def find_format(name: str) -> Format:
    """The format of this name, in upper or lower case; UnsupportedError says which there are."""
    found = FORMATS.get(name.upper())
    if found is None:
        raise UnsupportedError(f"{name} is not a format that starscope reads; it reads {', '.join(FORMATS)}.")
    return found


def format_by_id(type_id: int) -> Format | None:
    """The format with this ggml type id, or None when starscope does not decode it."""
    return _BY_ID.get(type_id)


def decode(fmt: Format, raw: Bytes, *, threads: int | None = None) -> Floats:
    """uint8 [.. row_bytes] -> float32 [.. cols]: a new array, or, for F32, a view of `raw` where it can be one."""
    if raw.shape[-1] % fmt.block_bytes:
        raise InvalidContentError(
            f"a row of {raw.shape[-1]} bytes is not {fmt.name}, whose blocks are {fmt.block_bytes} bytes."
        )
    raw = np.ascontiguousarray(raw)
    if raw.ctypes.data % 4:
        raw = raw.copy()  # kernels and views of float32 want aligned addresses
    if fmt.name == "F32":
        return raw.view(np.float32)
    values = np.empty((*raw.shape[:-1], raw.shape[-1] // fmt.block_bytes * fmt.block_size), np.float32)
    module = kernels()
    if module is not None and fmt.type_id in module.decodes():
        module.decode(fmt.type_id, _as_rows(raw), _as_rows(values), threads or _cpus())
    else:
        _by_chunks(fmt.decode, raw.reshape(-1, fmt.block_bytes), values.reshape(-1, fmt.block_size))
    return values


def encode(fmt: Format, values: Floats, *, threads: int | None = None) -> Bytes:
    """float32 [.. cols] -> uint8 [.. row_bytes]: a new array, or, for F32, a view of `values` where it can be one.

    What float16 cannot hold becomes an infinity, in F16 or in a block's scale: whoever converts has to look for it.
    """
    if fmt.encode is None:
        known = ", ".join(f.name for f in FORMATS.values() if f.encode is not None)
        raise UnsupportedError(f"starscope reads {fmt.name} and does not write it; it writes {known}.")
    values = np.require(values, np.float32, ["C", "A"])
    if fmt.name == "F32":
        return values.view(np.uint8)
    raw = np.empty((*values.shape[:-1], fmt.row_bytes(values.shape[-1])), np.uint8)
    module = kernels()
    if module is not None and fmt.type_id in module.encodes():
        module.encode(fmt.type_id, _as_rows(values), _as_rows(raw), threads or _cpus())
    else:
        _by_chunks(fmt.encode, values.reshape(-1, fmt.block_size), raw.reshape(-1, fmt.block_bytes))
    return raw


def _as_rows(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(-1, x.shape[-1])


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_chunks(convert: Callable[[NDArray[Any]], NDArray[Any]], source: NDArray[Any], target: NDArray[Any]) -> None:
    """`target[i] = convert(source)[i]` for every quant block i, a cache's worth of them at a time."""
    step = CHUNK_VALUES // max(source.shape[1], target.shape[1])
    with np.errstate(all="ignore"):  # infinities and NaN are values like others here
        for start in range(0, len(source), step):
            target[start : start + step] = convert(source[start : start + step])


# Parts that the formats share: b is uint8 [n block_bytes], the bytes of n quant blocks.


def _half(b: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [n 1]."""
    return b[:, at : at + 2].view(np.float16).astype(np.float32)


def _unpack(packed: Bytes, width: int, group: int) -> Bytes:
    """Fields of `width` bits -> uint8 [n fields]: of each `group` bytes, the low field of every byte, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, group) >> shifts  # [n groups 8/width group]
    return (runs & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _grouped(q: NDArray[Any], scale: Floats, minimum: Floats | None = None) -> Floats:
    """`scale * q - minimum`, for q [n values] and one scale and one minimum a group [n groups]."""
    values = scale[:, :, None] * q.reshape(*scale.shape, -1).astype(np.float32)
    if minimum is not None:
        values -= minimum[:, :, None]
    return values.reshape(q.shape)


def _six_bit_scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes, times the block's own scales -> float32 [n 8] each.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low 6 bits; bytes 8-11 the low 4 bits of scales (low nibble)
    and minima (high nibble) 4-7, whose high 2 bits are the high 2 bits of bytes 0-3 and 4-7.
    """
    low, middle, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (rest >> 4) | (middle >> 6 << 4)], axis=1)
    return _half(b, 0) * scales.astype(np.float32), _half(b, 2) * minima.astype(np.float32)


def _steps(x: Floats, inverse_scale: Floats, offset: float, top: int) -> Bytes:
    """`trunc(x / scale + offset)`, at most `top`; 0 where that is not finite, as for a scale too small to divide by."""
    q = x * inverse_scale + np.float32(offset)
    return np.where(np.isfinite(q), np.minimum(q, np.float32(top)), np.float32(0)).astype(np.uint8)


def _inverse(scale: Floats) -> Floats:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _around_zero(x: Floats, top: int) -> tuple[Floats, Bytes]:
    """The scale with which the value of largest magnitude, the first of them, is the lowest of `top + 1` steps, of
    which the middle one is 0; and the steps.
    """
    half = (top + 1) // 2
    scale = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) / np.float32(-half)
    return scale, _steps(x, _inverse(scale), half + 0.5, top)


def _from_minimum(x: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """The scale with which the smallest value is step 0 and the largest step `top`; the smallest; and the steps."""
    minimum = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - minimum) / np.float32(top)
    return scale, minimum, _steps(x - minimum, _inverse(scale), 0.5, top)


def _packed(halves: Sequence[Floats], q: Bytes) -> Bytes:
    """A block of 32: its float16 numbers, then the low four bits of q, values 0-15 in the low nibbles."""
    numbers = [half.astype(np.float16).view(np.uint8) for half in halves]
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
    return _half(b, 0) * (_unpack(b[:, 2:], 4, 16).astype(np.float32) - 8)


def _encode_q4_0(x: Floats) -> Bytes:
    scale, q = _around_zero(x, 15)
    return _packed([scale], q)


def _decode_q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * _unpack(b[:, 4:], 4, 16).astype(np.float32) + _half(b, 2)


def _encode_q4_1(x: Floats) -> Bytes:
    scale, minimum, q = _from_minimum(x, 15)
    return _packed([scale, minimum], q)


def _decode_q5_0(b: Bytes) -> Floats:
    q = _unpack(b[:, 6:], 4, 16) | _unpack(b[:, 2:6], 1, 1) << 4
    return _half(b, 0) * (q.astype(np.float32) - 16)


def _encode_q5_0(x: Floats) -> Bytes:
    scale, q = _around_zero(x, 31)
    return _packed_5([scale], q)


def _decode_q5_1(b: Bytes) -> Floats:
    q = _unpack(b[:, 8:], 4, 16) | _unpack(b[:, 4:8], 1, 1) << 4
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _encode_q5_1(x: Floats) -> Bytes:
    scale, minimum, q = _from_minimum(x, 31)
    return _packed_5([scale, minimum], q)


def _decode_q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _encode_q8_0(x: Floats) -> Bytes:
    """The scale makes the largest magnitude 127; halves round away from zero."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    whole = np.trunc(scaled)
    rounded = whole + np.trunc(2 * (scaled - whole))
    q = np.where(np.isfinite(rounded), rounded, np.float32(0)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=1)


_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _decode_iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * _IQ4_NL_VALUES[_unpack(b[:, 2:], 4, 16)]


# blocks of 256: the K formats


def _decode_q2_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 16 of scale and minimum (4 bits each), 64 of q (2 bits), scale, scale of minima."""
    scales, minima = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    return _grouped(_unpack(b[:, 16:80], 2, 32), _half(b, 80) * scales, _half(b, 82) * minima)


def _decode_q3_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 32 of high bits (1: add 4), 64 of low 2 bits, 12 of 6-bit scales, scale. q - 4 counts."""
    q = _unpack(b[:, 32:96], 2, 32) | _unpack(b[:, :32], 1, 32) << 2
    scales = _unpack(b[:, 96:104], 4, 8) | _unpack(b[:, 104:108], 2, 4) << 4
    return _grouped(q.astype(np.int8) - 4, _half(b, 108) * (scales.astype(np.float32) - 32))


def _decode_q4_k(b: Bytes) -> Floats:
    """8 groups of 32. Bytes: scale, scale of minima, 12 of both for the groups, 128 of q (4 bits)."""
    return _grouped(_unpack(b[:, 16:], 4, 32), *_six_bit_scales_and_minima(b))


def _decode_q5_k(b: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of high bits before the 128 of low bits."""
    q = _unpack(b[:, 48:], 4, 32) | _unpack(b[:, 16:48], 1, 32) << 4
    return _grouped(q, *_six_bit_scales_and_minima(b))


def _decode_q6_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 128 of low 4 bits, 64 of high 2 bits, 16 scales (int8), scale. q - 32 counts."""
    q = _unpack(b[:, :128], 4, 64) | _unpack(b[:, 128:192], 2, 32) << 4
    return _grouped(q.astype(np.int8) - 32, _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32))


def _format(
    name: str,
    decoder: Callable[[Bytes], Floats],
    encoder: Callable[[Floats], Bytes] | None = None,
    leading_halves: int = 1,
) -> Format:
    type_id, known = next((i, known) for i, known in KNOWN_TYPES.items() if known.name == name)
    return Format(name, type_id, known.block_size, known.block_bytes, decoder, encoder, leading_halves)


_TABLE = (
    _format("F32", _decode_f32, _encode_f32),
    _format("F16", _decode_f16, _encode_f16),
    _format("BF16", _decode_bf16, _encode_bf16),
    _format("Q8_0", _decode_q8_0, _encode_q8_0),
    _format("Q4_0", _decode_q4_0, _encode_q4_0),
    _format("Q4_1", _decode_q4_1, _encode_q4_1, leading_halves=2),
    _format("Q5_0", _decode_q5_0, _encode_q5_0),
    _format("Q5_1", _decode_q5_1, _encode_q5_1, leading_halves=2),
    _format("Q2_K", _decode_q2_k),
    _format("Q3_K", _decode_q3_k),
    _format("Q4_K", _decode_q4_k),
    _format("Q5_K", _decode_q5_k),
    _format("Q6_K", _decode_q6_k),
    _format("IQ4_NL", _decode_iq4_nl),
)
FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _TABLE})
_BY_ID: Mapping[int, Format] = MappingProxyType({f.type_id: f for f in _TABLE})
