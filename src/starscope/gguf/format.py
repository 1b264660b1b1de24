"""The GGUF container: constants, metadata values, and the rules that a file has to keep, for reader and writer alike.

All numbers are little-endian. A file is a header (magic, version, counts), the metadata (key, type, value), the
directory of tensors (name, dimensions with the fastest first, type, offset), and, from the next multiple of the
alignment on, the tensors' bytes.

A `Value` keeps the bytes that the file has and decodes them when asked, so that a vocabulary nobody looks at costs
nothing and is copied from file to file unchanged:

    {"general.name": string("tiny"), "tiny.block_count": u32(20), "tokenizer.ggml.tokens": strings(pieces)}
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starscope.errors import GGUFError
from starscope.formats import KNOWN_TYPES

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
HEADER_BYTES = 24
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32  # bytes
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20  # bytes
BLOCKS_KEY = "general.quantization_version"
BLOCKS_VERSION = 2  # of ggml's layouts of quant blocks; files of others would be read as nonsense

MAX_TENSORS = 65_536
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_TENSOR_VALUES = (1 << 63) - 1
MAX_STRING_BYTES = 64 << 20
MAX_STRING_BYTES_OF = MappingProxyType({"tokenizer.chat_template": 1 << 20})
MAX_ARRAY_ELEMENTS = 1 << 24
"""In all arrays of a file together: a hundred times what the largest vocabularies have."""

MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
"""The shortest metadata entry: length, one byte of key, type, one byte of value."""
MIN_TENSOR_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8
"""The shortest directory entry: length, one byte of name, one dimension, type, offset."""

_KEY = re.compile(rb"[a-z0-9_.-]+")
_NAME_REFUSED = re.compile(r"[\x00-\x1f\x7f/\\]")


class ValueType(IntEnum):
    """The type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: Mapping[ValueType, np.dtype[Any]] = MappingProxyType(
    {
        ValueType.UINT8: np.dtype("<B"),
        ValueType.INT8: np.dtype("<b"),
        ValueType.UINT16: np.dtype("<H"),
        ValueType.INT16: np.dtype("<h"),
        ValueType.UINT32: np.dtype("<I"),
        ValueType.INT32: np.dtype("<i"),
        ValueType.FLOAT32: np.dtype("<f"),
        ValueType.BOOL: np.dtype("?"),
        ValueType.UINT64: np.dtype("<Q"),
        ValueType.INT64: np.dtype("<q"),
        ValueType.FLOAT64: np.dtype("<d"),
    }
)
"""Every type of fixed size, as NumPy stores it."""

_STRUCT_CODES = dict(zip(SCALARS, "BbHhIif?Qqd", strict=True))

Data = int | float | bool | str | NDArray[Any] | list[str]


@dataclass(frozen=True, eq=False)
class Value:
    """A metadata value: its type, and in `payload` the bytes of the number, the text or the elements as in the file."""

    type: ValueType
    element_type: ValueType | None
    count: int
    payload: bytes

    @cached_property
    def data(self) -> Data:
        """The value as Python or NumPy data. Elements that are not UTF-8 keep their bytes as surrogate escapes."""
        if self.type is ValueType.STRING:
            return self.payload.decode()
        if self.element_type is ValueType.STRING:
            return self._strings()
        if self.element_type is not None:
            return np.frombuffer(self.payload, SCALARS[self.element_type])
        return np.frombuffer(self.payload, SCALARS[self.type]).tolist()[0]  # type: ignore[no-any-return]

    def _strings(self) -> list[str]:
        payload, length_at = self.payload, struct.Struct("<Q").unpack_from
        found, at = [], 0
        for _ in range(self.count):
            start = at + 8
            at = start + length_at(payload, at)[0]
            found.append(payload[start:at].decode("utf-8", "surrogateescape"))
        return found

    def encoded(self) -> bytes:
        """Type and value as they stand in a file."""
        if self.type is ValueType.STRING:
            return struct.pack("<IQ", self.type, len(self.payload)) + self.payload
        if self.element_type is not None:
            return struct.pack("<IIQ", self.type, self.element_type, self.count) + self.payload
        return struct.pack("<I", self.type) + self.payload

    def __eq__(self, other: object) -> bool:
        """The same type and the same bytes: NaN equals itself, and 1 is not 1.0."""
        return isinstance(other, Value) and self.encoded() == other.encoded()

    def __hash__(self) -> int:
        return hash((self.type, self.payload))

    def __repr__(self) -> str:
        if self.element_type is not None:
            return f"<{self.count} × {self.element_type.name}>"
        return f"<{self.type.name} {self.data!r}>"


def scalar(kind: ValueType, x: float) -> Value:
    """One number of any scalar type; GGUFError when it does not fit."""
    return Value(kind, None, 1, _pack(kind, [x]))


def u32(x: int) -> Value:
    """An unsigned 32-bit integer: what most counts and token ids are."""
    return scalar(ValueType.UINT32, x)


def u64(x: int) -> Value:
    """An unsigned 64-bit integer."""
    return scalar(ValueType.UINT64, x)


def i32(x: int) -> Value:
    """A signed 32-bit integer."""
    return scalar(ValueType.INT32, x)


def f32(x: float) -> Value:
    """A 32-bit float."""
    return scalar(ValueType.FLOAT32, x)


def boolean(x: bool) -> Value:
    """True or false."""
    return scalar(ValueType.BOOL, x)


def string(x: str) -> Value:
    """A text; GGUFError when it holds what UTF-8 cannot say (lone surrogates)."""
    try:
        payload = x.encode()
    except UnicodeEncodeError as error:
        raise GGUFError(f"{x[:40]!r} cannot be written as UTF-8: {error.reason}.") from error
    return Value(ValueType.STRING, None, 1, payload)


def strings(items: Iterable[str]) -> Value:
    """An array of texts. Surrogate escapes become the bytes that they stand for."""
    encoded = [item.encode("utf-8", "surrogateescape") for item in items]
    payload = b"".join(part for item in encoded for part in (len(item).to_bytes(8, "little"), item))
    return Value(ValueType.ARRAY, ValueType.STRING, len(encoded), payload)


def array(kind: ValueType, values: Sequence[float] | NDArray[Any]) -> Value:
    """An array of one scalar type; GGUFError when a value does not fit."""
    return Value(ValueType.ARRAY, kind, len(values), _pack(kind, values))


def _pack(kind: ValueType, values: Sequence[float] | NDArray[Any]) -> bytes:
    if kind not in SCALARS:
        raise GGUFError(f"{kind.name} is not a type of numbers.")
    if isinstance(values, np.ndarray):
        if values.dtype == SCALARS[kind]:
            return values.tobytes()
        values = values.ravel().tolist()
    try:
        return struct.pack(f"<{len(values)}{_STRUCT_CODES[kind]}", *values)
    except (struct.error, OverflowError) as error:
        raise GGUFError(f"{str(values)[:60]} cannot be stored as {kind.name}: {error}.") from error


# The rules, as the text of what is wrong, or None


def key_problem(key: bytes) -> str | None:
    """What is wrong with a metadata key."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        return f"a key of {len(key)} bytes; expected 1 to {MAX_KEY_BYTES}"
    if not _KEY.fullmatch(key):
        return f"the key {key[:80]!r}; expected only a-z, 0-9, '_', '.' and '-'"
    return None


def string_problem(key: str, size: int) -> str | None:
    """What is wrong with a text of `size` bytes under this key."""
    limit = MAX_STRING_BYTES_OF.get(key, MAX_STRING_BYTES)
    return f"{key} is a text of {size} bytes; at most {limit} are allowed" if size > limit else None


def alignment_problem(value: Value) -> str | None:
    """What is wrong with a value of general.alignment."""
    if value.type is not ValueType.UINT32:
        return f"{ALIGNMENT_KEY} is {value.type.name}; expected UINT32"
    alignment = value.data
    if isinstance(alignment, int) and MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1:
        return None
    return f"{ALIGNMENT_KEY} is {alignment}; expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"


def blocks_problem(value: Value | None) -> str | None:
    """What is wrong with the version of a file's quant blocks; nothing where it has none, as files may."""
    if value is None or value.data == BLOCKS_VERSION:
        return None
    return f"{BLOCKS_KEY} is {value!r}; starscope reads quant blocks of version {BLOCKS_VERSION}"


def name_problem(name: bytes) -> str | None:
    """What is wrong with a tensor's name."""
    if not 1 <= len(name) <= MAX_TENSOR_NAME_BYTES:
        return f"a tensor name of {len(name)} bytes; expected 1 to {MAX_TENSOR_NAME_BYTES}"
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return f"the tensor name {name!r}, which is not UTF-8"
    if _NAME_REFUSED.search(text):
        return f"the tensor name {text!r}; control characters and slashes are not allowed"
    return None


def shape_problem(shape: Sequence[int], type_id: int) -> str | None:
    """What is wrong with a tensor of this shape (torch order) and type."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        return f"{len(shape)} dimensions; expected 1 to {MAX_DIMENSIONS}"
    if min(shape) < 1:
        return f"the shape {list(shape)}; every dimension must be at least 1"
    if type_id not in KNOWN_TYPES:
        return f"the tensor type {type_id}, which no ggml defines"
    kind = KNOWN_TYPES[type_id]
    if math.prod(shape) > MAX_TENSOR_VALUES:
        return f"the shape {list(shape)}, which is more values than can be counted in 63 bits"
    if shape[-1] % kind.block_size:
        return f"rows of {shape[-1]} values as {kind.name}, which packs {kind.block_size} at a time"
    return None


def padding(size: int, alignment: int) -> int:
    """How many bytes lie between `size` and the next multiple of the alignment."""
    return -size % alignment
