"""Edits in files: a JSON list of them, with tensors as numbers or in a safetensors file beside it.

[{"value": "layer_output", "op": "add", "layers": 6, "factor": 4.0,
  "tensor": {"file": "happy.safetensors", "name": "direction"}},
 {"value": "attention_head_outputs", "op": "zero", "layers": 3, "heads": [0, 5]}]
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starscope.checkpoint.content import short
from starscope.checkpoint.files import read_bytes
from starscope.checkpoint.safetensors import read_safetensors
from starscope.errors import InvalidContentError, OutputExistsError, StarscopeError, UsageError
from starscope.gguf.writer import atomic_output
from starscope.microscope.edits import Edit
from starscope.microscope.storing import write_safetensors

REFERENCE = ("file", "name")  # what a tensor in another file is given by


def edits_to_json(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Edits as JSON data."""
    return [edit.to_json() for edit in edits]


def edits_from_json(data: Any, folder: Path | None = None) -> list[Edit]:
    """The edits that JSON data describe, one or a list. Tensors in files are looked for in `folder`.

    InvalidContentError says which edit is wrong, and how.
    """
    given = data if isinstance(data, list) else [data]
    made = []
    for i, one in enumerate(given):
        try:
            made.append(Edit.from_json(_with_tensor(one, folder)))
        except StarscopeError as error:
            place = f"edits[{i}]: " if isinstance(data, list) else ""
            raise type(error)(place + error.message, hint=error.hint) from None
    return made


def _with_tensor(data: Any, folder: Path | None) -> Any:
    """The data of an edit with the tensor itself in place of a reference."""
    if not isinstance(data, dict) or not isinstance(data.get("tensor"), dict):
        return data
    reference = data["tensor"]
    if sorted(reference) != sorted(REFERENCE) or not all(isinstance(one, str) for one in reference.values()):
        raise InvalidContentError(
            f"a tensor is {short(reference)}; expected numbers, or the file and the name of a tensor in it."
        )
    file, name = reference["file"], reference["name"]
    if folder is None:
        raise InvalidContentError(f"a tensor is in {file}, and it is not known where that lies; expected numbers.")
    if not file or "\0" in file or Path(file).name != file or file in (".", ".."):
        raise InvalidContentError(f"a tensor is in {file!r}; expected the name of a file beside the edits.")
    tensors = read_safetensors(folder / file)
    if name not in tensors:
        raise InvalidContentError(f"{folder / file} has no {name!r}; it has {', '.join(list(tensors)[:8])}.")
    return {**data, "tensor": tensors[name].read()}


def read_edits(path: str | os.PathLike[str]) -> list[Edit]:
    """The edits of a file. InputError when it cannot be read, InvalidContentError for what is no edit."""
    path = Path(path)
    data = read_bytes(path)
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidContentError(f"{path} is not valid JSON: {error}.") from None
    try:
        return edits_from_json(parsed, path.parent)
    except InvalidContentError as error:
        raise InvalidContentError(f"{path}: {error.message}", hint=error.hint) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def write_edits(
    path: str | os.PathLike[str], edits: Sequence[Edit], *, tensors: str | None = None, force: bool = False
) -> None:
    """Write edits. `tensors` is the name of a safetensors file beside it that their tensors go into; without it they
    are numbers in the JSON. OutputExistsError for a file that is there, unless `force`.
    """
    path = Path(path)
    if tensors is not None and (not tensors.endswith(".safetensors") or Path(tensors).name != tensors):
        raise UsageError(f"tensors is {tensors!r}; expected the name of a .safetensors file, without a folder.")
    data = edits_to_json(edits)
    arrays = {f"edits.{i}": edit.tensor for i, edit in enumerate(edits) if edit.tensor is not None}
    if tensors is not None:
        for i, one in enumerate(data):
            if "tensor" in one:
                one["tensor"] = {"file": tensors, "name": f"edits.{i}"}
        if path.exists() and not force:
            raise OutputExistsError(f"{path} exists.")
        write_safetensors(path.parent / tensors, arrays, {}, force=force)
    lines = ",\n ".join(json.dumps(one, ensure_ascii=False, allow_nan=False) for one in data)
    content = f"[{lines}]\n".encode()
    with atomic_output(path, len(content), force=force) as put:
        put(content)
