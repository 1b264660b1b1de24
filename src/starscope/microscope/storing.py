"""Arrays as a safetensors file: a length, a JSON header, the numbers. Written whole or not at all.

    write_safetensors("values.safetensors", {"logits": array}, {"prompt_ids": "[[1, 2]]"})

The same arrays and texts give the same bytes: no time and no path is in it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from starscope.errors import UnsupportedError
from starscope.gguf.writer import atomic_output

DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64"}
ALIGNMENT = 8  # bytes: where the numbers begin


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, npt.NDArray[np.generic]],
    metadata: Mapping[str, str],
    *,
    force: bool = False,
) -> int:
    """Writes a file and returns its size in bytes.

    Raises OutputExistsError when `path` exists and `force` is not given, DoesNotFitError when the disk is too small,
    and OutputError when it cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise UnsupportedError(f"{name} is {array.dtype}; expected one of {', '.join(DTYPES)}.")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    total = 8 + len(text) + end
    with atomic_output(path, total, force=force) as put:
        put(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            put(little.data.cast("B") if little.size else b"")
    return total
