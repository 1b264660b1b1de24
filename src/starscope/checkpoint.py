"""A Hugging Face folder: its config, and its weights in safetensors files, whole or in shards.

A safetensors file is eight bytes of length, a JSON header (name -> dtype, shape, byte range) and the bytes. The
header is checked here: ranges must follow one another and cover the file exactly. Bytes are read with pread into
the caller's buffers, never mapped, so that a model of any size passes through a few megabytes of memory:

    with open_checkpoint("starcoderbase-1b") as checkpoint:
        rows = checkpoint.tensors["transformer.wte.weight"].read_rows(0, 1024)   # float32 [1024 hidden_size]
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from starscope.errors import CheckpointError, InputError, UnsupportedError
from starscope.formats import Format, decode, find_format

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; the limit that the safetensors library sets
# Bits of one element, for every type of the format; the ones in STORED are what weights come in.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
STORED = ("F32", "F16", "BF16")
OTHER_WEIGHTS = {
    "pytorch_model*.bin": "PyTorch pickles (pytorch_model*.bin)",
    "tf_model.h5": "TensorFlow weights (tf_model.h5)",
    "flax_model*.msgpack": "Flax weights (flax_model*.msgpack)",
    "*.pt": "PyTorch pickles (*.pt)",
    "*.pth": "PyTorch pickles (*.pth)",
}
EXPECTED = "Expected the folder of a Hugging Face model."
RESAVE = (
    "This version reads safetensors. Save the model again with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)."
)


class WeightFile:
    """One file of weights, opened once and read by position; threads may read at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_regular(path)
        self.size = os.fstat(self._fd).st_size

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


@dataclass(frozen=True)
class CheckpointTensor:
    """One stored tensor: `nbytes` bytes of `dtype` at `offset` of its file, in rows along the first axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: WeightFile = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def num_rows(self) -> int:
        """Rows of a matrix; a vector is one row, as in a GGUF file."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.num_rows if self.num_rows else 0

    @property
    def format(self) -> Format:
        """The format that its bytes are in. UnsupportedError for a type that weights are not stored in."""
        if self.dtype not in STORED:
            known = ", ".join(STORED)
            raise UnsupportedError(f"{self.path}: {self.name} is stored as {self.dtype}; supported: {known}.")
        return find_format(self.dtype)

    def read_raw_rows(self, start: int, stop: int, into: np.ndarray | None = None) -> np.ndarray:
        """Rows start … stop as stored: uint8 [rows row_bytes], in `into` (uint8, at least as long) when given."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.name}, which has {self.num_rows}")
        size = (stop - start) * self.row_bytes
        raw = np.empty(size, np.uint8) if into is None else into[:size]
        self.file.read_into(raw.data, self.offset + start * self.row_bytes)
        return raw.reshape(stop - start, self.row_bytes)

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start … stop as float32 [rows, …]; of a vector, row 0 is all of it."""
        raw = self.read_raw_rows(start, stop)
        shape = (stop - start, *self.shape[1:]) if len(self.shape) > 1 else (stop - start, *self.shape)
        return decode(self.format, raw).reshape(shape) if raw.size else np.zeros(shape, np.float32)

    def read(self) -> np.ndarray:
        """The whole tensor as float32, in its shape."""
        return self.read_rows(0, self.num_rows).reshape(self.shape)


@dataclass
class Checkpoint:
    """An open folder. `tensors` is empty when it was opened without its weights."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, CheckpointTensor]

    def readme_metadata(self) -> dict[str, str]:
        """The one-line values of README.md's front matter (license, base_model, …); empty without one."""
        path = self.folder / "README.md"
        if not os.path.isfile(path):
            return {}
        return parse_front_matter(_read_bytes(path).decode("utf-8", "replace"))

    def close(self) -> None:
        for tensor in self.tensors.values():
            tensor.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(folder: str | os.PathLike[str], *, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face folder: its config and, unless `weights` is false, the headers of its weight files.

    InputError when something is missing, UnsupportedError for weights that are not safetensors, CheckpointError for
    parts that do not fit together.
    """
    folder = Path(folder)
    _check_is_folder(folder)
    if not os.path.isfile(folder / "config.json"):
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        raise InputError(
            f"{folder} has no config.json.",
            hint=f"It holds {gguf[0]}, which is converted already." if gguf else EXPECTED,
        )
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if os.path.isfile(generation) else None
    return Checkpoint(folder, config, generation_config, _open_weights(folder) if weights else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose keys are unique; CheckpointError says what is wrong with it."""
    return _parse_object(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    with open(_open_regular(path), "rb") as file:
        return file.read()


def parse_front_matter(text: str) -> dict[str, str]:
    """`key: value` lines between the two `---` lines that a model card begins with; lists and nested keys are left."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() in ("---", "..."):
            return found
        match = re.fullmatch(r"([A-Za-z_][\w-]*):[ \t]+(.+?)\s*", line)
        if match and match[2][0] not in "[{|>&*#":
            found[match[1]] = _unquoted(match[2])
    return {}


def _unquoted(value: str) -> str:
    quoted = re.match(r"""(["'])(.*?)\1\s*(#.*)?$""", value)
    return quoted[2] if quoted else re.sub(r"\s+#.*$", "", value)


def _check_is_folder(folder: Path) -> None:
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            os.listdir(f"{folder}/.")  # fails when it may not be read or entered
            return
    except FileNotFoundError:
        raise InputError(f"{folder} does not exist.", hint=EXPECTED) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder} cannot be read: {reason}.") from error
    with open(_open_regular(folder), "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        raise InputError(
            f"{folder} is a GGUF file; expected the folder of a Hugging Face model.",
            hint="To store its weights in another format, use starscope quantize.",
        )
    raise InputError(
        f"{folder} is a file.", hint="Expected the folder of a Hugging Face model: name the one that holds it."
    )


def _open_regular(path: Path) -> int:
    """A file descriptor of a regular file (a pipe or a device would block or never end)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path} is not a regular file.")
    return fd


def _open_weights(folder: Path) -> dict[str, CheckpointTensor]:
    """Tensors of model.safetensors or, as in transformers only when there is none, of the shards of the index."""
    if os.path.exists(folder / SINGLE):
        return read_safetensors(folder / SINGLE)
    if os.path.exists(folder / INDEX):
        return _open_shards(folder)
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise InputError(f"{folder} has {len(shards)} shards and no {INDEX}; expected the index beside {shards[0]}.")
    for pattern, what in OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            raise UnsupportedError(f"{folder} holds {what} and no {SINGLE}.", hint=RESAVE)
    raise InputError(f"{folder} has no weights; expected {SINGLE} or {INDEX} with its shards.")


def _open_shards(folder: Path) -> dict[str, CheckpointTensor]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected tensor names with the shard that each is in.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{index}: {name} is in {shard!r}; expected the plain name of a file beside it.")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(folder / shard)]
    if missing:
        raise InputError(
            f"{folder} has {len(shards) - len(missing)} of {len(shards)} shards; missing: {', '.join(missing)}.",
            hint="Download the rest.",
        )
    tensors: dict[str, CheckpointTensor] = {}
    for shard in shards:
        found = read_safetensors(folder / shard)
        expected = {name for name, where in weight_map.items() if where == shard}
        for name in sorted(expected - set(found)):
            raise CheckpointError(f"{folder / shard} has no {name}, which {INDEX} says is there.")
        for name in sorted(set(found) - expected):
            raise CheckpointError(f"{folder / shard} has {name}, which {INDEX} does not list there.")
        tensors.update(found)
    return tensors


def read_safetensors(path: Path) -> dict[str, CheckpointTensor]:
    """The tensors of one safetensors file, in the order of their bytes; nothing but the header is read."""
    file = WeightFile(path)
    entries, data_start = _read_header(file)
    tensors: list[CheckpointTensor] = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _checked_entry(path, name, entry)
        tensors.append(CheckpointTensor(name, dtype, shape, data_start + begin, end - begin, file))
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
        expected = f"expected {8 + length} bytes for the header alone, found {file.size}"
        raise CheckpointError(f"{file.path} is cut: {expected}.", hint="Download it again.")
    data = bytearray(length)
    file.read_into(memoryview(data), 8)
    if not data.startswith(b"{"):
        start = bytes(data[:8])
        raise CheckpointError(
            f"{file.path} is not a safetensors file: its header starts with {start!r}; expected '{{'."
        )
    entries = _parse_object(bytes(data), f"{file.path}: the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file.path}: __metadata__ is not a table of strings.")
    return entries, 8 + length


def _checked_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and byte range of one header entry, which must agree with one another."""
    where = f"{path}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
        raise CheckpointError(f"{where} has {found or 'nothing'}; expected dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {dtype!r}; expected one of {', '.join(DTYPE_BITS)}.")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where} has shape {shape!r}; expected a list of sizes.")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}; expected where its bytes begin and end.")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise CheckpointError(f"{where} has {end - begin} bytes; expected {bits / 8:.10g} for {dtype} {list(shape)}.")
    return dtype, tuple(shape), begin, end


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_ranges(file: WeightFile, data_start: int, tensors: Iterable[CheckpointTensor]) -> None:
    """The byte ranges follow one another from the first byte to the last of the file."""
    at = data_start
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            found = f"{tensor.name} starts at byte {tensor.offset} and {what}"
            raise CheckpointError(f"{file.path}: {found}; expected {at}.")
        at += tensor.nbytes
    if at > file.size:
        raise CheckpointError(f"{file.path} is cut: expected {at} bytes, found {file.size}.", hint="Download it again.")
    if at < file.size:
        raise CheckpointError(f"{file.path} has {file.size} bytes; expected {at}, where its last tensor ends.")


def _parse_object(data: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{where} says {twice!r} twice.")
        return found

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is a JSON {type(parsed).__name__}; expected an object.")
    return parsed
