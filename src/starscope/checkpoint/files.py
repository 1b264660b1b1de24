"""Files of a model's folder: regular files alone, JSON without repeated keys, bytes by position."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from starscope.checkpoint.content import cut, short
from starscope.errors import CheckpointError, InputError

LFS_POINTER = b"version https://git-lfs.github.com/"  # how the stand-in of a file that was not fetched begins
LFS_LIMIT = 1024  # bytes; the format's own limit for a pointer


class WeightFile:
    """One file of weights, opened once and read by position; threads may read at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size
        if self.size < LFS_LIMIT and os.pread(self._fd, len(LFS_POINTER), 0) == LFS_POINTER:
            raise InputError(f"{path} is a Git LFS pointer, not the file itself.", hint="Fetch it with git lfs pull.")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`. CheckpointError when the file has become shorter."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise InputError(f"{self.path} cannot be read: {error.strerror}.") from error
            if count == 0:
                missing = len(buffer) - done
                raise CheckpointError(f"{self.path} ends at byte {offset + done}; expected {missing} bytes more.")
            done += count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def open_regular(path: Path) -> int:
    """A file descriptor of a regular file (a pipe or a device would block or never end)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(f"{path} {unreadable(path, error)}.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path} is not a regular file.")
    return fd


def unreadable(path: Path, error: OSError) -> str:
    """What is the matter with a file or folder that cannot be opened, as the rest of a sentence."""
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself"
    if error.errno == errno.ENOENT and os.path.islink(path):
        return f"is a link to {cut(os.readlink(path))}, which does not exist"
    return f"cannot be read: {error.strerror}"


def is_there(path: Path) -> bool:
    """Whether there is anything of this name: a link to what is gone is an error to report, not an absent file."""
    return os.path.lexists(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose keys are unique; CheckpointError says what is wrong with it."""
    return parse_object(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """All of a regular file."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: Path) -> str:
    """All of a regular file, with line ends as line feeds. UnicodeDecodeError when it is not UTF-8."""
    with open(open_regular(path), encoding="utf-8") as file:
        return file.read()


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object whose keys are unique, from UTF-8; CheckpointError says what is wrong with it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{where} says {short(twice)} twice.")
        return found

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is a JSON {type(parsed).__name__}; expected an object.")
    return parsed
