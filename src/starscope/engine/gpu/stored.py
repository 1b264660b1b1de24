"""A matrix on a device in the file's own number of bits.

GGUF stores quant blocks of 18 to 210 bytes, which no GPU reads well. Here the same bytes are sorted into fields, each a
plain tensor over all rows: quants, high bits, scales of groups, scales. Nothing is converted and nothing is added, so a
matrix takes the bytes that it takes in the file:

    matrix = read_stored(weights, "layers.0.mlp.up_proj.weight", device)
    matrix.rows(ids)                       # some rows, decoded: float32 [n cols], the bits of `formats.decode`
    matrix.decode(0, 128)                  # likewise, a run of rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from starscope.engine.weights import Weights
from starscope.formats import find_format

UPLOAD_BYTES = 32 << 20
"""Of a matrix, sent to the device and sorted there at a time."""


class Field(NamedTuple):
    """The bytes `start` to `stop` of every quant block, and what they are."""

    start: int
    stop: int
    dtype: torch.dtype


HALF, BYTE, SIGNED = torch.float16, torch.uint8, torch.int8

LAYOUTS: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "F16": {"quants": Field(0, 2, HALF)},
        "BF16": {"quants": Field(0, 2, torch.bfloat16)},
        "Q8_0": {"scale": Field(0, 2, HALF), "quants": Field(2, 34, SIGNED)},
        "Q4_0": {"scale": Field(0, 2, HALF), "quants": Field(2, 18, BYTE)},
        "Q4_K": {"scale": Field(0, 4, HALF), "groups": Field(4, 16, BYTE), "quants": Field(16, 144, BYTE)},
        "Q5_K": {
            "scale": Field(0, 4, HALF),
            "groups": Field(4, 16, BYTE),
            "high": Field(16, 48, BYTE),
            "quants": Field(48, 176, BYTE),
        },
        "Q6_K": {
            "quants": Field(0, 128, BYTE),
            "high": Field(128, 192, BYTE),
            "groups": Field(192, 208, SIGNED),
            "scale": Field(208, 210, HALF),
        },
    }
)
"""The formats whose matrices stay as they are; others are decoded to float32 when they are loaded."""


def device_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    """What a tensor `[.. cols]` takes on a device: the file's bytes where it stays as it is, 4 a value elsewhere.

    Vectors are always float32: norms and biases are read by every row.
    """
    if len(shape) == 2 and format_name in LAYOUTS:
        return find_format(format_name).nbytes(shape)
    return 4 * int(np.prod(shape))


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix `[rows cols]` as its format stores it; each field is a tensor `[rows n]`.

    `by_triton`: products with it are made by Triton's kernels.
    """

    name: str
    format_name: str
    shape: tuple[int, int]
    fields: Mapping[str, Tensor]
    by_triton: bool = False

    @property
    def device(self) -> torch.device:
        return self.fields["quants"].device

    @property
    def nbytes(self) -> int:
        """The bytes that its fields take."""
        return sum(field.nbytes for field in self.fields.values())

    def rows(self, indices: Tensor) -> Tensor:
        """The rows with these numbers: int64 `[n]` -> float32 `[n cols]`."""
        return self._decode({name: field.index_select(0, indices) for name, field in self.fields.items()})

    def decode(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start to stop: float32 `[stop-start cols]`."""
        return self._decode({name: field[start:stop] for name, field in self.fields.items()})

    def _decode(self, fields: Mapping[str, Tensor]) -> Tensor:
        fmt = find_format(self.format_name)
        blocks = self.shape[1] // fmt.block_size
        each = {name: field.reshape(len(field) * blocks, -1) for name, field in fields.items()}
        return DECODERS[self.format_name](each).reshape(-1, self.shape[1])


def read_stored(weights: Weights, name: str, device: torch.device, *, by_triton: bool = False) -> StoredMatrix:
    """A matrix of a format in `LAYOUTS`, read from its source a part at a time.

    What else is on the device meanwhile is one part, as it came: `UPLOAD_BYTES` at the most, or one row.
    """
    format_name = weights.format_name(name)
    rows, cols = weights.slots[name].shape
    fmt, layout = find_format(format_name), LAYOUTS[format_name]
    blocks, row_bytes = cols // fmt.block_size, fmt.row_bytes(cols)
    fields = {
        part: torch.empty(rows, blocks * (f.stop - f.start) // f.dtype.itemsize, dtype=f.dtype, device=device)
        for part, f in layout.items()
    }
    at_once = min(rows, max(1, UPLOAD_BYTES // row_bytes))
    room = np.empty(at_once * row_bytes, np.uint8)
    for start in range(0, rows, at_once):
        stop = min(rows, start + at_once)
        raw = weights.read_stored(name, start, stop, room[: (stop - start) * row_bytes])
        there = torch.from_numpy(raw.reshape(stop - start, blocks, fmt.block_bytes)).to(device)
        for part, f in layout.items():
            own = there[:, :, f.start : f.stop].reshape(stop - start, -1)
            fields[part][start:stop] = own.contiguous().view(f.dtype)
    return StoredMatrix(name, format_name, (rows, cols), fields, by_triton)


def _runs(field: Tensor, size: int) -> Tensor:
    """`[n bytes]` -> `[n bytes/size size]`."""
    return field.reshape(len(field), -1, size)


def _nibbles(quants: Tensor, size: int) -> Tensor:
    """Runs of `size` bytes -> their low four bits, then their high four: uint8 `[n runs 2 size]`."""
    runs = _runs(quants, size)
    return torch.stack([runs & 15, runs >> 4], 2)


def _plain(fields: Mapping[str, Tensor]) -> Tensor:
    return fields["quants"].float()


def _q8_0(fields: Mapping[str, Tensor]) -> Tensor:
    return fields["scale"].float() * fields["quants"].float()


def _q4_0(fields: Mapping[str, Tensor]) -> Tensor:
    q = _nibbles(fields["quants"], 16).flatten(1)
    return fields["scale"].float() * (q.float() - 8)


def _six_bits(fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight groups of a block, float32 `[n 8 1]` each: see `k_quants`."""
    low, middle, rest = (_runs(fields["groups"], 4)[:, i] for i in range(3))
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (rest >> 4) | (middle >> 6 << 4)], 1)
    of_scales, of_minima = torch.split(fields["scale"].float(), 1, 1)
    return (of_scales * scales.float())[:, :, None], (of_minima * minima.float())[:, :, None]


def _q4_k(fields: Mapping[str, Tensor]) -> Tensor:
    scales, minima = _six_bits(fields)
    q = _nibbles(fields["quants"], 32).flatten(1, 2)  # [n 8 32]
    return scales * q.float() - minima


def _q5_k(fields: Mapping[str, Tensor]) -> Tensor:
    scales, minima = _six_bits(fields)
    bits = torch.stack([fields["high"] >> i & 1 for i in range(8)], 1)  # [n 8 32]
    q = _nibbles(fields["quants"], 32).flatten(1, 2) | bits << 4
    return scales * q.float() - minima


def _q6_k(fields: Mapping[str, Tensor]) -> Tensor:
    low = _nibbles(fields["quants"], 64).flatten(2)  # [n 2 128]
    high = torch.cat([_runs(fields["high"], 32) >> i & 3 for i in (0, 2, 4, 6)], 2)  # [n 2 128]
    q = (low | high << 4).reshape(len(low), 16, 16).float() - 32
    return (fields["scale"].float() * fields["groups"].float())[:, :, None] * q


DECODERS: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {
        "F16": _plain,
        "BF16": _plain,
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""Fields of n quant blocks, `[n ...]` -> float32 `[n block_size]`: the bits of `formats.decode`."""
