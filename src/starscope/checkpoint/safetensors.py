"""safetensors files: eight bytes of length, a JSON header (name -> dtype, shape, byte range) and the bytes.

The header is checked here: ranges must follow one another and cover the file exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starscope.checkpoint.content import cut, short
from starscope.checkpoint.files import WeightFile, parse_object
from starscope.checkpoint.tensor import DTYPE_BITS, StoredTensor
from starscope.errors import CheckpointError

MOST_VALUES = 1 << 63  # of one tensor, unless a size is 0
HEADER_LIMIT = 100_000_000  # bytes; the limit that the safetensors library sets


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their bytes; nothing but the header is read."""
    file = WeightFile(path)
    entries, data_start = _read_header(file)
    tensors: list[StoredTensor] = []
    for name, entry in entries.items():
        dtype, shape, begin = _checked_entry(path, name, entry)
        tensors.append(StoredTensor(name, dtype, shape, data_start + begin, file))
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_ranges(file, data_start, tensors)
    return {tensor.name: tensor for tensor in tensors}


def _read_header(file: WeightFile) -> tuple[dict[str, Any], int]:
    """The header without `__metadata__`, and where the tensors' bytes start."""
    if file.size < 8:
        raise CheckpointError(f"{file.path} has {file.size} bytes; a safetensors file has at least 8.")
    prefix = bytearray(8)
    file.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        raise CheckpointError(f"{file.path} says that its header has {length} bytes; expected at most {HEADER_LIMIT}.")
    if length > file.size - 8:
        expected = f"expected {8 + length} bytes for just the header, found {file.size}"
        raise CheckpointError(f"{file.path} is cut: {expected}.", hint="Download it again.")
    data = bytearray(length)
    file.read_into(memoryview(data), 8)
    if not data.startswith(b"{"):
        start = bytes(data[:8])
        raise CheckpointError(
            f"{file.path} is not a safetensors file: its header starts with {start!r}; expected '{{'."
        )
    entries = parse_object(bytes(data), f"{file.path}: the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file.path}: __metadata__ is not a table of strings.")
    return entries, 8 + length


def _checked_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and first byte of one header entry, after checking that they and its last byte agree."""
    where = f"{path}: {cut(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = cut(", ".join(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise CheckpointError(f"{where} has {found or 'nothing'}; expected dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {short(dtype)}; expected one of {', '.join(DTYPE_BITS)}.")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where} has shape {short(shape)}; expected a list of sizes.")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {short(offsets)}; expected where its bytes begin and end.")
    bits = DTYPE_BITS[dtype] if 0 not in shape else 0
    for size in shape:
        bits *= size
        if bits > DTYPE_BITS[dtype] * MOST_VALUES:  # a product of a million sizes would take minutes
            break
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise CheckpointError(f"{where} has {end - begin} bytes; expected {bits / 8:.10g} for {dtype} {short(shape)}.")
    return dtype, tuple(shape), begin


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_ranges(file: WeightFile, data_start: int, tensors: Iterable[StoredTensor]) -> None:
    """The byte ranges follow one another from the first byte to the last of the file."""
    at = data_start
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            found = f"{cut(tensor.name)} starts at byte {tensor.offset} and {what}"
            raise CheckpointError(f"{file.path}: {found}; expected {at}.")
        at += tensor.nbytes
    if at > file.size:
        raise CheckpointError(f"{file.path} is cut: expected {at} bytes, found {file.size}.", hint="Download it again.")
    if at < file.size:
        raise CheckpointError(f"{file.path} has {file.size} bytes; expected {at}, where its last tensor ends.")
