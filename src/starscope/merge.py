"""Adapters merged into a model: one GGUF file that computes with them and needs nothing beside it.

Tensors are read, changed, rounded and written a few rows at a time; what no adapter changes is copied as it is stored.
Before the file takes its name, two comparisons of logits must hold: the merged weights' with those of the model and
its adapters beside it, and the file's with the merged weights' as its formats round them.

    report = merge("base-q8_0.gguf", "merged.gguf", lora=["docstrings/", ("style.gguf", 0.5)])
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from starscope.checkpoint import open_checkpoint
from starscope.convert import (
    CHUNK_BYTES,
    DEFAULT_TYPE,
    ConversionReport,
    Counter,
    Progress,
    check_output,
    encode_checked,
    general_metadata,
)
from starscope.engine import Weights, make_engine
from starscope.engine.base import Array
from starscope.engine.weights import Source, open_weights
from starscope.errors import UnsupportedError, UsageError, VerificationError
from starscope.family import Slot, hparams_from_metadata, metadata_from_hparams
from starscope.formats import Bytes, Format, decode, find_format
from starscope.gguf import OutputTensor, read_gguf, write_gguf
from starscope.gguf.format import Value
from starscope.graph import Graph, record
from starscope.lora import Given, as_given, read_adapter
from starscope.lora.apply import MergedSource, combined, recorded
from starscope.model import Model, load, open_base
from starscope.quantize import SPLIT_PREFIX
from starscope.recipes import choose_formats, file_type_metadata, find_recipe

ULP = 2.0**-23
FILE_TOLERANCE = 32  # ulp of the largest logit: two runs of the same arithmetic
MERGE_TOLERANCE = 256  # the same sums in another order, which B A added to W is
PROBE_TOKENS = 32


def merge(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    lora: Given | Sequence[Given],
    lora_base: str | os.PathLike[str] | None = None,
    to: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write `model`, a GGUF file or a Hugging Face folder, with adapters merged into it, as the GGUF file `out`.

    `to` is a type as `quantize` has them; without it a GGUF file keeps its formats and a folder becomes f16.
    `lora_base` is the same model in higher precision, to whose weights the adapters are added.

    Raises what `load` and `write_gguf` raise, UsageError when `out` is an input, UnsupportedError for a format that is
    not written, VerificationError; nothing is left behind then.
    """
    began, path, given = time.perf_counter(), Path(out), as_given(lora)
    if not given:
        raise UsageError("there is no adapter to merge; expected at least one.")
    recipe = None if to is None else find_recipe(to)
    plain = load(str(model), engine="numpy")
    base = None if lora_base is None else open_base(str(lora_base), plain.weights).source
    check_output(path, force, inputs=_inputs(plain.path, [where for where, _ in given], lora_base))
    adapters = [(read_adapter(where, plain.family, plain.hparams), scale) for where, scale in given]
    pairs, whole = combined(adapters, plain.weights)
    source = MergedSource(plain.weights.source, plain.weights.slots, pairs, whole, base, exact=True)
    slots = [slot for slot in plain.weights.slots.values() if source.has(slot)]
    if plain.path.is_dir() and recipe is None:
        recipe = find_recipe(DEFAULT_TYPE)
    formats, notes = (
        ({slot.gguf: _kept_format(plain.weights, slot) for slot in slots}, list[str]())
        if recipe is None
        else choose_formats(slots, recipe)
    )
    notes = [*plain.notes, *(note for adapter, _ in adapters for note in adapter.notes), *notes]
    notes += _rounded_again(plain.weights, source, slots, formats, lora_base)
    if any(slot.tied_to and not plain.weights.source.has(slot) for slot in slots):
        notes.append("the output matrix and the token embedding are two tensors now: only one of them is adapted.")
    metadata = _metadata(plain, slots, {} if recipe is None else file_type_metadata(recipe))
    pieces = [MergedPiece(slot, source, plain.weights, formats[slot.gguf]) for slot in slots]
    count = Counter(progress, sum(piece.format.nbytes(slot.shape) for piece, slot in zip(pieces, slots, strict=True)))
    outputs = [OutputTensor(p.slot.gguf, p.slot.shape, p.format, count.counted(p.chunks)) for p in pieces]
    beside = recorded(plain.family, plain.hparams, plain.weights, pairs, whole, base)
    moved: list[float] = []
    check = partial(_check, plain=plain, beside=beside, source=source, slots=slots, formats=formats, moved=moved)
    size = write_gguf(path, metadata, outputs, force=force, check=check)
    notes.append(
        f"logits of {PROBE_TOKENS} tokens are within {moved[0]:.2%} of the model's with its adapters beside it."
    )
    parameters = sum(slot.parameters for slot in slots)
    kind = recipe.name if recipe is not None else "its own formats"
    seconds = time.perf_counter() - began
    return ConversionReport(path, size, seconds, len(slots), parameters, plain.family.name, kind, notes)


def _inputs(model: Path, adapters: Sequence[Path], base: str | os.PathLike[str] | None) -> Iterator[Path]:
    for place in (model, *adapters, *([Path(base)] if base is not None else [])):
        if place.is_dir():
            yield from place.iterdir()
        else:
            yield place


def _metadata(plain: Model, slots: Sequence[Slot], file_type: Mapping[str, Value]) -> dict[str, Value]:
    """The keys of the file, or those that a conversion of the folder would write."""
    sizes = metadata_from_hparams(plain.family, plain.hparams)
    if not plain.path.is_dir():
        with read_gguf(plain.path) as file:
            kept = {key: value for key, value in file.metadata.items() if not key.startswith(SPLIT_PREFIX)}
        return {**kept, **sizes, **file_type}
    with open_checkpoint(plain.path, weights=False) as checkpoint:
        general = general_metadata(checkpoint, plain.family, sum(slot.parameters for slot in slots))
    return {**general, **sizes, **file_type, **plain.tokenizer.to_metadata(plain.hparams.vocab_size)}


def _kept_format(weights: Weights, slot: Slot) -> Format:
    format_ = find_format(weights.format_name(slot.name))
    if format_.encode is None:
        raise UnsupportedError(
            f"{slot.gguf} is stored as {format_.name}, which is not written.", hint="Name another type: --to q8_0."
        )
    return format_


def _rounded_again(
    weights: Weights,
    source: MergedSource,
    slots: Sequence[Slot],
    formats: Mapping[str, Format],
    base: str | os.PathLike[str] | None,
) -> list[str]:
    """A note when weights that were rounded already are changed and rounded once more."""
    changed = [slot for slot in slots if source.is_changed(slot) and formats[slot.gguf].block_size > 1]
    again = sorted(
        {
            weights.format_name(slot.name)
            for slot in changed
            if find_format(weights.format_name(slot.name)).block_size > 1
        }
    )
    if not again or base is not None:
        return []
    return [f"the model is quantized already ({', '.join(again)}); --lora-base with the original gives more."]


@dataclass(frozen=True)
class MergedPiece:
    """One tensor of the output."""

    slot: Slot
    source: MergedSource
    weights: Weights
    format: Format

    @property
    def is_copied(self) -> bool:
        """Whether its bytes are the model's own."""
        return not self.source.is_changed(self.slot) and self.weights.format_name(self.slot.name) == self.format.name

    def chunks(self) -> Iterator[Bytes]:
        """The tensor's bytes in the file's order of rows."""
        slot, order = self.slot, self.slot.gguf_order
        if len(slot.shape) == 1:
            values = self.source.read(slot)
            yield encode_checked(slot.name, self.format, (values if order is None else values[order]).reshape(1, -1))
            return
        rows, row_bytes = slot.shape[0], self.format.row_bytes(slot.shape[-1])
        step = max(1, CHUNK_BYTES // (4 * slot.shape[-1]))
        if self.is_copied and order is not None:  # whole, for rows from anywhere
            yield self._stored(0, rows, row_bytes)[order]
            return
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            if self.is_copied:
                yield self._stored(start, stop, row_bytes)
            else:
                which = np.arange(start, stop) if order is None else order[start:stop]
                yield encode_checked(slot.name, self.format, self.source.read_rows(slot, which))

    def _stored(self, start: int, stop: int, row_bytes: int) -> Bytes:
        room = np.empty((stop - start) * row_bytes, np.uint8)
        return self.source.read_stored(self.slot, start, stop, room).reshape(stop - start, row_bytes)


class RoundedSource:
    """Tensors as the formats of a file round them. Implements `Source`, for engines that read values alone."""

    def __init__(self, source: MergedSource, pieces: Mapping[str, Format]) -> None:
        self._source, self._formats = source, pieces

    def has(self, slot: Slot) -> bool:
        return self._source.has(slot)

    def format_name(self, slot: Slot) -> str:
        return "F32"

    def read(self, slot: Slot) -> Array:
        return self._rounded(slot, self._source.read(slot))

    def read_rows(self, slot: Slot, rows: Array) -> Array:
        return self._rounded(slot, self._source.read_rows(slot, rows))

    def read_stored(self, slot: Slot, start: int, stop: int, into: Bytes) -> Bytes:
        return np.ascontiguousarray(self.read_rows(slot, np.arange(start, stop))).view(np.uint8)

    def _rounded(self, slot: Slot, values: Array) -> Array:
        form = self._formats[slot.gguf]
        if not self._source.is_changed(slot) and self._source.format_name(slot) == form.name:
            return values  # rounding twice need not give the same again
        raw = encode_checked(slot.name, form, np.ascontiguousarray(values, np.float32).reshape(-1, slot.shape[-1]))
        return decode(form, raw).reshape(values.shape)


class Passing(Weights):
    """Weights that are let go of as soon as they have been used: slower, and no more memory than one tensor."""

    def __init__(self, slots: list[Slot], source: Source) -> None:
        super().__init__(slots, source)
        self.half_cache = False  # what is compared is weights, not how keys and values are rounded

    def __getitem__(self, name: str) -> Array:
        value = super().__getitem__(name)
        self.forget(name)
        return value


def _check(
    written: Path,
    *,
    plain: Model,
    beside: tuple[Graph, Weights],
    source: MergedSource,
    slots: Sequence[Slot],
    formats: Mapping[str, Format],
    moved: list[float],
) -> None:
    """VerificationError unless the file computes what it is made of."""
    family, every = plain.family, list(plain.weights.slots.values())
    count = min(PROBE_TOKENS, plain.hparams.context_length)
    probe = np.random.default_rng(0).integers(0, plain.hparams.vocab_size, count).tolist()
    graph, weights = beside
    unmerged = _logits(graph, list(weights.slots.values()), weights.source, probe)
    merged = _logits(plain.graph, every, source, probe)
    _compare("the merged weights' logits", merged, "the adapters' beside the model", unmerged, MERGE_TOLERANCE)
    rounded = _logits(plain.graph, every, RoundedSource(source, formats), probe)
    with read_gguf(written) as file:
        hp, stored = open_weights(file, family, hparams_from_metadata(family, file))
        found = _logits(record(family, hp), list(stored.slots.values()), stored.source, probe)
    _compare("the file's logits", found, "the merged weights'", rounded, FILE_TOLERANCE)
    moved.append(float(np.abs(found - unmerged).max() / np.abs(unmerged).max()))


def _compare(what: str, found: Array, of: str, wanted: Array, most: int) -> None:
    distance = float(np.abs(found - wanted).max() / np.abs(wanted).max() / ULP)
    if not distance <= most:
        raise VerificationError(f"{what} are {distance:.0f} ulp from {of}; expected at most {most}.")


def _logits(graph: Graph, slots: list[Slot], source: Source, probe: list[int]) -> Array:
    return make_engine("numpy", graph, Passing(slots, source)).forward([probe], None, "all")[0]
