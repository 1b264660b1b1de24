"""A Hugging Face folder becomes one GGUF file, tensor by tensor, through a few megabytes of memory.

What goes into the file follows from the folder alone (no path, no time), so the same folder gives the same bytes.
Norms, biases and positions stay F32; `recipes.py` has the format of the rest.

    report = convert("starcoderbase-1b", to="q8_0", verify=True)
    print(report.out, report.bytes, report.notes)
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np

from starscope.checkpoint import Checkpoint, WeightFile, open_checkpoint
from starscope.errors import OutputError, OutputExistsError, UnsupportedError, UsageError, VerificationError
from starscope.family import Family, HParams, find_family_for_config, metadata_from_hparams, read_config
from starscope.formats import Bytes, Floats, Format, decode, encode
from starscope.gguf.format import Value, string, u32
from starscope.gguf.reader import read_gguf
from starscope.gguf.writer import OutputTensor, write_gguf
from starscope.hub import find_snapshot
from starscope.mapping import MappedCheckpoint, MappedTensor, map_checkpoint
from starscope.recipes import choose_formats, file_type_metadata, find_recipe
from starscope.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Is told the bytes done and the bytes in all."""

CHUNK_BYTES = 4 << 20
"""Read and encoded at a time: enough for two threads to share, little enough to stay in a core's cache."""
DEFAULT_TYPE = "f16"
HUB_URL = "https://huggingface.co"  # wherever the files were downloaded from: the name is one of that hub
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LICENSE_KEYS = {
    "license":      "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
}  # fmt: skip


@dataclass(frozen=True)
class ConversionReport:
    """What was written: `bytes` in `seconds`. `parameters` counts the values in the file; `notes` are for a person."""

    out: Path
    bytes: int
    seconds: float
    tensors: int
    parameters: int
    family: str
    format: str
    notes: list[str]


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    to: str = DEFAULT_TYPE,
    vocab_only: bool = False,
    expand_mqa: bool = False,
    verify: bool = False,
    force: bool = False,
    allow_unknown: Sequence[str] = (),
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the folder `source` to the file `out` (default: `ggml-model-<to>.gguf` in the folder).

    `vocab_only` writes the metadata without tensors. `expand_mqa` repeats the one key and value head of a multi-query
    model for every query head, as the first converter did. `verify` reads the file back and compares every value with
    the source rounded to its format, before the file takes its name. `allow_unknown` names config keys to pass over.

    Raises OutputExistsError unless `force`, InputError and CheckpointError for the folder, UnsupportedError for what
    starscope does not do, DoesNotFitError and OutputError for the disk, VerificationError. Whatever is raised,
    KeyboardInterrupt included, nothing is left behind.
    """
    began = time.perf_counter()
    recipe = find_recipe(to)
    with open_checkpoint(source, weights=not vocab_only) as checkpoint:
        name = "ggml-vocab" if vocab_only else f"ggml-model-{to.lower()}"
        path = Path(out) if out is not None else checkpoint.folder / f"{name}.gguf"
        check_output(path, force, inputs=(file for file in checkpoint.folder.iterdir() if file.suffix != ".gguf"))
        tokenizer = Tokenizer.from_folder(checkpoint.folder, checkpoint.config, checkpoint.generation_config)
        tokenizer.encode("")  # merges that do not fit the vocabulary are refused now, not by whoever loads the file
        notes = list(tokenizer.notes)
        if vocab_only:
            notes += _without_effect(to, expand_mqa)
            recipe = find_recipe(DEFAULT_TYPE)
        mapped = None if vocab_only else map_checkpoint(checkpoint, allow_unknown)
        if mapped is None:
            family, hp = _read_vocabulary_sizes(checkpoint, tokenizer, allow_unknown)
        else:
            family, hp = mapped.family, mapped.hparams
            notes += mapped.notes
        expands = expand_mqa and not vocab_only
        tensors, keys = _expanded(mapped, family, hp) if expands else (_tensors(mapped), {})
        tensors = [_with_rows(tensor, tensor.slot.gguf_order) for tensor in tensors]
        if expands and hp.num_kv_heads > 1:
            notes.append(f"every query head has a key head of its own already ({hp.num_kv_heads}); none is repeated.")
        formats, fallen = choose_formats([t.slot for t in tensors], recipe)
        notes += fallen
        pieces = [Piece(tensor, formats[tensor.slot.gguf]) for tensor in tensors]
        metadata = {
            **general_metadata(checkpoint, family, sum(piece.tensor.slot.parameters for piece in pieces)),
            **metadata_from_hparams(family, hp),
            **keys,
            **file_type_metadata(recipe),
            **tokenizer.to_metadata(hp.vocab_size),
        }
        count = Counter(progress, sum(piece.nbytes for piece in pieces) * (2 if verify else 1))
        watch = FiniteWatch()
        outputs = [
            OutputTensor(p.name, p.tensor.shape, p.format, count.counted(partial(p.chunks, watch))) for p in pieces
        ]
        check = (lambda written: _verify(written, pieces, count)) if verify else None
        size = write_gguf(path, metadata, outputs, force=force, check=check)
        parameters = sum(prod(piece.tensor.shape) for piece in pieces)
        notes += watch.notes()
        seconds = time.perf_counter() - began
        return ConversionReport(path, size, seconds, len(pieces), parameters, family.name, recipe.name, notes)


def check_output(path: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Refuse, before any work, an output that exists unless `force`, and always one that is an input."""
    if os.path.isdir(path):
        raise OutputError(f"{path} is a folder; expected the name of a file to write.")
    if not os.path.lexists(path):
        return
    if not force:
        raise OutputExistsError(f"{path} exists.")
    if path.exists() and any(path.samefile(file) for file in inputs if file.exists()):
        raise UsageError(f"{path} is an input of this conversion; expected another output.")


def encode_checked(name: str, format_: Format, values: Floats) -> Bytes:
    """Encode; UnsupportedError when a value is too large for the format, which would make it infinite in silence."""
    is_blocks = format_.block_size > 1
    # Rounding to a smaller float takes no longer than waking a second thread for it, and another core is busy writing.
    raw = encode(format_, values, threads=None if is_blocks else 1)
    if format_.name == "F32":
        return raw
    halves = raw.reshape(-1, format_.block_bytes)[:, slice(*format_.halves)].copy() if is_blocks else raw
    # All above infinity are NaN; with the sign bit, they are the largest uint16.
    infinity, larger = (0x7F80, "f32") if format_.name == "BF16" else (0x7C00, "bf16 or f32")
    if halves.view(np.int16).max(initial=0) < infinity and halves.view(np.uint16).max(initial=0) < infinity + 0x8000:
        return raw
    finite = np.abs(values, where=np.isfinite(values), out=np.zeros_like(values))
    if is_blocks and not np.isfinite(values).all():
        raise UnsupportedError(f"{name} holds a value that is not finite; {format_.name} cannot store it.")
    if is_blocks or (raw.view(np.uint16)[np.isfinite(values)] & 0x7FFF == infinity).any():
        raise UnsupportedError(
            f"{name} holds values up to {finite.max():g}, which are too large for {format_.name}.",
            hint=f"Convert to {larger}.",
        )
    return raw


class FiniteWatch:
    """Counts the values that are not finite (NaN, infinities) among those that pass, and keeps the first name."""

    # Of each float type: the integer of its size, and infinity's bits; a NaN has larger ones.
    INFINITY: ClassVar = {"F32": (4, 0x7F800000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}

    def __init__(self) -> None:
        self._first, self._count = "", 0

    def look(self, name: str, format_: Format, raw: Bytes) -> None:
        """See `raw`, values of the float type `format_`. Takes two passes over integers, at the speed of the memory."""
        size, infinity = self.INFINITY[format_.name]
        signed, unsigned = (raw.view(f"<{kind}{size}") for kind in "iu")
        sign = 1 << (8 * size - 1)
        if signed.max(initial=0) < infinity and unsigned.max(initial=0) < infinity + sign:
            return
        self._count += int(np.count_nonzero(unsigned & (sign - 1) >= infinity))
        self._first = self._first or name

    def notes(self) -> list[str]:
        """One line for a person when there was any."""
        if not self._count:
            return []
        what = "1 value is" if self._count == 1 else f"{self._count} values are"
        return [
            f"{what} not finite (NaN or infinite), the first in {self._first}; the model cannot be expected to work."
        ]


@dataclass(frozen=True)
class Piece:
    """One tensor of the output: where its values come from and how they are stored."""

    tensor: MappedTensor
    format: Format

    @property
    def name(self) -> str:
        return self.tensor.slot.gguf

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.tensor.shape)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, each of about CHUNK_BYTES in the source."""
        rows = self.tensor.num_rows
        step = max(1, CHUNK_BYTES // max(1, self.tensor.stored.nbytes // max(1, self.tensor.stored.num_rows)))
        return ((start, min(start + step, rows)) for start in range(0, rows, step))

    def encoded(self, start: int, stop: int, buffer: Bytes | None = None, watch: FiniteWatch | None = None) -> Bytes:
        """Rows start … stop in the output's format: uint8 [rows row_bytes]. `buffer` may hold what is read."""
        stored = self.tensor.stored.format
        raw = self.tensor.read_raw(start, stop, buffer if stored != self.format else None)
        if watch is not None:
            watch.look(self.tensor.stored.name, stored, raw)
        if stored == self.format:
            return raw
        return encode_checked(self.tensor.stored.name, self.format, decode(stored, raw))

    def chunks(self, watch: FiniteWatch) -> Iterator[Bytes]:
        """The tensor's bytes in order. What is read passes through one buffer, which stays in the cache."""
        buffer: Bytes | None = None
        for start, stop in self.spans():
            if buffer is None and len(self.tensor.shape) > 1:
                buffer = np.empty((stop - start) * self.tensor.stored.row_bytes, np.uint8)
            yield self.encoded(start, stop, buffer, watch)


class Counter:
    """Adds up bytes and tells `progress` after each chunk."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, size: int) -> None:
        """`size` more bytes are done."""
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)

    def counted(self, chunks: Callable[[], Iterator[Bytes]]) -> Callable[[], Iterator[Bytes]]:
        """The same chunks, each counted once the next is asked for."""

        def counting() -> Iterator[Bytes]:
            for chunk in chunks():
                yield chunk
                self.add(chunk.nbytes)

        return counting


def _without_effect(to: str, expand_mqa: bool) -> list[str]:
    """A note about what was asked of weights, where there are none."""
    asked = ([f"the type {to}"] if to.lower() != DEFAULT_TYPE else []) + (["repeated key heads"] if expand_mqa else [])
    return [f"a vocabulary-only file has no weights; without effect: {', '.join(asked)}."] if asked else []


def _tensors(mapped: MappedCheckpoint | None) -> list[MappedTensor]:
    return list(mapped.tensors.values()) if mapped is not None else []


def _expanded(
    mapped: MappedCheckpoint | None, family: Family, hp: HParams
) -> tuple[list[MappedTensor], dict[str, Value]]:
    """The tensors with repeated rows and the keys that say so; a family without such a form refuses."""
    if family.expand is None:
        raise UsageError(f"{family.name} has no form with repeated keys and values.")
    copies, keys = family.expand(hp) if hp.num_kv_heads == 1 else ({}, family.expand(hp)[1])
    tensors = [_with_rows(tensor, copies.get(tensor.slot.gguf)) for tensor in _tensors(mapped)]
    return tensors, {f"{family.gguf_architecture}.{key}": u32(value) for key, value in keys.items()}


def _with_rows(tensor: MappedTensor, wanted: np.ndarray | None) -> MappedTensor:
    """The tensor whose row i is row `wanted[i]` of this one."""
    if wanted is None:
        return tensor
    return replace(tensor, rows=wanted if tensor.rows is None else tensor.rows[wanted])


def _read_vocabulary_sizes(
    checkpoint: Checkpoint, tokenizer: Tokenizer, allow_unknown: Sequence[str]
) -> tuple[Family, HParams]:
    """Family and sizes without weights; a config without vocab_size has as many as the tokenizer."""
    family = find_family_for_config(checkpoint.config)
    return family, read_config(family, checkpoint.config, vocab_size=tokenizer.vocab_size, allow_unknown=allow_unknown)


def general_metadata(checkpoint: Checkpoint, family: Family, parameters: int) -> dict[str, Value]:
    """The `general.*` keys: what the folder says about itself, the repository and commit that a snapshot of the hub's
    cache is of, and nothing else about where it lies.
    """
    snapshot, origin = find_snapshot(checkpoint.folder), checkpoint.config.get("_name_or_path")
    repository = origin if isinstance(origin, str) and HUB_NAME.fullmatch(origin) else None
    if snapshot is not None:
        repository = snapshot.repo
    label = size_label(parameters)
    texts = {
        "general.architecture": family.gguf_architecture,
        "general.type": "model",
        "general.name": repository.rsplit("/")[-1] if repository else f"{family.name} {label}".strip(),
    }
    if label:
        texts["general.size_label"] = label
    card = checkpoint.readme_metadata()
    texts |= {LICENSE_KEYS[key]: value for key, value in card.items() if key in LICENSE_KEYS}
    if repository:
        texts["general.source.huggingface.repository"] = repository
    if snapshot is not None:
        texts["general.source.repo_url"] = f"{HUB_URL}/{snapshot.repo}"
        texts["general.source.url"] = f"{HUB_URL}/{snapshot.repo}/tree/{snapshot.revision}"
    return {key: string(text) for key, text in texts.items()}


def size_label(parameters: int) -> str:
    """The number of parameters with two digits and a unit, as GGUF file names have it: 164M, 1.1B; "" for none."""
    if not parameters:
        return ""
    units = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}
    letter = next((letter for letter, unit in units.items() if parameters > unit), "K")
    scaled = parameters / units[letter]
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{letter}"


def _verify(path: Path, pieces: Sequence[Piece], count: Counter) -> None:
    """Compare every value of the file with the source rounded to its format; VerificationError names the first tensor
    that differs.

    The header is read as by any reader; the tensors' bytes are read, not mapped, so that a large file needs no memory.
    """
    with read_gguf(path) as file:
        infos = file.tensors
    if list(infos) != [piece.name for piece in pieces]:
        raise VerificationError(f"{path} has {len(infos)} tensors; expected {len(pieces)}, in the order of the family.")
    with closing(WeightFile(path)) as written:
        for piece in pieces:
            info = infos[piece.name]
            if (info.shape, info.type_id) != (piece.tensor.shape, piece.format.type_id):
                expected = f"{list(piece.tensor.shape)} as {piece.format.name}"
                raise VerificationError(f"{piece.name} is {list(info.shape)} as {info.type_name}; expected {expected}.")
            at = info.offset
            for start, stop in piece.spans():
                expected_raw = piece.encoded(start, stop)
                found_raw = np.empty_like(expected_raw)
                written.read_into(found_raw.reshape(-1).data, at)
                _compare(piece, start, decode(piece.format, found_raw), decode(piece.format, expected_raw))
                at += found_raw.nbytes
                count.add(found_raw.nbytes)


def _compare(piece: Piece, start: int, found: Floats, expected: Floats) -> None:
    """Bit for bit, so that NaN equals itself and -0 is not 0."""
    different = found.view(np.uint32) != expected.view(np.uint32)
    if not different.any():
        return
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - expected)
    largest = np.nanmax(difference[different], initial=0.0)
    row = start + int(np.argmax(different.any(axis=1)))
    count = int(different.sum())
    raise VerificationError(
        f"{piece.name} differs from {piece.tensor.stored.name} rounded to {piece.format.name} "
        f"in {count} value{'s' if count > 1 else ''} from row {row} on, by up to {largest:g}.",
        hint="The disk or the memory of this machine may be at fault; nothing was kept.",
    )
