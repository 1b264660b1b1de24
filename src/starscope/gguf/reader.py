"""Reading a GGUF file: mapped, and trusted in nothing.

Every length and count is compared with the bytes that are left before anything is allocated or skipped, so that a file
of n bytes costs at most a small multiple of n, whatever it claims. What is wrong is a GGUFError that says where (the
byte), what, and what was expected. Weights stay in the file until `raw` or `array` is asked for them; the parts of a
split model are opened as one file.

    with read_gguf("model.gguf") as file:
        file.get("general.name"), file.tensors["output_norm.weight"].shape, file.array("output_norm.weight")
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
import stat
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from starscope.errors import DoesNotFitError, GGUFError, InputError, UnsupportedError
from starscope.formats import KNOWN_TYPES, Bytes, Floats, Format, decode, format_by_id
from starscope.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    MAX_ARRAY_ELEMENTS,
    MAX_DIMENSIONS,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    MIN_ENTRY_BYTES,
    MIN_TENSOR_ENTRY_BYTES,
    READABLE_VERSIONS,
    SCALARS,
    Value,
    ValueType,
    alignment_problem,
    key_problem,
    name_problem,
    padding,
    shape_problem,
    string_problem,
)

MAX_PARTS = 1000
_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_LENGTH = struct.Struct("<Q")
_OLD_MAGICS = (b"lmgg", b"tjgg", b"fmgg", b"algg")  # the formats of ggml before GGUF, as they stand in a file


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and how it is stored. `format` is None for a type that starscope cannot decode."""

    name: str
    shape: tuple[int, ...]  # torch order: [out in]
    type_id: int
    format: Format | None
    offset: int  # bytes from the start of its part
    nbytes: int
    part: int

    @property
    def type_name(self) -> str:
        """The name of the stored type, decodable or not."""
        return KNOWN_TYPES[self.type_id].name

    @property
    def rows(self) -> int:
        """How many rows `raw` has: all dimensions but the last, multiplied; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """The bytes of one of them."""
        return self.nbytes // self.rows


class GGUFFile:
    """An open file: its metadata as `Value`s, its tensors by name, their bytes on request."""

    def __init__(self, parts: list[_Part]) -> None:
        first = parts[0]
        self.path: Path = first.path
        self.paths: tuple[Path, ...] = tuple(part.path for part in parts)
        self.version: int = first.version
        self.alignment: int = first.alignment
        self.metadata: dict[str, Value] = first.metadata
        self.tensors: dict[str, TensorInfo] = {name: info for part in parts for name, info in part.tensors.items()}
        self.unused_bytes: int = sum(part.unused_bytes for part in parts)
        """Bytes in the data sections that belong to no tensor and are not padding."""
        self._parts: list[_Part] | None = parts

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata under `key` as Python or NumPy data."""
        value = self.metadata.get(key)
        return default if value is None else value.data

    def raw(self, name: str) -> Bytes:
        """A tensor's bytes as stored, uint8 [rows row_bytes]: mapped and read-only."""
        return self.raw_rows(name, 0, self.info(name).rows)

    def raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        """The bytes of rows start to stop (exclusive), uint8 [stop-start row_bytes]: mapped and read-only."""
        info = self.info(name)
        if not 0 <= start <= stop <= info.rows:
            raise GGUFError(f"{name} in {self.path} has {info.rows} rows; rows {start} to {stop} were asked for.")
        if self._parts is None:
            raise InputError(f"{self.path} is closed; {name} can no longer be read from it.")
        row_bytes = info.row_bytes
        data = self._parts[info.part].data()[info.offset + start * row_bytes : info.offset + stop * row_bytes]
        return data.reshape(stop - start, row_bytes)

    def read_rows_into(self, name: str, start: int, stop: int, into: Bytes) -> Bytes:
        """The bytes of rows start to stop, read into `into` (flat, long enough), which is given back [rows row_bytes].

        Not through the mapping: a file that has become shorter is an InputError here, and memory that only passes
        through is not counted twice.
        """
        info = self.info(name)
        if not 0 <= start <= stop <= info.rows or self._parts is None:
            self.raw_rows(name, start, stop)  # says what is wrong
        assert self._parts is not None
        row_bytes = info.row_bytes
        into = into[: (stop - start) * row_bytes]
        self._parts[info.part].read_into(info.offset + start * row_bytes, into)
        return into.reshape(stop - start, row_bytes)

    def read_each_row(self, name: str, rows: Sequence[int], into: Bytes) -> Bytes:
        """The bytes of rows in any order, each read by itself into `into` (as above): uint8 [len(rows) row_bytes]."""
        info, size = self.info(name), self.info(name).row_bytes
        if self._parts is None or (len(rows) and not 0 <= min(rows) <= max(rows) < info.rows):
            self.raw_rows(name, min(rows, default=0), max(rows, default=0) + 1)  # says what is wrong
        assert self._parts is not None
        part = self._parts[info.part]
        into = into[: len(rows) * size].reshape(len(rows), size)
        for row, place in zip(rows, into, strict=True):
            part.read_into(info.offset + row * size, place)
        return into

    def read(self, name: str) -> Bytes:
        """A tensor's bytes as stored, in memory of their own: uint8 [rows row_bytes]. Errors as above."""
        info = self.info(name)
        return self.read_rows_into(name, 0, info.rows, np.empty(info.nbytes, np.uint8))

    def array(self, name: str) -> Floats:
        """A tensor's values as float32 in torch order. F32 is mapped and read-only, every other format a new array."""
        info = self.info(name)
        if info.format is None:
            raise UnsupportedError(
                f"{name} is stored as {info.type_name}, which starscope cannot decode ({self.path})."
            )
        return decode(info.format, self.raw(name)).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        """The entry of one tensor; GGUFError when the file has none of that name."""
        if name not in self.tensors:
            raise GGUFError(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)} others.")
        return self.tensors[name]

    def close(self) -> None:
        """Lets go of the file. Arrays that came from `raw` stay valid: the mapping lives as long as they do."""
        parts, self._parts = self._parts, None
        for part in parts or ():
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {str(self.path)!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file (version 2 or 3), with all parts of a split model when it is the first of them.

    Raises GGUFError for a file that contradicts itself or the format, InputError for one that cannot be read, and
    UnsupportedError for big-endian files and for other versions.
    """
    first = _Part(Path(path), 0)
    count = first.split_number("split.count", 0)
    if count <= 1:
        return GGUFFile([first])
    return GGUFFile([first, *_other_parts(first, count)])


def _other_parts(first: _Part, count: int) -> list[_Part]:
    """Parts 2 to `count`, found by the first one's own name, in its own folder."""
    if count > MAX_PARTS:
        raise GGUFError(f"{first.path} says that it is one of {count} parts; at most {MAX_PARTS} are allowed.")
    number = first.split_number("split.no", -1)
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        expected_end = f"-{number + 1:05}-of-{count:05}.gguf"
        raise GGUFError(f"{first.path} is part {number + 1} of {count}, so its name should end in {expected_end}.")
    names = [f"{match[1]}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    if number != 0:
        raise GGUFError(f"{first.path} is part {number + 1} of {count}.", hint=f"Open the first part, {names[0]}.")
    folder, parts = os.path.dirname(os.path.realpath(first.path)), []
    seen = set(first.tensors)
    for i, name in enumerate(names[1:], start=1):
        path = first.path.with_name(name)
        if os.path.dirname(os.path.realpath(path)) != folder:  # a cache may link all parts to one folder elsewhere
            raise GGUFError(f"{path} leads out of the folder of {first.path.name}, to {os.path.realpath(path)}.")
        part = _Part(path, i)
        if (part.split_number("split.no", -1), part.split_number("split.count", -1)) != (i, count):
            raise GGUFError(f"{path} does not say that it is part {i + 1} of {count}.")
        for key, value in part.metadata.items():
            if key not in ("split.no", ALIGNMENT_KEY) and first.metadata.get(key) != value:
                raise GGUFError(f"{path} and {first.path.name} disagree about {key}.")
        if double := seen.intersection(part.tensors):
            raise GGUFError(f"{path} repeats the tensor {min(double)} of an earlier part.")
        seen.update(part.tensors)
        parts.append(part)
    expected = first.split_number("split.tensors.count", len(seen))
    if expected != len(seen):
        raise GGUFError(f"{first.path}: its parts hold {len(seen)} tensors; split.tensors.count says {expected}.")
    return parts


class _Part:
    """One file: mapped, and read up to its data section while it is made."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self._number = number
        self._map, descriptor = _map_file(path)
        self._descriptor, self._release = descriptor, weakref.finalize(self, os.close, descriptor)
        self._size = len(self._map)
        self._at = 0
        self._elements = 0
        self.version = self._read_version()
        tensor_count = self._read_count("tensors", MAX_TENSORS, MIN_TENSOR_ENTRY_BYTES)
        key_count = self._read_count("metadata keys", MAX_KEYS, MIN_ENTRY_BYTES)
        self.metadata = self._read_metadata(key_count)
        self.alignment = self._read_alignment()
        entries = self._read_directory(tensor_count)
        self.tensors, self.unused_bytes = self._place(entries)

    def close(self) -> None:
        self._release()
        with contextlib.suppress(BufferError):  # an array still looks at the mapping, which goes with it
            self._map.close()

    def read_into(self, offset: int, into: Bytes) -> None:
        """Fill `into` with the file's bytes from `offset` on."""
        at, left = offset, memoryview(into.data).cast("B")
        while left:
            try:
                count = os.preadv(self._descriptor, [left], at)
            except OSError as error:
                raise InputError(f"{self.path} cannot be read: {error.strerror}.") from error
            if count == 0:
                raise GGUFError(f"{self.path} had {self._size} bytes when it was opened and ends at byte {at} now.")
            at, left = at + count, left[count:]

    def data(self) -> Bytes:
        """The whole file, mapped; refused when it has become shorter, as touching it would then end the process."""
        size = self._map.size()
        if size < self._size:
            raise GGUFError(f"{self.path} had {self._size} bytes when it was opened and has {size} now.")
        return np.frombuffer(self._map, np.uint8)

    def split_number(self, key: str, default: int) -> int:
        """One of the integers that describe a split model."""
        if key not in self.metadata:
            return default
        number = self.metadata[key].data
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise GGUFError(f"{self.path}: {key} is {self.metadata[key]!r}; expected a count.")
        return number

    # The cursor

    def _fail(self, problem: str, at: int | None = None) -> GGUFError:
        return GGUFError(f"{self.path}: {problem} (byte {self._at if at is None else at}).")

    def _take(self, count: int, what: str) -> int:
        """Passes over `count` bytes and returns where they start."""
        if count > self._size - self._at:
            raise self._fail(f"the file ends inside {what}: {count} bytes expected, {self._size - self._at} left")
        start = self._at
        self._at += count
        return start

    def _u32(self, what: str) -> int:
        start = self._take(4, what)
        return int.from_bytes(self._map[start : self._at], "little")

    def _u64(self, what: str) -> int:
        start = self._take(8, what)
        return int.from_bytes(self._map[start : self._at], "little")

    def _bytes(self, count: int, what: str) -> bytes:
        start = self._take(count, what)
        return self._map[start : self._at]

    # Header

    def _read_version(self) -> int:
        magic = self._bytes(len(MAGIC), "the magic")
        if magic != MAGIC:
            hint = "It is an older ggml format; convert the original model again." if magic in _OLD_MAGICS else ""
            raise GGUFError(
                f"{self.path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r} (byte 0).", hint=hint
            )
        version = self._u32("the version")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version & 0xFFFF == 0 and 1 <= swapped <= 0xFFFF:
            raise UnsupportedError(f"{self.path} is big-endian (byte 4); starscope reads little-endian GGUF files.")
        if version == 0:
            raise self._fail("GGUF version 0, which does not exist", 4)
        if version not in READABLE_VERSIONS:
            hint = "Convert the original model again." if version == 1 else "A newer starscope may read it."
            raise UnsupportedError(
                f"{self.path} is GGUF version {version} (byte 4); starscope reads 2 and 3.", hint=hint
            )
        return version

    def _read_count(self, what: str, most: int, entry_bytes: int) -> int:
        at = self._at
        count = self._u64(f"the number of {what}")
        if count > most:
            raise self._fail(f"{count} {what} are announced; at most {most} are allowed", at)
        if count * entry_bytes > self._size - self._at:
            needed, left = count * entry_bytes, self._size - self._at
            raise self._fail(f"{count} {what} are announced, which need {needed} bytes; {left} are left", at)
        return count

    # Metadata

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for number in range(count):
            at = self._at
            length = self._u64(f"the length of metadata key {number + 1}")
            if length > MAX_KEY_BYTES:
                raise self._fail(f"a key of {length} bytes; expected 1 to {MAX_KEY_BYTES}", at)
            raw = self._bytes(length, f"metadata key {number + 1}")
            if problem := key_problem(raw):
                raise self._fail(problem, at)
            key = raw.decode("ascii")
            if key in metadata:
                raise self._fail(f"the key {key} appears twice", at)
            metadata[key] = self._read_value(key)
        return metadata

    def _read_type(self, what: str) -> ValueType:
        at, number = self._at, self._u32(what)
        try:
            return ValueType(number)
        except ValueError:
            raise self._fail(f"{what} is {number}; expected 0 to {max(ValueType)}", at) from None

    def _read_value(self, key: str) -> Value:
        kind = self._read_type(f"the value type of {key}")
        if kind is ValueType.ARRAY:
            return self._read_array(key)
        if kind is ValueType.STRING:
            return self._read_string(key)
        at = self._at
        payload = self._bytes(SCALARS[kind].itemsize, f"the value of {key}")
        if kind is ValueType.BOOL and payload not in (b"\0", b"\1"):
            raise self._fail(f"{key} is a truth value of {payload[0]}; expected 0 or 1", at)
        return Value(kind, None, 1, payload)

    def _read_string(self, key: str) -> Value:
        at = self._at
        length = self._u64(f"the length of {key}")
        if problem := string_problem(key, length):
            raise self._fail(problem, at)
        payload = self._bytes(length, f"the text of {key}")
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"the text of {key} is not UTF-8: {error.reason}", at + 8 + error.start) from None
        return Value(ValueType.STRING, None, 1, payload)

    def _read_array(self, key: str) -> Value:
        at = self._at
        element = self._read_type(f"the element type of {key}")
        if element is ValueType.ARRAY:
            raise self._fail(f"{key} is an array of arrays, which starscope does not read", at)
        count = self._u64(f"the length of {key}")
        least = count * (_LENGTH.size if element is ValueType.STRING else SCALARS[element].itemsize)
        if least > self._size - self._at:
            left = self._size - self._at
            raise self._fail(f"{key} has {count} elements, which need {least} bytes; {left} are left", at)
        self._elements += count
        if self._elements > MAX_ARRAY_ELEMENTS:
            raise self._fail(
                f"{key} brings the array elements to {self._elements}; {MAX_ARRAY_ELEMENTS} are allowed", at
            )
        start = self._at
        if element is ValueType.STRING:
            self._pass_strings(key, count)
        else:
            self._take(least, key)
        payload = self._map[start : self._at]
        if element is ValueType.BOOL and payload.strip(b"\0\1"):
            raise self._fail(f"{key} holds a truth value that is neither 0 nor 1", start)
        return Value(ValueType.ARRAY, element, count, payload)

    def _pass_strings(self, key: str, count: int) -> None:
        """Goes from length to length over `count` texts: nearly all of the time that reading a vocabulary takes."""
        at, last, buffer, length_at = self._at, self._size - _LENGTH.size, self._map, _LENGTH.unpack_from
        for _ in range(count):
            if at > last:
                at = self._size + 1
                break
            at += length_at(buffer, at)[0] + 8
        if at > self._size:
            raise self._fail(f"the file ends inside {key}, which has {count} elements", self._size)
        self._at = at

    def _read_alignment(self) -> int:
        value = self.metadata.get(ALIGNMENT_KEY)
        if value is None:
            return DEFAULT_ALIGNMENT
        if problem := alignment_problem(value):
            raise self._fail(problem)
        return int.from_bytes(value.payload, "little")

    # The directory of tensors

    def _read_directory(self, count: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for number in range(count):
            at = self._at
            info = self._read_entry(f"entry {number + 1} of the tensors", at)
            if info.name in tensors:
                raise self._fail(f"the tensor {info.name} appears twice", at)
            tensors[info.name] = info
        return tensors

    def _read_entry(self, what: str, at: int) -> TensorInfo:
        length = self._u64(what)
        if length > MAX_TENSOR_NAME_BYTES:
            raise self._fail(f"a tensor name of {length} bytes; expected 1 to {MAX_TENSOR_NAME_BYTES}", at)
        raw = self._bytes(length, what)
        if problem := name_problem(raw):
            raise self._fail(problem, at)
        name = raw.decode()
        num_dims = self._u32(what)
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self._fail(f"{name} has {num_dims} dimensions; expected 1 to {MAX_DIMENSIONS}", at)
        shape = tuple(self._u64(what) for _ in range(num_dims))[::-1]
        type_id, offset = self._u32(what), self._u64(what)
        if problem := shape_problem(shape, type_id):
            raise self._fail(f"{name} has {problem}", at)
        if offset % self.alignment:
            raise self._fail(
                f"{name} is at offset {offset}; expected a multiple of {self.alignment}, the alignment", at
            )
        kind = KNOWN_TYPES[type_id]
        nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
        return TensorInfo(name, shape, type_id, format_by_id(type_id), offset, nbytes, self._number)

    def _place(self, entries: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], int]:
        """The entries, none over another, with offsets from the start of the file; and the bytes that nobody uses."""
        start = self._at + padding(self._at, self.alignment)
        end, unused, previous = start, 0, ""
        for info in sorted(entries.values(), key=lambda info: info.offset):
            offset = start + info.offset
            if offset < end:
                raise self._fail(f"the tensors {previous} and {info.name} overlap", offset)
            if offset + info.nbytes > self._size:
                stop = offset + info.nbytes
                problem = f"{info.name} needs {info.nbytes} bytes, up to byte {stop}, and the file has {self._size}"
                raise self._fail(f"{problem}: {stop - self._size} are missing", offset)
            unused += offset - end - padding(end, self.alignment)
            end, previous = offset + info.nbytes, info.name
        unused += max(0, self._size - end - padding(end, self.alignment))
        return {name: replace(info, offset=start + info.offset) for name, info in entries.items()}, unused


def _map_file(path: Path) -> tuple[mmap.mmap, int]:
    """The file, mapped read-only, and its descriptor.

    InputError when it cannot be read or is no regular file; GGUFError when it is too short.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)  # O_NONBLOCK: a pipe without a writer would wait for ever
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be opened: {reason}.") from error
    try:
        return _map_descriptor(path, descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _map_descriptor(path: Path, descriptor: int) -> mmap.mmap:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise InputError(f"{path} is {kind}; expected a GGUF file.")
    if status.st_size < HEADER_BYTES:
        size = status.st_size
        raise GGUFError(f"{path} ends after {size} bytes; a GGUF file has at least {HEADER_BYTES} (byte {size}).")
    try:
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise DoesNotFitError(
                f"{path} ({status.st_size} bytes) does not fit into the memory that this process may address."
            ) from error
        raise InputError(f"{path} cannot be mapped: {error}.") from error
