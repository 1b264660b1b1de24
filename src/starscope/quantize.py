"""A GGUF file with its weights stored in another format: smaller, or decoded again.

Which format each tensor takes is for `recipes.py` to say, as in a conversion. Everything else is copied as it is.

    report = quantize("model-f16.gguf", "model-q8_0.gguf", to="q8_0")
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from starscope.checkpoint import WeightFile
from starscope.convert import (
    CHUNK_BYTES,
    ConversionReport,
    Counter,
    FiniteWatch,
    Progress,
    check_output,
    encode_checked,
)
from starscope.errors import CheckpointError, GGUFError, UnsupportedError
from starscope.family import Family, Slot, find_family_of_file, hparams_from_metadata
from starscope.formats import Bytes, Format, decode, find_format
from starscope.gguf.format import Value
from starscope.gguf.reader import GGUFFile, TensorInfo, read_gguf
from starscope.gguf.writer import OutputTensor, write_gguf
from starscope.recipes import choose_formats, file_type_metadata, find_recipe

SPLIT_PREFIX = "split."  # keys of a file in parts; the output is whole
EXACT = ("F32", "F16", "BF16")  # formats that are not quantized


def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the model of the GGUF file `source`, which may be in parts, to `out` as `to`,
    a format or a mixture of them.

    Raises OutputExistsError unless `force`, UsageError when `out` is the source, GGUFError for a source that
    contradicts itself, UnsupportedError for formats that are not decoded, DoesNotFitError and OutputError for the
    disk. Whatever is raised, KeyboardInterrupt included, nothing is left behind.
    """
    began = time.perf_counter()
    recipe, path = find_recipe(to), Path(out)
    with read_gguf(source) as file, ExitStack() as closing_later:
        check_output(path, force, inputs=file.paths)
        family = find_family_of_file(file)
        formats, notes = choose_formats(_slots(file, family), recipe)
        infos = list(file.tensors.values())
        notes += _requantized(infos, formats)
        metadata: dict[str, Value] = {
            **{key: value for key, value in file.metadata.items() if not key.startswith(SPLIT_PREFIX)},
            **file_type_metadata(recipe),
        }
        parts = [closing_later.enter_context(closing(WeightFile(part))) for part in file.paths]
        pieces = [StoredPiece(parts[info.part], info, formats[info.name]) for info in infos]
        count = Counter(progress, sum(piece.format.nbytes(piece.info.shape) for piece in pieces))
        watch = FiniteWatch()
        outputs = [
            OutputTensor(p.info.name, p.info.shape, p.format, count.counted(partial(p.chunks, watch))) for p in pieces
        ]
        size = write_gguf(path, metadata, outputs, force=force)
        notes += watch.notes()
        parameters = sum(int(np.prod(info.shape)) for info in infos)
        seconds = time.perf_counter() - began
        return ConversionReport(path, size, seconds, len(pieces), parameters, family.name, recipe.name, notes)


@dataclass(frozen=True)
class StoredPiece:
    """One tensor of a GGUF file and the format that it is written in.

    Its bytes are read, not mapped: a file that becomes shorter meanwhile is an error then, and not the process's end.
    """

    part: WeightFile
    info: TensorInfo
    format: Format

    def chunks(self, watch: FiniteWatch) -> Iterator[Bytes]:
        """The tensor's bytes in order: as stored where the format stays, decoded and encoded where it does not."""
        row_bytes = self.info.nbytes // self.info.rows
        step = max(1, CHUNK_BYTES // row_bytes)
        buffer = np.empty((min(step, self.info.rows), row_bytes), np.uint8)
        for start in range(0, self.info.rows, step):
            raw = buffer[: self.info.rows - start]
            if self.info.format == self.format:
                raw = np.empty_like(raw)  # it is handed over, so the next chunk needs a place of its own
            self._read(raw, self.info.offset + start * row_bytes)
            self._look(watch, raw)
            if self.info.format == self.format:
                yield raw
            else:
                yield encode_checked(self.info.name, self.format, decode(_decodable(self.info), raw))

    def _look(self, watch: FiniteWatch, raw: Bytes) -> None:
        """Numbers that are not finite are found in a quantized tensor by the scales of its quant blocks."""
        stored = _decodable(self.info)
        if stored.name in EXACT:
            watch.look(self.info.name, stored, raw)
        else:
            scales = raw.reshape(-1, stored.block_bytes)[:, slice(*stored.halves)]
            watch.look(self.info.name, find_format("F16"), np.ascontiguousarray(scales))

    def _read(self, raw: Bytes, offset: int) -> None:
        try:
            self.part.read_into(raw.reshape(-1).data, offset)
        except CheckpointError as error:
            raise GGUFError(
                f"{error.message[:-1]} in {self.info.name}.", hint="It became shorter meanwhile."
            ) from error


def _decodable(info: TensorInfo) -> Format:
    if info.format is None:
        raise UnsupportedError(f"{info.name} is stored as {info.type_name}, which starscope does not decode.")
    return info.format


def _slots(file: GGUFFile, family: Family) -> list[Slot]:
    """The family's tensors that the file has. GGUFError for one that the family does not know or lacks."""
    if not file.tensors:
        raise GGUFError(f"{file.path} has a vocabulary and no tensors; expected a whole model.")
    slots = {slot.gguf: slot for slot in family.slots(hparams_from_metadata(family, file))}
    for name, info in file.tensors.items():
        if name not in slots:
            raise GGUFError(f"{file.path} has a tensor that {family.name} does not know: {name}.")
        if info.shape != slots[name].shape:
            found, expected = (" ".join(map(str, shape)) for shape in (info.shape, slots[name].shape))
            raise GGUFError(f"{file.path}: {name} is [{found}]; expected [{expected}] from the file's own sizes.")
        _decodable(info)
    missing = [name for name, slot in slots.items() if name not in file.tensors and slot.tied_to is None]
    if missing:
        raise GGUFError(f"{file.path} has no tensor {missing[0]}; {family.name} needs it.")
    return [slot for name, slot in slots.items() if name in file.tensors]


def _requantized(infos: list[TensorInfo], formats: dict[str, Format]) -> list[str]:
    """A note when values are rounded a second time, or decoded from what was rounded."""
    again = {info.type_name for info in infos if info.type_name not in EXACT and info.format != formats[info.name]}
    if not again:
        return []
    return [f"the source is quantized already ({', '.join(sorted(again))}); converting the original again gives more."]
