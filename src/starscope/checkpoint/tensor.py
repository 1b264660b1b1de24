"""Tensors of weight files, read a few rows at a time.

A stored tensor is a stretch of one file, or a view with strides of such a stretch: a matrix turned over, or cut out
of wider rows. Joined tensors are several, one below the other. All read alike:

    weight.transposed().read_rows(0, 16)        # float32: 16 columns of what is stored, as rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from starscope.checkpoint.content import cut, short
from starscope.checkpoint.files import WeightFile
from starscope.errors import CheckpointError, UnsupportedError
from starscope.formats import Bytes, Floats, Format, decode, find_format

# Bits of one element, for every type of the safetensors format; the ones in STORED are what weights come in.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
STORED = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class CheckpointTensor(ABC):
    """A tensor of a checkpoint, in rows along its first axis. `dtype` is spelled as safetensors does."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file to name when something is wrong with the tensor."""

    @property
    def nbytes(self) -> int:
        return DTYPE_BITS[self.dtype] * prod(self.shape) // 8

    @property
    def num_rows(self) -> int:
        """Rows of a matrix; a vector is one row, as in a GGUF file."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.num_rows if self.num_rows else 0

    @property
    def format(self) -> Format:
        """The format that its bytes are in. UnsupportedError for a type that weights are not stored in."""
        if self.dtype not in STORED:
            known = ", ".join(STORED)
            raise UnsupportedError(f"{self.path}: {cut(self.name)} is stored as {self.dtype}; supported: {known}.")
        return find_format(self.dtype)

    @abstractmethod
    def transposed(self) -> CheckpointTensor:
        """The matrix turned over. Nothing is read. CheckpointError when it is not a matrix."""

    @abstractmethod
    def _fill(self, raw: Bytes, start: int, stop: int) -> None:
        """Read rows start … stop into `raw`, uint8 [(stop - start) * row_bytes]."""

    def read_raw_rows(self, start: int, stop: int, into: Bytes | None = None) -> Bytes:
        """Rows start … stop as stored: uint8 [rows row_bytes], in `into` (uint8, at least as long) when given."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.name}, which has {self.num_rows}")
        size = (stop - start) * self.row_bytes
        raw = np.empty(size, np.uint8) if into is None else into[:size]
        if size:
            self._fill(raw, start, stop)
        return raw.reshape(stop - start, self.row_bytes)

    def read_rows(self, start: int, stop: int) -> Floats:
        """Rows start … stop as float32 [rows, …]; of a vector, row 0 is all of it."""
        raw = self.read_raw_rows(start, stop)
        shape = (stop - start, *self.shape[1:]) if len(self.shape) > 1 else (stop - start, *self.shape)
        return decode(self.format, raw).reshape(shape) if raw.size else np.zeros(shape, np.float32)

    def read(self) -> Floats:
        """The whole tensor as float32, in its shape."""
        return self.read_rows(0, self.num_rows).reshape(self.shape)


@dataclass(frozen=True)
class StoredTensor(CheckpointTensor):
    """One tensor of one file, from byte `offset` on.

    `strides`, in elements, are given for a matrix whose elements do not follow one another: (1, n) for one turned
    over, (n, 1) for one cut out of wider rows.
    """

    offset: int
    file: WeightFile = field(repr=False, compare=False)
    strides: tuple[int, int] | None = None

    @property
    def path(self) -> Path:
        return self.file.path

    def transposed(self) -> StoredTensor:
        if len(self.shape) != 2:
            raise CheckpointError(
                f"{self.path}: {cut(self.name)} has shape {short(list(self.shape))}; expected a matrix."
            )
        rows, columns = self.shape
        by_row, by_column = self.strides or (columns, 1)
        return view(replace(self, shape=(columns, rows)), (by_column, by_row))

    def _fill(self, raw: Bytes, start: int, stop: int) -> None:
        if self.strides is None:
            self.file.read_into(raw.data, self.offset + start * self.row_bytes)
            return
        columns, (by_row, by_column) = self.shape[1], self.strides
        itemsize = DTYPE_BITS[self.dtype] // 8
        if by_column == 1:
            for row, line in enumerate(raw.reshape(stop - start, -1), start):
                self.file.read_into(line.data, self.offset + row * by_row * itemsize)
            return
        turned = np.empty((columns, stop - start), f"u{itemsize}")  # each column as it lies in the file
        for column, line in enumerate(turned.view(np.uint8).reshape(columns, -1)):
            self.file.read_into(line.data, self.offset + (column * by_column + start) * itemsize)
        raw.view(turned.dtype).reshape(stop - start, columns)[...] = turned.T


@dataclass(frozen=True)
class JoinedTensor(CheckpointTensor):
    """Several tensors as one: their rows (of vectors, their elements) one after another."""

    parts: tuple[CheckpointTensor, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    def transposed(self) -> CheckpointTensor:
        raise CheckpointError(f"{self.path}: {cut(self.name)} is joined from several tensors; expected one of them.")

    def _fill(self, raw: Bytes, start: int, stop: int) -> None:
        done = first = 0
        for part in self.parts:
            begin, end = (max(0, start - first), min(part.num_rows, stop - first))
            if begin < end:
                done += part.read_raw_rows(begin, end, raw[done:]).nbytes
            first += part.num_rows if len(self.shape) > 1 else 0


@dataclass(frozen=True)
class ComputedTensor(CheckpointTensor):
    """A vector of float32 that follows from what the file at `source` says, and that no file stores."""

    source: Path
    values: Floats = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        return self.source

    def transposed(self) -> CheckpointTensor:
        raise CheckpointError(f"{self.path}: {cut(self.name)} is a vector; expected a matrix.")

    def _fill(self, raw: Bytes, start: int, stop: int) -> None:
        raw[:] = np.ascontiguousarray(self.values, np.float32).view(np.uint8)


def view(tensor: StoredTensor, strides: Sequence[int]) -> StoredTensor:
    """`tensor` with these strides, in elements, one for each axis. UnsupportedError for those that no rows have."""
    steps = [(size, stride) for size, stride in zip(tensor.shape, strides, strict=True) if size != 1]
    if 0 in tensor.shape or all(
        stride == prod(size for size, _ in steps[axis + 1 :]) for axis, (_, stride) in enumerate(steps)
    ):
        return replace(tensor, strides=None)
    by_row, by_column = strides if len(tensor.shape) == 2 else (0, 0)
    wide, turned = by_column == 1 and by_row >= tensor.shape[-1], by_row == 1 and by_column >= tensor.shape[0]
    if not wide and not turned:
        found = f"{cut(tensor.name)} of shape {short(list(tensor.shape))} is stored with strides {short(list(strides))}"
        raise UnsupportedError(
            f"{tensor.path}: {found}.",
            hint="Supported: whole tensors, matrices turned over or cut from wider rows. Save .contiguous() tensors.",
        )
    return replace(tensor, strides=(by_row, by_column))


def join(name: str, parts: Sequence[CheckpointTensor]) -> JoinedTensor:
    """Tensors one below the other. CheckpointError when their types or the sizes of their rows differ."""
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:] or not part.shape or not first.shape:
            one, other = (
                f"{cut(tensor.name)} is {tensor.dtype} {short(list(tensor.shape))}" for tensor in (first, part)
            )
            raise CheckpointError(f"{first.path}: {one} and {other}; expected one type and rows of one size.")
    return JoinedTensor(name, first.dtype, (sum(part.shape[0] for part in parts), *first.shape[1:]), tuple(parts))
