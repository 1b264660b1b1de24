"""Which stored tensor is which of the family's: names, shapes and ties of a Hugging Face folder, checked once.

Every slot of the family gets its tensor, every tensor a slot; whatever is missing, left over or of another shape is
an error that names it. Where a family lays rows out differently, rows are put into our order while they are read:

    mapped = map_checkpoint(open_checkpoint("starcoderbase-1b"))
    weight = mapped.read(mapped.family.slots(mapped.hparams)[0])        # float32 [vocab_size hidden_size]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from starscope.checkpoint import Checkpoint, CheckpointTensor, ComputedTensor
from starscope.checkpoint.content import cut, switch
from starscope.errors import CheckpointError
from starscope.family import Family, HParams, Slot, find_family_for_config, read_config
from starscope.formats import Bytes, Floats, decode

TIE_KEY = "tie_word_embeddings"
COMPARED_BYTES = 4 << 20  # read at a time when two tensors are compared


@dataclass(frozen=True)
class MappedTensor:
    """One of our tensors: row i is row `rows[i]` of the stored one (None: the same); a vector's rows are elements."""

    slot: Slot
    stored: CheckpointTensor
    rows: NDArray[np.intp] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """In torch order."""
        count = self.stored.shape[0] if self.rows is None else len(self.rows)
        return (count, *self.stored.shape[1:])

    @property
    def num_rows(self) -> int:
        """How many rows `read_raw` counts in: those of a matrix, 1 for a vector."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def read_raw(self, start: int, stop: int, into: Bytes | None = None) -> Bytes:
        """Rows start … stop as stored, in our order: uint8 [rows row_bytes], in `into` (long enough) when given."""
        if self.rows is None:
            return self.stored.read_raw_rows(start, stop, into)
        if len(self.shape) == 1:
            elements = self.stored.read_raw_rows(0, 1).reshape(self.stored.shape[0], -1)
            return elements[self.rows].reshape(1, -1)
        return self._read_selected(self.rows[start:stop], into)

    def read_selected(self, wanted: NDArray[np.intp]) -> Floats:
        """The rows of a matrix at these indices, as float32."""
        return decode(self.stored.format, self._read_selected(wanted if self.rows is None else self.rows[wanted], None))

    def _read_selected(self, stored_rows: NDArray[np.intp], into: Bytes | None) -> Bytes:
        """Some stored rows; those that follow one another are read together."""
        row_bytes = self.stored.row_bytes
        raw = np.empty(len(stored_rows) * row_bytes, np.uint8) if into is None else into[: len(stored_rows) * row_bytes]
        breaks = np.flatnonzero(np.diff(stored_rows) != 1) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(stored_rows)], strict=True):
            if begin < end:
                first = int(stored_rows[begin])
                self.stored.read_raw_rows(first, first + end - begin, raw[begin * row_bytes : end * row_bytes])
        return raw.reshape(len(stored_rows), row_bytes)

    def read(self) -> Floats:
        """The whole tensor as float32."""
        return decode(self.stored.format, self.read_raw(0, self.num_rows)).reshape(self.shape)


@dataclass(frozen=True)
class MappedCheckpoint:
    """A folder seen as its family sees it. Reads like any source of weights; a tied tensor is absent."""

    family: Family
    hparams: HParams
    tensors: Mapping[str, MappedTensor]  # by our names, in the order of the slots
    notes: tuple[str, ...]

    def has(self, slot: Slot) -> bool:
        """Whether the slot has a tensor of its own."""
        return slot.name in self.tensors

    def format_name(self, slot: Slot) -> str:
        """How the slot's tensor is stored."""
        return self.tensors[slot.name].stored.dtype

    def read(self, slot: Slot) -> Floats:
        """The slot's tensor as float32, in our order of rows."""
        return self.tensors[slot.name].read()

    def read_rows(self, slot: Slot, rows: NDArray[np.intp]) -> Floats:
        """Some rows of a matrix, float32 [len(rows) columns]."""
        return self.tensors[slot.name].read_selected(rows)

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        """Rows start to stop as the folder stores them, in our order: uint8 [rows row_bytes], in `into` (flat)."""
        return self.tensors[slot.name].read_raw(start, stop, into)


def map_checkpoint(checkpoint: Checkpoint, allow_unknown: Sequence[str] = ()) -> MappedCheckpoint:
    """Find the family, its sizes and its tensors. `allow_unknown` names config keys that may be passed over.

    UnsupportedError for what the family does not do, CheckpointError for parts that do not fit together.
    """
    family = find_family_for_config(checkpoint.config)
    stored = _as_the_table_has_them(family, checkpoint)
    rows = _embedding_rows(family, stored)
    hp = read_config(family, checkpoint.config, vocab_size=rows, allow_unknown=allow_unknown)
    slots = family.slots(hp)
    notes: list[str] = []
    if "vocab_size" not in checkpoint.config:
        notes.append(f"config.json has no vocab_size; the embedding has {rows} rows.")
    chosen = {slot.name: stored[slot.hf] for slot in slots if slot.hf in stored}
    config = checkpoint.folder / "config.json"
    made = ((slot, slot.made()) for slot in slots if slot.made)
    chosen |= {slot.name: ComputedTensor(slot.name, "F32", slot.shape, config, values) for slot, values in made}
    for slot in slots:
        if slot.tied_to:
            notes += _settle_tie(
                checkpoint, family, slot, next(other for other in slots if other.name == slot.tied_to), chosen
            )
    _check_complete(checkpoint, family, hp, slots, stored, chosen)
    for slot in slots:
        if slot.name in chosen:
            _check_shape(checkpoint, slot, chosen[slot.name], hp)
    tensors = {slot.name: MappedTensor(slot, chosen[slot.name], slot.hf_rows) for slot in slots if slot.name in chosen}
    return MappedCheckpoint(family, hp, tensors, tuple(notes))


def checkpoint_hparams(family: Family, checkpoint: Checkpoint) -> HParams:
    """The sizes of a folder from its headers alone; without vocab_size in the config, the rows of the embedding."""
    rows = _embedding_rows(family, _as_the_table_has_them(family, checkpoint))
    return read_config(family, checkpoint.config, vocab_size=rows)


def count_parameters(family: Family, checkpoint: Checkpoint, hp: HParams) -> int:
    """The values of the family's tensors in a folder, from its headers alone.

    Other tensors (causal masks) are left out, and so is a head beside the embedding that the config says it is.
    """
    stored, slots = _as_the_table_has_them(family, checkpoint), family.slots(hp)
    spellings = {slot.name: slot.hf for slot in slots}
    says_tied = _says_tied(checkpoint, family)
    copies = {slot.hf for slot in slots if says_tied and slot.tied_to and spellings[slot.tied_to] in stored}
    return sum(prod(stored[slot.hf].shape) for slot in slots if slot.hf in stored and slot.hf not in copies)


def _as_the_table_has_them(family: Family, checkpoint: Checkpoint) -> Mapping[str, CheckpointTensor]:
    """The stored tensors under the names and in the layout of the family's table."""
    found = checkpoint.config.get("architectures")
    for name in found if isinstance(found, list) else ():
        if name in family.layouts:
            return family.layouts[name](checkpoint.tensors)
    return checkpoint.tensors


def _embedding_rows(family: Family, stored: Mapping[str, CheckpointTensor]) -> int | None:
    """The rows of the token embedding, or of the head where that is all there is."""
    tables = [row for row in family.tensors if row.name == "embed_tokens" or row.tied_to == "embed_tokens"]
    found = [stored[f"{row.hf}.weight"] for row in tables if f"{row.hf}.weight" in stored]
    return found[0].shape[0] if found and found[0].shape else None


def _says_tied(checkpoint: Checkpoint, family: Family) -> bool:
    return switch(checkpoint.config, TIE_KEY, family.tied_by_default, f"{checkpoint.folder / 'config.json'}")


def _settle_tie(
    checkpoint: Checkpoint, family: Family, slot: Slot, other: Slot, chosen: dict[str, CheckpointTensor]
) -> list[str]:
    """Decide whether `slot` (the head) is its own tensor or `other` (the embedding); a contradiction is an error.

    Equal tensors become one; a tensor that is missing is the other where the config says tied, or says nothing and the
    family's models are.
    """
    folder, says_tied = checkpoint.folder, _says_tied(checkpoint, family)
    if slot.name in chosen and other.name in chosen:
        if _are_equal(chosen[slot.name], chosen[other.name]):
            del chosen[slot.name]
            return [] if says_tied else [f"{slot.hf} equals {other.hf}; one is kept."]
        if says_tied:
            said = f"{TIE_KEY} = true" if TIE_KEY in checkpoint.config else f"no {TIE_KEY}, which means true"
            raise CheckpointError(
                f"{folder}: config.json has {said}, and {slot.hf} differs from {other.hf}.",
                hint=f"Set {TIE_KEY} to false if both are meant.",
            )
        return []
    missing, present = (slot, other) if other.name in chosen else (other, slot)
    if present.name not in chosen or says_tied:
        if missing is other and present.name in chosen:
            chosen[other.name] = chosen.pop(slot.name)
            return [f"{other.hf} is not stored; {slot.hf} is tied to it and takes its place."]
        return []
    said = f"{TIE_KEY} = false" if TIE_KEY in checkpoint.config else f"no {TIE_KEY}, which means false"
    raise CheckpointError(
        f"{folder} has no {missing.hf}, and config.json has {said}.",
        hint=f"Set {TIE_KEY} to true if {present.hf} is meant to serve as both.",
    )


def _are_equal(one: CheckpointTensor, other: CheckpointTensor) -> bool:
    """Whether two tensors have the same shape and values, read a few rows at a time."""
    if one.shape != other.shape:
        return False
    step = max(1, COMPARED_BYTES // max(1, one.row_bytes))
    for start in range(0, one.num_rows, step):
        stop = min(start + step, one.num_rows)
        if one.dtype == other.dtype:
            same = np.array_equal(one.read_raw_rows(start, stop), other.read_raw_rows(start, stop))
        else:
            same = np.array_equal(one.read_rows(start, stop), other.read_rows(start, stop))
        if not same:
            return False
    return True


def _check_complete(
    checkpoint: Checkpoint,
    family: Family,
    hp: HParams,
    slots: Sequence[Slot],
    stored: Mapping[str, CheckpointTensor],
    chosen: Mapping[str, CheckpointTensor],
) -> None:
    """Every slot has a tensor or a tie, and every tensor is used or known to carry nothing."""
    missing = [slot.hf for slot in slots if slot.name not in chosen and slot.tied_to is None]
    if missing:
        raise CheckpointError(f"{checkpoint.folder} has no {_listed(missing)}; {family.name} needs it.")
    known = {slot.hf for slot in slots if not slot.made}
    known |= {pattern.format(i=layer) for pattern in family.ignored_tensors for layer in range(hp.num_layers)}
    unknown = [name for name in stored if name not in known]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder} has tensors that {family.name} of {hp.num_layers} layers does not know: "
            f"{_listed(unknown)}.",
            hint="A tensor that no part of the model uses points to another architecture; none is left out in silence.",
        )


def _check_shape(checkpoint: Checkpoint, slot: Slot, stored: CheckpointTensor, hp: HParams) -> None:
    if stored.shape == slot.shape:
        _ = stored.format  # refuses types that weights are not stored in
        return
    found, expected = (" ".join(map(str, shape)) for shape in (stored.shape, slot.shape))
    sizes = ", ".join(f"{name} {value}" for name, value in hp.items() if type(value) is int)
    raise CheckpointError(
        f"{checkpoint.folder}: {cut(stored.name)} is [{cut(found)}]; expected [{expected}] from config.json ({sizes})."
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(cut, names[:most])) + rest
