"""Adapters put to a model: into its recorded forward pass and its weights.

All pairs of one matrix become one, their ranks beside one another and their scales in B, so that several adapters take
no more operations than one. A linear layer gets its pair as two layers of its own beside it; of a table the rows that
are read get their change when they are read, and so do tensors that stand in another's place. With a base in higher
precision the changes go into the weights instead, which are rounded to their own format again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from starscope.checkpoint.content import short
from starscope.convert import encode_checked
from starscope.engine.base import Array
from starscope.engine.weights import Source, Weights
from starscope.errors import CheckpointError, InputError, UnsupportedError, UsageError
from starscope.family import Family, HParams, Slot
from starscope.formats import Bytes, Format, decode, find_format
from starscope.graph import Graph, adapter_names, record
from starscope.lora.adapter import Adapter, Pair, Target
from starscope.lora.gguf_file import read_gguf_adapter
from starscope.lora.peft import read_peft

Given: TypeAlias = "str | os.PathLike[str] | tuple[str | os.PathLike[str], float]"
"""A PEFT folder or a GGUF file, alone or with a scale."""
MOST_SCALE = float(np.finfo(np.float32).max)


def read_adapter(path: str | os.PathLike[str], family: Family, hp: HParams) -> Adapter:
    """An adapter from a PEFT folder or a GGUF file, checked against a model of that family and those sizes.

    InputError for what is not there, CheckpointError and GGUFError for what does not fit together or to the model,
    UnsupportedError for kinds of adapters that are not done here.
    """
    where, target = Path(path), Target(family, hp)
    if not where.exists():
        raise InputError(f"{where} does not exist; expected a PEFT folder or a GGUF file.")
    if where.is_dir():
        return read_peft(where, target)
    if where.suffix in (".safetensors", ".bin", ".json"):
        return read_peft(where.parent, target)
    return read_gguf_adapter(where, target)


def as_given(given: Given | Sequence[Given]) -> list[tuple[Path, float]]:
    """What `load` takes as `lora`, as paths and scales. UsageError for anything else."""
    several = [given] if isinstance(given, (str, os.PathLike)) or _is_scaled(given) else given
    made: list[tuple[Path, float]] = []
    for one in several:
        path, scale = one if isinstance(one, tuple) and _is_scaled(one) else (one, 1.0)
        if not isinstance(path, (str, os.PathLike)) or not abs(scale) <= MOST_SCALE:
            raise UsageError(
                f"lora is {short(one)}; expected a path, or a path and a finite number, of at most {MOST_SCALE:g}."
            )
        made.append((Path(path), float(scale)))
    return made


def _is_scaled(one: object) -> TypeGuard[tuple[Any, float]]:
    """Whether it is a pair of something and a number."""
    if not isinstance(one, tuple) or len(one) != 2:
        return False
    return isinstance(one[1], (int, float, np.number)) and not isinstance(one[1], bool)


class Adapted(NamedTuple):
    """A model under adapters. `notes` are sentences for a person."""

    graph: Graph
    weights: Weights
    notes: list[str]


def adapt(
    family: Family,
    hp: HParams,
    weights: Weights,
    given: Sequence[tuple[Path, float]],
    base: Weights | None = None,
) -> Adapted:
    """The model under these adapters: nothing of its own weights is changed or copied.

    With `base`, the same model in higher precision, adapted weights are its rows with the change added, rounded to the
    format that the model stores them in. Raises what `read_adapter` raises, UnsupportedError for a format that is not
    written.
    """
    adapters = [(read_adapter(path, family, hp), scale) for path, scale in given]
    pairs, whole = combined(adapters, weights)
    notes = [note for adapter, scale in adapters for note in (*adapter.notes, _told(adapter, scale, whole))]
    if base is None:
        return Adapted(*recorded(family, hp, weights, pairs, whole), notes)
    source = MergedSource(weights.source, weights.slots, pairs, whole, base.source)
    return Adapted(record(family, hp), _weights(weights, source, list(weights.slots.values())), notes)


def recorded(
    family: Family,
    hp: HParams,
    weights: Weights,
    pairs: Mapping[str, Pair],
    whole: Mapping[str, Array],
    base: Source | None = None,
) -> tuple[Graph, Weights]:
    """The graph with pairs (of scale 1) beside its linear layers, and the weights that it runs over.

    With `base` adapted matrices are its, as float32.
    """
    linear = {op.weights[0] for op in record(family, hp).ops if op.kind == "linear"}
    beside = {name: pair for name, pair in pairs.items() if name in linear}
    inside = {name: pair for name, pair in pairs.items() if name not in linear}
    if base is not None:  # read from there, with nothing added
        inside |= {name: Pair(pair.a[:0], pair.b[:, :0], 1.0) for name, pair in beside.items()}
    graph = record(family, hp, {name: pair.rank for name, pair in beside.items()})
    made: list[Slot] = []
    arrays: dict[str, Array] = {}
    for name, pair in beside.items():
        for kind, half, values in zip("ab", adapter_names(name), (pair.a, pair.b), strict=True):
            made.append(Slot(half, f"{weights.slots[name].gguf}.lora_{kind}", half, values.shape, always_f32=False))
            arrays[half] = values
    source = MergedSource(weights.source, weights.slots, inside, whole, base, exact=True, beside=arrays)
    return graph, _weights(weights, source, [*weights.slots.values(), *made])


def _told(adapter: Adapter, scale: float, whole: Mapping[str, Array]) -> str:
    ranks = sorted({pair.rank for pair in adapter.pairs.values()})
    rank = f" of rank {' and '.join(map(str, ranks))}" if len(ranks) < 3 else f" of ranks {ranks[0]} to {ranks[-1]}"
    parts = [f"{len(adapter.pairs)} matrices{rank}"] if adapter.pairs else []
    replaced = sum(name in whole for name in adapter.whole)
    parts += [f"{replaced} whole tensors"] if replaced else []
    return f"{adapter.path.name} adapts {' and '.join(parts)}, times {scale:g}."


def _weights(before: Weights, source: Source, slots: list[Slot]) -> Weights:
    made = Weights(slots, source)
    made.half_cache = before.half_cache
    return made


def combined(adapters: Sequence[tuple[Adapter, float]], weights: Weights) -> tuple[dict[str, Pair], dict[str, Array]]:
    """All adapters, each with its scale, as one: pairs of scale 1, and tensors that take another's place."""
    found: dict[str, list[Pair]] = {}
    whole: dict[str, Array] = {}
    for adapter, scale in adapters:
        if scale == 0:
            continue
        for name, pair in adapter.pairs.items():
            with np.errstate(over="ignore", invalid="ignore"):
                b = pair.b * np.float32(pair.scale * scale)
            found.setdefault(name, []).append(Pair(pair.a, _within_float32(b, name, adapter, scale), 1.0))
        for name, values in adapter.whole.items():
            own = _float(weights.source, weights.slots, name)
            if np.array_equal(own, _as_stored(weights, name, values)):
                continue  # PEFT saves embeddings that it has not changed, too
            with np.errstate(over="ignore", invalid="ignore"):
                alone = scale == 1 and name not in whole  # its very numbers, which a sum might not give
                change = values if alone else whole.get(name, own) + np.float32(scale) * (values - own)
            whole[name] = np.ascontiguousarray(_within_float32(change, name, adapter, scale))
    pairs = {}
    for name, several in found.items():
        a, b = np.concatenate([p.a for p in several]), np.concatenate([p.b for p in several], axis=1)
        pairs[name] = Pair(a, np.ascontiguousarray(b), 1.0)
    return pairs, whole


def _within_float32(values: Array, name: str, adapter: Adapter, scale: float) -> Array:
    if np.isfinite(values).all():
        return values
    raise CheckpointError(
        f"{adapter.path} times {scale:g} makes {name} larger than a float32 holds.", hint="Give a smaller scale."
    )


def _as_stored(weights: Weights, name: str, values: Array) -> Array:
    """Values as the format that the model stores a tensor in rounds them."""
    form = find_format(weights.format_name(name))
    if form.name == "F32" or form.encode is None:
        return values
    raw = encode_checked(name, form, np.ascontiguousarray(values).reshape(-1, values.shape[-1]))
    return decode(form, raw).reshape(values.shape)


def _float(source: Source, slots: Mapping[str, Slot], name: str) -> Array:
    return source.read(_stored(source, slots, slots[name]))


def _stored(source: Source, slots: Mapping[str, Slot], slot: Slot) -> Slot:
    """The slot that a tensor is read from: another one where it is tied and absent."""
    return slots[slot.tied_to] if slot.tied_to and not source.has(slot) else slot


class MergedSource:
    """Weights with changes in them, row by row as they are read; nothing is kept. Implements `Source`.

    `exact`: changed tensors are float32; otherwise they are rounded to the format that `source` stores them in, and
    `base`, where given, is what the change is added to. `beside` are tensors of their own.
    """

    def __init__(
        self,
        source: Source,
        slots: Mapping[str, Slot],
        pairs: Mapping[str, Pair],
        whole: Mapping[str, Array],
        base: Source | None = None,
        *,
        exact: bool = False,
        beside: Mapping[str, Array] | None = None,
    ) -> None:
        self._source, self._slots, self._pairs, self._whole, self._exact = source, slots, pairs, whole, exact
        self._base, self._beside = base or source, beside or {}

    def is_changed(self, slot: Slot) -> bool:
        """Whether a tensor is another than the model's own."""
        return slot.name in self._pairs or slot.name in self._whole

    def has(self, slot: Slot) -> bool:
        """A tied tensor becomes one of its own when it or the one that it is tied to changes."""
        if slot.name in self._beside or self._source.has(slot):
            return True
        return self.is_changed(slot) or slot.tied_to in self._pairs or slot.tied_to in self._whole

    def format_name(self, slot: Slot) -> str:
        if slot.name in self._beside or (self._exact and self.is_changed(slot)):
            return "F32"
        return self._source.format_name(self._own(slot))

    def read(self, slot: Slot) -> Array:
        if slot.name in self._beside:
            return self._beside[slot.name]
        if not self.is_changed(slot):
            return self._source.read(self._own(slot))
        if len(slot.shape) == 1:
            return self._whole[slot.name]
        return self._rounded(slot, self._changed(slot, None))

    def read_rows(self, slot: Slot, rows: Array) -> Array:
        if not self.is_changed(slot):
            return self._source.read_rows(self._own(slot), rows)
        return self._rounded(slot, self._changed(slot, rows))

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        if slot.name in self._beside:
            return np.ascontiguousarray(self._beside[slot.name][start:stop]).view(np.uint8)
        if not self.is_changed(slot):
            return self._source.read_stored(self._own(slot), start, stop, into)
        values = self._changed(slot, np.arange(start, stop))
        return encode_checked(slot.name, self._format(slot), values)

    def _own(self, slot: Slot) -> Slot:
        """The model's own tensor, which may be the one that this is tied to."""
        return _stored(self._source, self._slots, slot)

    def _changed(self, slot: Slot, rows: Array | None) -> Array:
        """Rows of a matrix with their change, before rounding; None: all of them."""
        if slot.name in self._whole:
            values = self._whole[slot.name] if rows is None else self._whole[slot.name][rows]
        else:
            own = _stored(self._base, self._slots, slot)
            values = self._base.read(own) if rows is None else self._base.read_rows(own, rows)
        pair = self._pairs.get(slot.name)
        if pair is None:
            return values
        changed: Array = values + (pair.b if rows is None else pair.b[rows]) @ pair.a
        return changed

    def _format(self, slot: Slot) -> Format:
        format_ = find_format(self.format_name(slot))
        if format_.encode is None:
            raise UnsupportedError(
                f"{slot.name} is stored as {format_.name}, which is not written.",
                hint="Leave --lora-base out, or quantize the model to another type.",
            )
        return format_

    def _rounded(self, slot: Slot, values: Array) -> Array:
        if self._exact:
            return values
        format_ = self._format(slot)
        return decode(format_, encode_checked(slot.name, format_, values)).reshape(values.shape)
