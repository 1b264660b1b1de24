"""The weights of one model as float32 arrays by their standard names, decoded when first used.

They come from a GGUF file (read, not mapped: one that becomes shorter meanwhile is an error then, and not the process's
end) or from arrays. A tensor that is absent and tied is the very array that it is tied to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from starscope.engine.base import Array
from starscope.errors import GGUFError, UnsupportedError
from starscope.family import Family, HParams, Slot
from starscope.formats import Bytes, decode
from starscope.gguf.reader import GGUFFile

ROWS_AHEAD = 32  # of a table, read and decoded at once


class Source(Protocol):
    """Where tensors are read from, by slot."""

    def has(self, slot: Slot) -> bool: ...

    def format_name(self, slot: Slot) -> str: ...

    def read(self, slot: Slot) -> Array: ...

    def read_rows(self, slot: Slot, rows: Array) -> Array: ...

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes: ...


class Weights(Mapping[str, Array]):
    """Name -> float32 array in torch order. `half_cache`: keys and values are to be kept as float16."""

    def __init__(self, slots: list[Slot], source: Source) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.source = source
        self._decoded: dict[str, Array] = {}
        self.half_cache = any(self.format_name(name) != "F32" for name in self.slots)

    def __getitem__(self, name: str) -> Array:
        if name not in self._decoded:
            slot = self.slots[name]
            if slot.tied_to and not self.source.has(slot):
                return self[slot.tied_to]
            self._decoded[name] = self.source.read(slot)
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def rows(self, name: str, indices: Array) -> Array:
        """Some rows of a table, `[len(indices) columns]`, without decoding all of it."""
        if name in self._decoded:
            return self._decoded[name][indices]
        return self.source.read_rows(self.slots[name], indices)

    def read_stored(self, name: str, start: int, stop: int, into: Bytes) -> Bytes:
        """Rows start to stop of a matrix as its source stores them: uint8 [rows row_bytes], in `into` where possible.

        `into` is flat and has room for them. May be called by several threads at once. InputError when the file
        has become shorter than it was.
        """
        slot = self.slots[name]
        if slot.tied_to and not self.source.has(slot):
            slot = self.slots[slot.tied_to]
        return self.source.read_stored(slot, start, stop, into)

    def forget(self, name: str) -> None:
        """Let go of a decoded tensor, for whoever has made its own copy of it."""
        self._decoded.pop(name, None)

    def is_tied(self, name: str) -> bool:
        """Whether a tensor is absent and another stands for it."""
        return bool(self.slots[name].tied_to) and not self.source.has(self.slots[name])

    def format_name(self, name: str) -> str:
        """How a tensor is stored: "F32", "Q8_0", ..."""
        slot = self.slots[name]
        if slot.tied_to and not self.source.has(slot):
            slot = self.slots[slot.tied_to]
        return self.source.format_name(slot)


class ArraySource:
    """Tensors that are in memory already, by our names; all float32."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def has(self, slot: Slot) -> bool:
        return slot.name in self._arrays

    def format_name(self, slot: Slot) -> str:
        return "F32"

    def read(self, slot: Slot) -> Array:
        return self._arrays[slot.name]

    def read_rows(self, slot: Slot, rows: Array) -> Array:
        return self._arrays[slot.name][rows]

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        return np.ascontiguousarray(self._arrays[slot.name][start:stop]).view(np.uint8)


class GGUFSource:
    """Tensors of an open GGUF file. `keep` gives, for a tensor whose rows are repeated or in another order, ours."""

    def __init__(self, file: GGUFFile, keep: Mapping[str, Array]) -> None:
        self._file, self._keep = file, keep
        self._ahead: dict[str, tuple[int, Array]] = {}  # of each table: a row that was read alone, and what follows it

    def has(self, slot: Slot) -> bool:
        return slot.gguf in self._file.tensors

    def format_name(self, slot: Slot) -> str:
        info = self._file.tensors[slot.gguf]
        return info.format.name if info.format else f"type {info.type_id}"

    def read(self, slot: Slot) -> Array:
        info, keep = self._file.info(slot.gguf), self._keep.get(slot.gguf)
        assert info.format is not None
        whole = decode(info.format, self._file.read(slot.gguf)).reshape(info.shape)
        return whole if keep is None else np.ascontiguousarray(whole[keep])

    def read_rows(self, slot: Slot, rows: Array) -> Array:
        if len(rows) == 1:
            return self._read_row(slot, int(rows[0]))
        return self._decode_rows(slot, rows.tolist())

    def _read_row(self, slot: Slot, row: int) -> Array:
        """One row `[1 columns]`. In a table read row after row, as positions are, the next ones are read along."""
        first, decoded = self._ahead.get(slot.name, (row, None))
        if decoded is None or not first <= row < first + len(decoded):
            follows = decoded is not None and row == first + len(decoded)
            stop = min(row + ROWS_AHEAD, slot.shape[0]) if follows else row + 1
            first, decoded = row, self._decode_rows(slot, range(row, stop))
            self._ahead[slot.name] = first, decoded
        return decoded[row - first : row - first + 1].copy()

    def _decode_rows(self, slot: Slot, rows: Sequence[int]) -> Array:
        info, keep = self._file.tensors[slot.gguf], self._keep.get(slot.gguf)
        assert info.format is not None
        rows = rows if keep is None else keep[list(rows)].tolist()
        room = np.empty(len(rows) * info.row_bytes, np.uint8)
        return decode(info.format, self._file.read_each_row(slot.gguf, rows, room))

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        keep = self._keep.get(slot.gguf)
        if keep is None:
            return self._file.read_rows_into(slot.gguf, start, stop, into)
        rows = keep[start:stop]
        first, end = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        if end - first <= 2 * len(rows):  # close together: a call for each row would take longer than reading them all
            size = self._file.tensors[slot.gguf].row_bytes
            whole = self._file.read_rows_into(slot.gguf, first, end, np.empty((end - first) * size, np.uint8))
            return np.take(whole, rows - first, axis=0, out=into[: len(rows) * size].reshape(len(rows), size))
        return self._file.read_each_row(slot.gguf, rows.tolist(), into)


def open_weights(file: GGUFFile, family: Family, hp: HParams) -> tuple[HParams, Weights]:
    """The weights of a GGUF file, every tensor checked for presence, shape and a format that can be decoded.

    Identical copies of the key and value head, where the family knows that form, are folded back into one; the
    returned hyperparameters say so.
    """
    stored = family.slots(hp)
    _check_tensors(file, family, hp, {slot.gguf: slot.shape for slot in stored})
    keep: Mapping[str, Array] = {slot.gguf: slot.gguf_rows for slot in stored if slot.gguf_rows is not None}
    if family.fold:
        hp, folded = family.fold(hp, file)
        keep = {**keep, **folded}
    weights = Weights(family.slots(hp), GGUFSource(file, keep))
    for slot in weights.slots.values():
        if slot.positive:
            _check_positive(file, slot, weights.source.read(slot))
    return hp, weights


def _check_positive(file: GGUFFile, slot: Slot, values: Array) -> None:
    wrong = values[~(values >= np.finfo(np.float32).tiny)]  # NaN, and what has no finite reciprocal
    if wrong.size:
        raise GGUFError(f"{file.path}: {slot.gguf} holds {wrong[0]:g}; expected numbers above 0.")


def _check_tensors(file: GGUFFile, family: Family, hp: HParams, shapes: Mapping[str, tuple[int, ...]]) -> None:
    slots = family.slots(hp)
    if not file.tensors:
        raise GGUFError(f"{file.path} has a vocabulary and no tensors; expected a whole model.")
    for slot in slots:
        info = file.tensors.get(slot.gguf)
        if info is None:
            if slot.tied_to:
                continue
            raise GGUFError(f"{file.path} has no tensor {slot.gguf}; {family.name} needs it.")
        if info.shape != shapes[slot.gguf]:
            found, expected = (" ".join(map(str, shape)) for shape in (info.shape, shapes[slot.gguf]))
            raise GGUFError(f"{file.path}: {slot.gguf} is [{found}]; expected [{expected}] from the file's own sizes.")
        if info.format is None or info.format.decode is None:
            raise UnsupportedError(
                f"{file.path}: {slot.gguf} is stored as {info.type_name}, which cannot be decoded.",
                hint="Convert the model again to another type.",
            )
    extra = [name for name in file.tensors if name not in shapes]
    if extra:
        raise GGUFError(f"{file.path} has tensors that {family.name} does not know: {', '.join(extra[:5])}.")
