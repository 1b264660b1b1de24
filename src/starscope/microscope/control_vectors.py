"""Steering vectors as GGUF files, in the form that llama.cpp reads and repeng writes ("control vectors").

`general.architecture` is "controlvector", and `direction.N` (float32 `[hidden_size]`) is added to the output of block
N, counted from 0, at every position. There is none for block 0.

    with model.editing(steering_from_gguf("happy.gguf", scale=0.8)): ...
    steering_to_gguf("happy.gguf", {6: direction, 7: direction}, "gpt_bigcode")
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from starscope.checkpoint.content import cut
from starscope.errors import InvalidContentError, UsageError
from starscope.formats import find_format
from starscope.gguf import OutputTensor, read_gguf, string, u32, write_gguf
from starscope.microscope.edits import Edit
from starscope.microscope.tensors import as_array

ARCHITECTURE = "controlvector"
_DIRECTION = re.compile(r"direction\.([1-9]\d{0,8})")


def steering_from_gguf(path: str | os.PathLike[str], scale: float = 1.0) -> list[Edit]:
    """The vectors of a file, times `scale`, as edits that add them to the outputs of blocks.

    Raises InvalidContentError for a file that is no control vector; that its sizes are a model's is seen when the model
    gets the edits.
    """
    with read_gguf(path) as file:
        architecture = file.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise InvalidContentError(f"{path} is of {cut(str(architecture))}; expected {ARCHITECTURE}.")
        directions: dict[int, Any] = {}
        for name, info in file.tensors.items():
            match = _DIRECTION.fullmatch(name)
            if match is None:
                raise InvalidContentError(f"{path} has {cut(name)}; expected only direction.1, direction.2, ...")
            if info.type_name != "F32" or len(info.shape) != 1:
                raise InvalidContentError(
                    f"{path}: {name} is {info.type_name} {list(info.shape)}; expected F32 [hidden_size]."
                )
            directions[int(match[1])] = file.read(name).view(np.float32).reshape(-1)
    widths = {len(direction) for direction in directions.values()}
    if len(widths) != 1:
        found = f"vectors of {' and '.join(map(str, sorted(widths)))} numbers" if widths else "no vector"
        raise InvalidContentError(f"{path} has {found}; expected one of the hidden size for each of its blocks.")
    try:
        return [
            Edit("layer_output", "add", layers=layer, tensor=direction, factor=scale)
            for layer, direction in sorted(directions.items())
        ]
    except UsageError as error:
        raise InvalidContentError(f"{path}: {error.message}") from None


def steering_to_gguf(
    path: str | os.PathLike[str], vectors: Mapping[int, Any], model_hint: str, *, force: bool = False
) -> None:
    """Write vectors `[hidden_size]`, by the block whose output they are added to. `model_hint` names the kind of model.

    Raises UsageError for block 0, which the format has no place for, and what `write_gguf` raises.
    """
    arrays: dict[int, np.ndarray[Any, Any]] = {}
    for layer, given in vectors.items():
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 1:
            raise UsageError(f"there is a vector for block {layer!r}; control vectors are for blocks 1 and up.")
        array = as_array(given)
        if array.ndim != 1 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise UsageError(
                f"the vector of block {layer} is {array.dtype} {list(array.shape)}; expected [hidden_size]."
            )
        arrays[layer] = np.ascontiguousarray(array, "<f4")
    if len({len(array) for array in arrays.values()}) != 1:
        raise UsageError(f"{len(arrays)} vectors of several sizes or none were given; expected one size.")
    metadata = {
        "general.architecture": string(ARCHITECTURE),
        f"{ARCHITECTURE}.model_hint": string(model_hint),
        f"{ARCHITECTURE}.layer_count": u32(len(arrays)),
    }
    tensors = [
        OutputTensor(f"direction.{layer}", array.shape, find_format("F32"), lambda data=array: [data])  # type: ignore[misc]
        for layer, array in sorted(arrays.items())
    ]
    write_gguf(path, metadata, tensors, force=force)
