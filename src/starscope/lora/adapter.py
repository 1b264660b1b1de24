"""One adapter, whatever file it came from: by our names of tensors, in our order of rows, all float32.

`checked` is what both readers end with: every tensor belongs to the model, every half has its other, ranks and sizes
agree, every number is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from starscope.checkpoint.content import cut
from starscope.errors import CheckpointError
from starscope.family import Family, HParams, Slot
from starscope.formats import Floats

HALVES = ("a", "b")


@dataclass(frozen=True)
class Pair:
    """What is added to one matrix: `scale · b @ a`. a `[rank in]`, b `[out rank]`."""

    a: Floats
    b: Floats
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Adapter:
    """`pairs` by the weight that they change; `whole` are tensors that take another's place: biases, saved modules."""

    path: Path
    pairs: Mapping[str, Pair]
    whole: Mapping[str, Floats] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(pair.a.size + pair.b.size for pair in self.pairs.values()) + sum(x.size for x in self.whole.values())


@dataclass(frozen=True)
class Target:
    """The model that an adapter is read for."""

    family: Family
    hp: HParams

    def slots(self) -> dict[str, Slot]:
        """Its tensors by our names."""
        return {slot.name: slot for slot in self.family.slots(self.hp)}

    def is_vocabulary(self, slot: Slot) -> bool:
        """Whether a tensor's rows are tokens: those that no token has may be there or not."""
        return "embed_tokens.weight" in (slot.name, slot.tied_to)


@dataclass(frozen=True)
class Half:
    """One stored half of a pair, and its name there."""

    name: str
    values: Floats


def checked(
    path: Path,
    target: Target,
    halves: Mapping[str, Mapping[str, Half]],
    scales: Mapping[str, float],
    whole: Mapping[str, Half],
) -> Adapter:
    """An adapter from its parts: halves (`a` and `b`) by our names, with rows in our order or too many of them.

    CheckpointError, a sentence with found and expected, for whatever does not fit.
    """
    slots, notes = target.slots(), []
    pairs: dict[str, Pair] = {}
    for name, found in halves.items():
        slot = slots[name]
        if len(found) < len(HALVES):
            [there] = found.values()
            raise CheckpointError(f"{path} has {cut(there.name)} without its other half.", hint="Is the file whole?")
        a, b = found["a"], found["b"]
        if len(slot.shape) != 2:
            raise CheckpointError(f"{path}: {cut(a.name)} is for {slot.name}, which is not a matrix.")
        for half in (a, b):
            if half.values.ndim != 2:
                raise CheckpointError(
                    f"{path}: {cut(half.name)} has shape {list(half.values.shape)}; expected a matrix."
                )
            _check_finite(path, half)
        rank = len(a.values)
        if not rank or b.values.shape[1] != rank:
            raise CheckpointError(
                f"{path}: {cut(a.name)} is {list(a.values.shape)} and {cut(b.name)} {list(b.values.shape)}; "
                "expected one rank, the rows of the first and the columns of the second."
            )
        values = b.values
        if target.is_vocabulary(slot) and len(values) < slot.shape[0]:
            notes.append(
                f"{path.name} changes {len(values)} of the {slot.shape[0]} rows of {slot.name}; the others stay."
            )
            values = np.concatenate([values, np.zeros((slot.shape[0] - len(values), rank), np.float32)])
        change = (len(values), a.values.shape[1])
        if change != slot.shape:
            raise CheckpointError(
                f"{path}: {cut(a.name)} and {cut(b.name)} change a matrix [{change[0]} {change[1]}]; "
                f"{slot.name} is [{slot.shape[0]} {slot.shape[1]}].",
                hint="It was made for another model"
                + (", or for one whose vocabulary was extended." if target.is_vocabulary(slot) else "."),
            )
        pairs[name] = Pair(np.ascontiguousarray(a.values), np.ascontiguousarray(values), scales[name])
    for name, one in whole.items():
        if one.values.shape != slots[name].shape:
            raise CheckpointError(
                f"{path}: {cut(one.name)} is {list(one.values.shape)}; {name} is {list(slots[name].shape)}.",
                hint="It was made for another model, or for one whose vocabulary was extended.",
            )
        _check_finite(path, one)
    if not pairs and not whole:
        raise CheckpointError(f"{path} has no tensor; expected pairs of lora_A and lora_B.")
    return Adapter(path, pairs, {name: one.values for name, one in whole.items()}, tuple(notes))


def _check_finite(path: Path, half: Half) -> None:
    if not np.isfinite(half.values).all():
        raise CheckpointError(f"{path}: {cut(half.name)} holds values that are not finite (NaN or infinite).")


def in_our_order(values: Floats, rows: np.ndarray | None) -> Floats:
    """Stored rows as ours: row i is `rows[i]` of the stored ones. Rows of another number are left for the check."""
    if rows is None or values.ndim == 0 or len(values) != len(rows):
        return values
    return np.ascontiguousarray(values[rows])


def in_their_order(values: Floats, rows: np.ndarray | None) -> Floats:
    """The inverse of `in_our_order`."""
    if rows is None:
        return values
    theirs = np.empty_like(values)
    theirs[rows] = values
    return theirs
