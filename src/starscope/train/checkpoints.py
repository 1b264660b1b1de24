"""What a run saves: parameters, optimizer, step and data position, so that it goes on with the same bits.

A checkpoint is one .npz file (arrays and a JSON text, no pickle) behind a SHA-256 of it. It is written beside the
old one, flushed to the disk and renamed, and the old one is kept: whenever the machine stops, one of the two is whole.

    save_checkpoint(folder, State(step=100, arrays={...}, facts={...}))
    state, note = load_checkpoint(folder)           # note says why, when the previous one was taken
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from starscope.checkpoint.files import read_bytes
from starscope.errors import DoesNotFitError, InputError, InvalidContentError, OutputError

CURRENT, PREVIOUS = "checkpoint.bin", "checkpoint.previous.bin"
MAGIC = b"starscope checkpoint 1\n"
FACTS = "facts.json"


@dataclass(frozen=True)
class State:
    """`step` updates were made; `arrays` by name; `facts` is anything that JSON holds."""

    step: int
    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def save_checkpoint(folder: Path, state: State) -> None:
    """Write a checkpoint so that at every moment a whole one is there. DoesNotFitError when the disk is full."""
    buffer = io.BytesIO()
    facts = np.frombuffer(json.dumps({"step": state.step, **state.facts}).encode(), np.uint8)
    np.savez(buffer, **{FACTS: facts}, **dict(state.arrays))  # type: ignore[arg-type]
    payload = buffer.getbuffer()
    current, previous, temporary = folder / CURRENT, folder / PREVIOUS, folder / f"{CURRENT}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < len(payload):
            raise DoesNotFitError(
                f"{folder} has {free.f_bavail * free.f_frsize} bytes free; a checkpoint needs {len(payload)}."
            )
        with temporary.open("wb") as out:
            out.write(MAGIC + hashlib.sha256(payload).digest())
            out.write(payload)
            out.flush()
            os.fsync(out.fileno())
        if current.exists():
            current.replace(previous)
        temporary.replace(current)
        _sync_folder(folder)
    except OSError as error:
        raise OutputError(f"{current} cannot be written: {error.strerror}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[State, str]:
    """The newest whole checkpoint, and a sentence when it is not the newest one written."""
    try:
        return read_checkpoint(folder / CURRENT), ""
    except (InputError, InvalidContentError) as error:
        if not (folder / PREVIOUS).exists():
            raise
        return read_checkpoint(folder / PREVIOUS), f"{error.message} The previous checkpoint is used."


def read_checkpoint(path: Path) -> State:
    """One checkpoint file. InvalidContentError when it is cut or changed."""
    raw = read_bytes(path)
    start = len(MAGIC) + hashlib.sha256().digest_size
    if not raw.startswith(MAGIC) or hashlib.sha256(raw[start:]).digest() != raw[len(MAGIC) : start]:
        raise InvalidContentError(f"{path} is not a whole checkpoint: its checksum differs.")
    with np.load(io.BytesIO(raw[start:]), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files if name != FACTS}
        facts = json.loads(stored[FACTS].tobytes())
    return State(facts.pop("step"), arrays, facts)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
