"""Some of a model's weights, as an engine takes them: it never learns that there are others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from starscope.engine.base import Array
from starscope.engine.weights import Weights
from starscope.family import Slot
from starscope.formats import Bytes


class PartWeights(Weights):
    """The tensors with these names. One that is tied to a tensor of another part is a tensor of its own here."""

    def __init__(self, whole: Weights, names: Collection[str]) -> None:
        slots = [whole.slots[name] for name in whole.slots if name in names]
        alone = [slot if slot.tied_to in names else replace(slot, tied_to=None) for slot in slots]
        super().__init__(alone, _PartSource(whole))
        self.half_cache = whole.half_cache
        self._whole = whole

    def __getitem__(self, name: str) -> Array:
        return self._whole[name]

    def rows(self, name: str, indices: Array) -> Array:
        return self._whole.rows(name, indices)

    def forget(self, name: str) -> None:
        slot = self._whole.slots[name]
        self._whole.forget(slot.tied_to if slot.tied_to and self._whole.is_tied(name) else name)


class _PartSource:
    """Reads from the whole. Implements `Source`."""

    def __init__(self, whole: Weights) -> None:
        self._whole = whole

    def has(self, slot: Slot) -> bool:
        return not (slot.tied_to and self._whole.is_tied(slot.name))

    def format_name(self, slot: Slot) -> str:
        return self._whole.format_name(slot.name)

    def read(self, slot: Slot) -> Array:
        return self._whole[slot.name]

    def read_rows(self, slot: Slot, rows: Array) -> Array:
        return self._whole.rows(slot.name, rows)

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        return self._whole.read_stored(slot.name, start, stop, into)
