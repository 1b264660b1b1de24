"""A run's log: a JSON object a line, each with the step at which it was written, in log.jsonl.

    append_line(path, {"step": 10, "loss": 2.5})
    read_log(path)                          # [{"step": 10, "loss": 2.5}]

It is not what a run goes on from: a line that a machine's end has damaged is left out, and the run goes on.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starscope.checkpoint.files import read_bytes
from starscope.errors import DoesNotFitError, OutputError

LOG = "log.jsonl"

Line = Mapping[str, Any]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log. InputError when there is none."""
    return [found for _, found in _lines(path)]


def append_line(path: Path, line: Line) -> None:
    """Add one to a log. DoesNotFitError when the disk is full, OutputError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
    except OSError as error:
        raise unwritable(path, error) from error


def trim_log(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which are about to be made again."""
    if not path.exists():
        return
    kept = b"".join(raw for raw, line in _lines(path) if line["step"] <= step)
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(kept)
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> DoesNotFitError | OutputError:
    """The system's error about a file of a run in our words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFitError(f"{path} cannot be written: the disk is full.", hint="Free some space or take another.")
    return OutputError(f"{path} cannot be written: {error.strerror}.")


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines that are whole, as they are and read."""
    for raw in read_bytes(path).splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if raw.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), int):
            yield raw, line
