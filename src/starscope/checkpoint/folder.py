"""A Hugging Face folder: its config, its model card and its weight files, whole or in shards."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starscope.checkpoint.content import cut, short
from starscope.checkpoint.files import is_there, open_regular, read_bytes, read_json, unreadable
from starscope.checkpoint.safetensors import read_safetensors
from starscope.checkpoint.tensor import StoredTensor
from starscope.checkpoint.torch_bin import read_torch_bin
from starscope.errors import CheckpointError, InputError, UnsupportedError

OTHER_WEIGHTS = {
    "tf_model.h5": "TensorFlow weights (tf_model.h5)",
    "flax_model*.msgpack": "Flax weights (flax_model*.msgpack)",
    "*.bin": "other files of PyTorch (*.bin)",
    "*.pt": "other files of PyTorch (*.pt)",
    "*.pth": "other files of PyTorch (*.pth)",
}
EXPECTED = "Expected the folder of a Hugging Face model."
RESAVE = (
    "Save the model again with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)."
)


@dataclass(frozen=True)
class Kind:
    """One kind of weight files: the names they go by and what reads one."""

    single: str
    index: str
    shards: str
    read: Callable[[Path], dict[str, StoredTensor]]


KINDS = (  # the first that is there is taken
    Kind("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors", read_safetensors),
    Kind("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin", read_torch_bin),
)


@dataclass
class Checkpoint:
    """An open folder. `tensors` is empty when it was opened without its weights."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, StoredTensor]

    def readme_metadata(self) -> dict[str, str]:
        """The one-line values of README.md's front matter (license, base_model, …); empty without one."""
        path = self.folder / "README.md"
        if not os.path.isfile(path):
            return {}
        return parse_front_matter(read_bytes(path).decode("utf-8", "replace"))

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

    InputError when something is missing, UnsupportedError for weights of a kind that is not read, CheckpointError
    for parts that do not fit together.
    """
    folder = Path(folder)
    _check_is_folder(folder)
    if not is_there(folder / "config.json"):
        if is_there(folder / "adapter_config.json"):
            raise UnsupportedError(
                f"{folder} is an adapter; expected a model.", hint="Give its model, and this beside it with --lora."
            )
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        raise InputError(
            f"{folder} has no config.json.",
            hint=f"It holds {gguf[0]}, which is converted already." if gguf else EXPECTED,
        )
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if is_there(generation) else None
    return Checkpoint(folder, config, generation_config, _open_weights(folder) if weights else {})


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
    except OSError as error:
        if not is_there(folder) and isinstance(error, FileNotFoundError):
            raise InputError(f"{folder} does not exist.", hint=EXPECTED) from None
        raise InputError(f"{folder} {unreadable(folder, error)}.") from error
    except ValueError as error:  # a path with a zero byte
        raise InputError(f"{folder} cannot be read: {error}.") from error
    with open(open_regular(folder), "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        raise InputError(
            f"{folder} is a GGUF file; expected the folder of a Hugging Face model.",
            hint="To store its weights in another format, use starscope quantize.",
        )
    raise InputError(
        f"{folder} is a file.", hint="Expected the folder of a Hugging Face model: name the one that holds it."
    )


def _open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the first kind of weights that there is.

    Of one file or, as in transformers only when there is none, of the shards of an index.
    """
    for kind in KINDS:
        if is_there(folder / kind.single):
            return kind.read(folder / kind.single)
        if is_there(folder / kind.index):
            return _open_shards(folder, kind)
    for kind in KINDS:
        shards = sorted(path.name for path in folder.glob(kind.shards))
        if shards:
            expected = f"expected the index beside {shards[0]}"
            several = "s" if len(shards) > 1 else ""
            raise InputError(f"{folder} has {len(shards)} shard{several} and no {kind.index}; {expected}.")
    names = " or ".join(kind.single for kind in KINDS)
    for pattern, what in OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            raise UnsupportedError(f"{folder} holds {what} and no {names}.", hint=RESAVE)
    raise InputError(f"{folder} has no weights; expected {names}, or shards with their index.")


def _open_shards(folder: Path, kind: Kind) -> dict[str, StoredTensor]:
    index = folder / kind.index
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected tensor names with the shard that each is in.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(
                f"{index}: {cut(name)} is in {short(shard)}; expected the plain name of a file beside it."
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(folder / shard)]
    if missing:
        raise InputError(
            f"{folder} has {len(shards) - len(missing)} of {len(shards)} shards; missing: {_listed(missing)}.",
            hint="Download the rest.",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        found = kind.read(folder / shard)
        expected = {name for name, where in weight_map.items() if where == shard}
        for name in sorted(expected - set(found)):
            raise CheckpointError(f"{folder / shard} has no {cut(name)}, which {kind.index} says is there.")
        for name in sorted(set(found) - expected):
            raise CheckpointError(f"{folder / shard} has {cut(name)}, which {kind.index} does not list there.")
        tensors.update(found)
    return tensors


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(map(cut, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
