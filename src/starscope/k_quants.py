"""The K formats as NumPy has them: quant blocks of 256 values whose groups of 16 or 32 have small integer scales.

An encoder searches, for each group, the scale (and minimum) with the least weighted squared error: it rounds the values
to steps of slightly different sizes, and for each rounding solves for the best scale by least squares. Groups lie side
by side, float32 [values groups], and every sum runs over a group's values in their order: the compiled kernels do the
same operations, so bits are equal. Within a group values count in units of its range.

A block that no float16 scale can hold (a value that is no number, or too large) is an infinite scale and zeros, which
decode as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starscope.quant_blocks import Bytes, Codec, Floats, half, inverse, unpack

TRIAL_STEP = np.float32(0.1)
"""Trial steps differ by this part of one quant at the top of the range."""
DEGENERATE = np.float32(8e-6)
"""Least-squares determinants below this part of their terms are rounding errors."""
TOO_LARGE = np.float32(2.0**30)
"""No float16 scale reaches it."""
NO_FRACTION = np.float32(12582912)
"""1.5 * 2^23: float32 numbers from 2^23 on have no fraction, so that adding and subtracting it rounds to an integer."""


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
    return half(b, 0) * scales.astype(np.float32), half(b, 2) * minima.astype(np.float32)


def _decode_q2_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 16 of scale and minimum (4 bits each), 64 of q (2 bits), scale, scale of minima."""
    scales, minima = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    return _grouped(unpack(b[:, 16:80], 2, 32), half(b, 80) * scales, half(b, 82) * minima)


def _decode_q3_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 32 of high bits (1: add 4), 64 of low 2 bits, 12 of 6-bit scales, scale. q - 4 counts."""
    q = unpack(b[:, 32:96], 2, 32) | unpack(b[:, :32], 1, 32) << 2
    scales = unpack(b[:, 96:104], 4, 8) | unpack(b[:, 104:108], 2, 4) << 4
    return _grouped(q.astype(np.int8) - 4, half(b, 108) * (scales.astype(np.float32) - 32))


def _decode_q4_k(b: Bytes) -> Floats:
    """8 groups of 32. Bytes: scale, scale of minima, 12 of both for the groups, 128 of q (4 bits)."""
    return _grouped(unpack(b[:, 16:], 4, 32), *_six_bit_scales_and_minima(b))


def _decode_q5_k(b: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of high bits before the 128 of low bits."""
    q = unpack(b[:, 48:], 4, 32) | unpack(b[:, 16:48], 1, 32) << 4
    return _grouped(q, *_six_bit_scales_and_minima(b))


def _decode_q6_k(b: Bytes) -> Floats:
    """16 groups of 16. Bytes: 128 of low 4 bits, 64 of high 2 bits, 16 scales (int8), scale. q - 32 counts."""
    q = unpack(b[:, :128], 4, 64) | unpack(b[:, 128:192], 2, 32) << 4
    return _grouped(q.astype(np.int8) - 32, half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32))


def _rounded(x: Floats) -> Floats:
    """To the nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + NO_FRACTION) - NO_FRACTION


def _quants(x: Floats, inverse_scale: Floats | np.float32, bottom: float, top: float) -> Floats:
    q = _rounded(x * inverse_scale)
    return np.maximum(np.minimum(q, np.float32(top)), np.float32(bottom))


def _ordered_sum(terms: Floats) -> Floats:
    """The sum over the first axis, in its order; NumPy's own sums choose theirs."""
    total: Floats = np.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def _finite_or_zero(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, np.float32(0))


def _at_least_zero(x: Floats) -> Floats:
    return np.where(x > 0, x, np.float32(0))


def _fit_with_minimum(x: Floats, top: int, trials: range) -> tuple[Floats, Floats]:
    """[32 groups] -> scales s and minima m [groups], such that x is about s * q - m with q in 0..top and m >= 0.

    Trial t makes the range `top + TRIAL_STEP * t` quants wide. Errors count by |x| plus the group's root mean square.
    """
    low = np.minimum(x.min(axis=0), np.float32(0))
    span = x.max(axis=0) - low
    to_units = _finite_or_zero(np.float32(top) / span)
    zero = (0 - low) * to_units  # where x = 0 is
    value = (x - low) * to_units  # in units of span / top, from `low`
    size = np.abs(x) * to_units
    weight = size + np.sqrt(_ordered_sum(size * size) * np.float32(1 / len(x)))
    w, wv = _ordered_sum(weight), _ordered_sum(weight * value)
    least = np.full_like(w, np.inf)
    best_scale, best_offset = np.ones_like(w), np.zeros_like(w)
    for t in trials:
        # Quants are counted from the best offset so far, which the values between it and the largest then span.
        factor = _finite_or_zero((np.float32(top) + TRIAL_STEP * np.float32(t)) / (np.float32(top) - best_offset))
        q = _rounded(value * factor - best_offset * factor)
        q = np.maximum(np.minimum(q, np.float32(top)), np.float32(0))
        weighted = weight * q
        wq, wqq, wqv = (_ordered_sum(terms) for terms in (weighted, weighted * q, weighted * value))
        # Least squares of value = s * q + offset, or of s alone where the offset would make a minimum above 0.
        determinant = w * wqq - wq * wq
        s = (w * wqv - wv * wq) / determinant
        offset = (wqq * wv - wq * wqv) / determinant
        s = np.where(offset > zero, (wqv - zero * wq) / wqq, s)
        offset = np.where(offset < zero, offset, zero)
        error = (s * (s * wqq - 2 * wqv) + offset * (offset * w - 2 * wv)) + 2 * s * offset * wq
        better = (determinant > DEGENERATE * (w * wqq)) & (error < least)
        least, best_scale, best_offset = (
            np.where(better, new, old) for new, old in ((error, least), (s, best_scale), (offset, best_offset))
        )
    unit = span / np.float32(top)
    return _at_least_zero(unit * best_scale), _at_least_zero(0 - (low + unit * best_offset))


def _fit_around_zero(x: Floats) -> Floats:
    """[16 groups] -> scales s [groups], such that x is about s * q with q in -32..31. Errors count by x squared."""
    largest = _first_largest(x.T)
    value = x * _finite_or_zero(np.float32(-32) / largest)  # in units of the largest / -32
    square = value * value
    cube = square * value
    most, best_scale = np.zeros_like(largest), np.zeros_like(largest)
    for t in range(-9, 10):
        factor = np.float32(1) + np.float32(t) * (TRIAL_STEP / np.float32(32))
        q = _quants(value, factor, -32, 31)
        wqq, wqv = _ordered_sum(square * q * q), _ordered_sum(cube * q)
        s = wqv / wqq  # least squares; it takes s * wqv off the error
        better = (wqq > 0) & (wqv * wqv > most * wqq)
        most, best_scale = np.where(better, s * wqv, most), np.where(better, s, best_scale)
    return best_scale * (largest / np.float32(-32))


def _first_largest(x: Floats) -> Floats:
    """The value of largest magnitude of each row, the first of equals, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)[:, 0]


def _scalable(x: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """Which blocks can be scaled at all, [n 1]; and the values, zeros in the others."""
    usable: NDArray[np.bool_] = np.asarray((np.abs(x) < TOO_LARGE).all(axis=1, keepdims=True))
    return usable, np.where(usable, x, np.float32(0))


def _six_bits(values: Floats) -> tuple[Floats, Bytes]:
    """[n 8] -> float16 scales [n 1], as float32, and numbers of 6 bits [n 8], with values about scale * number.

    Numbers are counted in what float16 makes of the scale: for small weights it has few bits.
    """
    scale = (values.max(axis=1, keepdims=True) / np.float32(63)).astype(np.float16).astype(np.float32)
    return scale, _quants(values, inverse(scale), 0, 63).astype(np.uint8)


def _encode_with_minimum(x: Floats, top: int, trials: range) -> tuple[Bytes, Bytes]:
    """[n 256] -> the first 16 bytes of each block, its scales and minima; and the quants [n 8 32]."""
    usable, x = _scalable(x)
    groups = x.reshape(len(x), 8, 32)
    fitted = _fit_with_minimum(np.ascontiguousarray(groups.reshape(-1, 32).T), top, trials)
    (scale, s), (minimum, m) = (_six_bits(values.reshape(-1, 8)) for values in fitted)
    step = scale * s.astype(np.float32)
    low = minimum * m.astype(np.float32)
    q = _quants(groups + low[:, :, None], inverse(step)[:, :, None], 0, top).astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    halves = np.concatenate([scale, minimum], axis=1).astype(np.float16).view(np.uint8)
    head = np.concatenate([halves, *packed], axis=1)
    usable &= np.isfinite(scale) & np.isfinite(minimum)
    head = np.where(usable, head, np.array([0, 0x7C] + [0] * 14, np.uint8))
    return head, np.where(usable[:, :, None], q, np.uint8(0))


def _low_bits(q: Bytes) -> Bytes:
    """The low four bits of quants [n 8 32] -> [n 128]: of two groups, the first in the low nibbles."""
    return ((q[:, 0::2] & 15) | q[:, 1::2] << 4).reshape(len(q), -1).astype(np.uint8)


def _encode_q4_k(x: Floats) -> Bytes:
    head, q = _encode_with_minimum(x, 15, range(-10, 11))
    return np.concatenate([head, _low_bits(q)], axis=1)


def _encode_q5_k(x: Floats) -> Bytes:
    head, q = _encode_with_minimum(x, 31, range(-5, 11))
    fifth = np.packbits(q >> 4, axis=1, bitorder="little").reshape(len(q), -1)
    return np.concatenate([head, fifth, _low_bits(q)], axis=1)


def _encode_q6_k(x: Floats) -> Bytes:
    usable, x = _scalable(x)
    groups = x.reshape(len(x), 16, 16)
    scales = _fit_around_zero(np.ascontiguousarray(groups.reshape(-1, 16).T)).reshape(-1, 16)
    largest = _first_largest(scales)[:, None]
    halves = (largest / np.float32(-128) + np.float32(0)).astype(np.float16)  # + 0: no -0 for zeros
    scale = halves.astype(np.float32)
    numbers = _quants(scales, inverse(scale), -128, 127)
    q = _quants(groups, inverse(scale * numbers)[:, :, None], -32, 31).astype(np.int8).reshape(-1, 2, 4, 32) + 32
    q = q.astype(np.uint8)  # [n halves runs 32]
    low = q[:, :, :2] & 15 | q[:, :, 2:] << 4
    high = np.bitwise_or.reduce(q >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    body = np.concatenate([low.reshape(len(x), -1), high.reshape(len(x), -1)], axis=1)
    raw = np.concatenate([body, numbers.astype(np.int8).view(np.uint8), halves.view(np.uint8)], axis=1)
    return np.where(usable & np.isfinite(scale), raw, np.array([0] * 208 + [0, 0x7C], np.uint8))


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "Q4_K": Codec(_decode_q4_k, _encode_q4_k, halves=(0, 4)),
        "Q5_K": Codec(_decode_q5_k, _encode_q5_k, halves=(0, 4)),
        "Q6_K": Codec(_decode_q6_k, _encode_q6_k, halves=(208, 210)),
        "Q2_K": Codec(_decode_q2_k, halves=(80, 84)),
        "Q3_K": Codec(_decode_q3_k, halves=(108, 110)),
    }
)
