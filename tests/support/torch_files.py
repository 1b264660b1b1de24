"""PyTorch files assembled by hand, pickle instruction by pickle instruction, so that they may lie.

write_archive(path, state(w=make_tensor(shape=(3, 2), strides=(2, 1))))     # six numbers, 0 to 5, as data/0
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def values(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def named(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + values(*arguments) + b"R"


EMPTY = call(named("collections", "OrderedDict"))


def storage(kind: str = "FloatStorage", key: str = "0", size: int = 6) -> bytes:
    return values(text("storage"), named("torch", kind), text(key), text("cpu"), number(size)) + b"Q"


def make_tensor(
    stored: bytes | None = None, offset: int = 0, shape: tuple[int, ...] = (2, 3), strides: Any = (3, 1), *more: bytes
) -> bytes:
    sizes, steps = (values(*map(number, numbers)) for numbers in (shape, strides))
    arguments = (storage() if stored is None else stored, number(offset), sizes, steps, b"\x89", EMPTY, *more)
    return call(named("torch._utils", "_rebuild_tensor_v2"), *arguments)


def state(**entries: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u."


ZEROS = {"data/0": np.arange(6, dtype=np.float32).tobytes()}


def write_archive(
    path: Path, pickled: bytes, entries: dict[str, bytes] = ZEROS, *, method: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("m/data.pkl", pickled)
        for key, data in entries.items():
            archive.writestr(key if key.startswith(("/", "..", "other")) else f"m/{key}", data)
    return path
