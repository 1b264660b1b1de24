"""A model as a Hugging Face folder: config.json, model.safetensors and the tokenizer's files.

transformers and vLLM load it, and `starscope convert` makes the GGUF file of it that it came from. Weights pass through
memory a tensor at a time.

    report = export_gguf("model-q8_0.gguf", "model-hf")
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from starscope.checkpoint import open_checkpoint
from starscope.convert import ConversionReport, encode_checked
from starscope.engine.weights import Weights
from starscope.errors import OutputError, OutputExistsError, UnsupportedError, UsageError, VerificationError
from starscope.family import Family, HParams, Slot, write_config
from starscope.formats import decode, find_format
from starscope.gguf.writer import atomic_output
from starscope.mapping import map_checkpoint
from starscope.tokenizer import Tokenizer

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # TYPE -> torch's name
WEIGHTS = "model.safetensors"
EXPORTED = frozenset(
    {"config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
)  # the files of a folder that is written here
ALIGNMENT = 8  # bytes: where the numbers of a safetensors file begin
TIE_KEY = "tie_word_embeddings"
Progress = Callable[[int, int], None]


def export_gguf(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str = "f32",
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the model of the GGUF file `source` as the folder `out`, quantized weights decoded to `to`: f32, f16, bf16.

    Raises OutputExistsError unless `force`, GGUFError and UnsupportedError for the file, DoesNotFitError and
    OutputError for the disk.
    """
    from starscope.model import load

    began, folder = time.perf_counter(), Path(out)
    check_folder(folder, force)
    _torch_name(to)
    model = load(Path(source), engine="numpy")
    if model.path.is_dir():
        raise UsageError(f"{source} is a folder already; expected a GGUF file.")
    names = [name for name in model.weights if not model.weights.is_tied(name)]
    size = write_folder(
        folder, model.family, model.hparams, model.weights, model.tokenizer, to=to, force=force, progress=progress
    )
    parameters = sum(model.weights.slots[name].parameters for name in names)
    seconds = time.perf_counter() - began
    return ConversionReport(folder, size, seconds, len(names), parameters, model.family.name, to.lower(), model.notes)


def check_folder(folder: Path, force: bool) -> None:
    """Refuse, before any work, a folder that exists unless `force`, and always one that holds anything but a model."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OutputError(f"{folder} is a file; expected the name of a folder to write.")
    if not any(folder.iterdir()):
        return
    if not force:
        raise OutputExistsError(f"{folder} exists.")
    others = sorted(path.name for path in folder.iterdir() if path.name not in EXPORTED)
    if others:
        raise OutputExistsError(
            f"{folder} has {others[0]}, which is not part of an exported model: nothing was replaced.",
            hint="Choose another folder, or move that file.",
        )


def write_folder(
    folder: Path,
    family: Family,
    hp: HParams,
    weights: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    to: str = "f32",
    force: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a folder, which takes its name when it is complete; returns the bytes of its weights.

    `verify` opens it before that as any reader does, and compares every weight with those given.

    `weights` by our names; a tied tensor may be absent or, in `Weights`, stand for the other one. The same weights and
    tokenizer give the same bytes: no path and no time is written.
    """
    check_folder(folder, force)
    is_tied = weights.is_tied if isinstance(weights, Weights) else (lambda name: name not in weights)
    slots = [slot for slot in family.slots(hp) if not (slot.made or (slot.tied_to and is_tied(slot.name)))]
    tied = any(slot.tied_to and is_tied(slot.name) for slot in family.slots(hp))
    torch_name = _torch_name(to)
    config = {**write_config(family, hp), TIE_KEY: tied, "torch_dtype": torch_name, **_token_ids(tokenizer)}
    ends = list(tokenizer.end_ids)
    documents = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        },
        **tokenizer.to_files(),
    }
    documents["tokenizer_config.json"]["model_max_length"] = hp.context_length
    with _new_folder(folder) as made:
        for name, document in documents.items():
            text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
            (made / name).write_text(text, encoding="utf-8")
        size = _write_weights(made / WEIGHTS, slots, weights, to.lower(), progress)
        if verify:
            _verify(made, slots, weights, to.lower())
        return size


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer's files alone, in a folder that may be there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in tokenizer.to_files().items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _verify(folder: Path, slots: Sequence[Slot], weights: Mapping[str, np.ndarray], to: str) -> None:
    """VerificationError when a weight that is read from the folder is another than the one given, rounded to `to`."""
    format_ = find_format(to)
    with open_checkpoint(folder) as checkpoint:
        mapped = map_checkpoint(checkpoint)
        for slot in slots:
            found = mapped.read(slot)
            wanted = decode(format_, encode_checked(slot.name, format_, weights[slot.name].reshape(-1, slot.shape[-1])))
            if found.tobytes() != wanted.tobytes():
                raise VerificationError(f"{slot.hf} in {folder.name} differs from the weights that it was made of.")


def _torch_name(to: str) -> str:
    if to.lower() not in DTYPES:
        raise UnsupportedError(f"a Hugging Face folder cannot have the type {to!r}; supported: {', '.join(DTYPES)}.")
    return DTYPES[to.lower()]


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of a config, null where there is none: its class would otherwise say ids of a vocabulary of its own."""
    end = next(iter(tokenizer.end_ids), None)
    begin = end if tokenizer.bos_id is None else tokenizer.bos_id
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": tokenizer.pad_id}


def _write_weights(
    path: Path, slots: Sequence[Slot], weights: Mapping[str, np.ndarray], to: str, progress: Progress | None
) -> int:
    """All tensors in one safetensors file, each read, put into the checkpoint's order of rows, and forgotten."""
    format_ = find_format(to)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        begin, end = end, end + format_.nbytes(slot.shape)
        header[slot.hf] = {"dtype": to.upper(), "shape": list(slot.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    total = 8 + len(text) + end
    with atomic_output(path, total) as put:
        put(struct.pack("<Q", len(text)) + text)
        done = 0
        for slot in slots:
            raw = encode_checked(slot.name, format_, _their_rows(slot, weights[slot.name]))
            put(raw.reshape(-1).data)
            if isinstance(weights, Weights):
                weights.forget(slot.name)
            done += raw.nbytes
            if progress is not None:
                progress(done, end)
    return total


def _their_rows(slot: Slot, ours: np.ndarray) -> np.ndarray:
    """A tensor with its rows in the checkpoint's order, two-dimensional."""
    rows = ours.reshape(-1, slot.shape[-1]) if len(slot.shape) > 1 else ours.reshape(-1, 1)
    if slot.hf_rows is not None:
        theirs = np.empty_like(rows)
        theirs[slot.hf_rows] = rows
        rows = theirs
    return np.ascontiguousarray(rows.reshape(-1, slot.shape[-1]), np.float32)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that is filled under another name; complete, it takes its own, and the place of an old one.

    A link to a folder stays, and the folder behind it is replaced.
    """
    folder = Path(os.path.realpath(folder))
    temporary = folder.with_name(f".starscope-{secrets.token_hex(8)}")
    old = folder.with_name(f".starscope-{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        if os.path.lexists(folder):
            folder.rename(old)
        try:
            temporary.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
