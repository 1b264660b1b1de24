"""What a run saves: parameters, optimizer, step and data position, so that it goes on with the same bits.

A checkpoint is one .npz file (arrays and a JSON text, no pickle) behind a SHA-256 of it. It is written beside the
old one, flushed to the disk and renamed, and the old one is kept: whenever the machine stops, one of the two is whole.

    save_checkpoint(folder, State(step=100, arrays={...}, facts={...}))
    state, note = load_checkpoint(folder)           # note says why, when the previous one was taken
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from starscope.checkpoint.files import open_regular
from starscope.errors import DoesNotFitError, InputError, InvalidContentError
from starscope.train.log import unwritable

CURRENT, PREVIOUS = "checkpoint.bin", "checkpoint.previous.bin"
MAGIC = b"starscope checkpoint 1\n"
FACTS = "facts.json"
DIGEST_BYTES = hashlib.sha256().digest_size
START = len(MAGIC) + DIGEST_BYTES  # of the payload
ENTRY_BYTES = 1024  # at most, for an array's name and header in the file
PIECE_BYTES = 1 << 20  # read at a time


@dataclass(frozen=True)
class State:
    """`step` updates were made; `arrays` by name; `facts` is anything that JSON holds."""

    step: int
    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


class _Hashing:
    """A stream that is written once, from front to back, and knows the SHA-256 of what it was given."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self.sha = out, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()


def save_checkpoint(folder: Path, state: State) -> None:
    """Write a checkpoint so that at every moment a whole one is there. DoesNotFitError when the disk is full.

    Arrays go to the disk one by one: nothing is held twice.
    """
    facts = np.frombuffer(json.dumps({"step": state.step, **state.facts}).encode(), np.uint8)
    arrays = {FACTS: facts, **state.arrays}
    needed = START + sum(array.nbytes + ENTRY_BYTES for array in arrays.values())
    current, previous, temporary = folder / CURRENT, folder / PREVIOUS, folder / f"{CURRENT}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a run that was killed here: its bytes may be what is missing
        free = os.statvfs(folder)
        if free.f_blocks and free.f_bavail * free.f_frsize < needed:  # some file systems say nothing about their size
            raise DoesNotFitError(
                f"{folder} has {free.f_bavail * free.f_frsize} bytes free; a checkpoint needs {needed}.",
                hint="Free some space; --resume then goes on from the checkpoint before, if there is one.",
            )
        with temporary.open("wb") as out:
            out.write(MAGIC + bytes(DIGEST_BYTES))
            stream = _Hashing(out)
            with zipfile.ZipFile(stream, "w") as payload:  # type: ignore[call-overload]
                for name, array in arrays.items():
                    with payload.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
            out.seek(len(MAGIC))
            out.write(stream.sha.digest())
            out.flush()
            os.fsync(out.fileno())
        if current.exists():
            current.replace(previous)
        temporary.replace(current)
        _sync_folder(folder)
    except OSError as error:
        raise unwritable(current, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[State, str]:
    """The newest whole checkpoint, and a sentence when it is not the newest one written."""
    try:
        return read_checkpoint(folder / CURRENT), ""
    except (InputError, InvalidContentError) as error:
        if not (folder / PREVIOUS).exists():
            hint = "There is no checkpoint from before it; begin again with --force, or in another folder."
            raise type(error)(error.message, hint=hint) from None
        return read_checkpoint(folder / PREVIOUS), f"{error.message} The previous checkpoint is used."


def read_checkpoint(path: Path) -> State:
    """One checkpoint file. InvalidContentError when it is cut or changed."""
    with open(open_regular(path), "rb") as file:
        if not _is_whole(file):
            raise InvalidContentError(f"{path} is not a whole checkpoint: its checksum differs.")
        with zipfile.ZipFile(file) as payload:
            arrays = {entry.removesuffix(".npy"): _read_array(payload, entry) for entry in payload.namelist()}
    facts = json.loads(arrays.pop(FACTS).tobytes())
    return State(facts.pop("step"), arrays, facts)


def _is_whole(file: IO[bytes]) -> bool:
    head, sha = file.read(START), hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        sha.update(piece)
    return head.startswith(MAGIC) and sha.digest() == head[len(MAGIC) :]


def _read_array(payload: zipfile.ZipFile, entry: str) -> np.ndarray:
    with payload.open(entry) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
