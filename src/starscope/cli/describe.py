"""What `show` tells of a model, as data: one function for a GGUF file, one for a folder."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starscope.cli.units import count_text
from starscope.errors import StarscopeError

if TYPE_CHECKING:
    from starscope.checkpoint import Checkpoint, StoredTensor
    from starscope.family import Family, HParams
    from starscope.gguf import GGUFFile

SIZES = (  # standard names that `show` prints, in this order
    "context_length",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "activation",
    "vocab_size",
)
WEIGHT_FILES = (".safetensors", ".bin")


def describe_gguf(path: Path) -> dict[str, Any]:
    """Everything that `show` tells of a GGUF file."""
    from starscope.family import find_family_of_file, hparams_from_metadata
    from starscope.gguf import read_gguf

    with read_gguf(path) as file:
        family, hp, problems = None, None, []
        try:
            family = find_family_of_file(file)
            hp = hparams_from_metadata(family, file)
        except StarscopeError as error:
            problems.append(error.message)
        ours = {slot.gguf: slot.name for slot in family.slots(hp)} if family and hp else {}
        listed = [
            {
                "name": info.name,
                "value": ours.get(info.name),
                "shape": list(info.shape),
                "format": info.type_name,
                "bytes": info.nbytes,
            }
            for info in file.tensors.values()
        ]
        tokenizer, problem = describe_tokenizer(file, family)
        return {
            "path": str(path),
            "kind": f"GGUF v{file.version}",
            "file_bytes": sum(part.stat().st_size for part in file.paths),
            "architecture": text_of(file, "general.architecture"),
            "name": text_of(file, "general.name"),
            "license": text_of(file, "general.license"),
            **describe_model(family, hp, listed),
            "tokenizer": tokenizer,
            "metadata": {} if hp else own_keys(file),
            "problems": problems + ([problem] if problem else []),
            "tensors": listed,
        }


def describe_folder(path: Path) -> dict[str, Any]:
    """Everything that `show` tells of a Hugging Face folder."""
    from starscope.family import find_family_for_config
    from starscope.mapping import checkpoint_hparams, count_parameters
    from starscope.tokenizer import Tokenizer

    checkpoint, problems = open_folder(path)
    stored = [file for file in path.iterdir() if file.suffix in WEIGHT_FILES and file.is_file()]
    unreadable = {"vocabulary_only": False, "parameters": None} if problems and stored else {}
    with checkpoint:
        family, hp, parameters = None, None, None
        try:
            family = find_family_for_config(checkpoint.config)
            hp = checkpoint_hparams(family, checkpoint)
            parameters = count_parameters(family, checkpoint, hp)
        except StarscopeError as error:
            problems.append(error.message)
        ours = {slot.hf: slot.name for slot in family.slots(hp)} if family and hp else {}
        listed = [
            {
                "name": tensor.name,
                "value": ours.get(tensor.name),
                "shape": list(tensor.shape),
                "format": tensor.dtype,
                "bytes": tensor.nbytes,
            }
            for tensor in checkpoint.tensors.values()
        ]
        readme = checkpoint.readme_metadata()
        tokenizer = None
        try:
            read = Tokenizer.from_folder(path, checkpoint.config, checkpoint.generation_config)
            tokenizer = {
                "model": read.model,
                "pre": read.pre_tokenizer,
                "pre_is_assumed": False,
                "tokens": read.vocab_size,
                "bos": read.bos_id,
                "eos": read.eos_id,
                "fim": None if read.fim is None else fim_ids(vars(read.fim)),
            }
        except StarscopeError as error:
            problems.append(error.message)
        files = {tensor.path for tensor in checkpoint.tensors.values()}
        architectures, origin = (checkpoint.config.get(key) for key in ("architectures", "_name_or_path"))
        return {
            "path": str(path),
            "kind": "Hugging Face folder",
            "file_bytes": sum(file.stat().st_size for file in (stored if unreadable else files)),
            "architecture": next(filter(is_text, architectures if isinstance(architectures, list) else ()), None),
            "name": origin if origin and is_text(origin) else path.resolve().name,
            "license": readme.get("license"),
            **describe_model(family, hp, stored_once(checkpoint.tensors.values()), parameters),
            **unreadable,
            "tokenizer": tokenizer,
            "metadata": {} if hp else scalars(checkpoint.config),
            "problems": problems,
            "tensors": listed,
        }


def stored_once(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """Shape, format and bytes of the tensors, without those that are others' bytes: a PyTorch file stores a head that
    is the embedding as a second name of it.
    """
    places = {(tensor.path, tensor.offset, tensor.nbytes, tensor.strides): tensor for tensor in tensors}
    return [{"shape": list(tensor.shape), "format": tensor.dtype, "bytes": tensor.nbytes} for tensor in places.values()]


def open_folder(path: Path) -> tuple[Checkpoint, list[str]]:
    """The folder, without its weights when they cannot be opened; then, why."""
    from starscope.checkpoint import open_checkpoint

    try:
        return open_checkpoint(path), []
    except StarscopeError as error:
        return open_checkpoint(path, weights=False), [error.message]


def describe_model(
    family: Family | None, hp: HParams | None, listed: list[dict[str, Any]], parameters: int | None = None
) -> dict[str, Any]:
    """Sizes, parameters, and what the formats take; a vocabulary alone gets the parameters of the model it is of.

    `listed` are shapes, formats and bytes; `parameters` is given where not every tensor listed holds some.
    """
    by_format: dict[str, int] = {}
    for tensor in listed:
        by_format[tensor["format"]] = by_format.get(tensor["format"], 0) + tensor["bytes"]
    parameters = parameters or sum(math.prod(tensor["shape"]) for tensor in listed)
    if not listed and family and hp:
        parameters = sum(slot.parameters for slot in family.slots(hp) if slot.tied_to is None)
    size = family.size_class(hp) if family and hp else None
    return {
        "family": family.name if family else None,
        "size_class": size or (count_text(parameters) if parameters else None),
        "parameters": parameters or None,
        "vocabulary_only": not listed,
        "bytes_by_format": dict(sorted(by_format.items(), key=lambda item: -item[1])),
        **{name: hp[name] if hp else None for name in SIZES},
    }


def describe_tokenizer(file: GGUFFile, family: Family | None) -> tuple[dict[str, Any] | None, str | None]:
    """The tokenizer's names and ids, and what is wrong with it, if anything."""
    from starscope.tokenizer import Tokenizer
    from starscope.tokenizer.metadata import read_metadata

    if "tokenizer.ggml.model" not in file.metadata:
        return None, None
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    bos, eos = (file.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos"))
    described: dict[str, Any] = {
        "model": text_of(file, "tokenizer.ggml.model"),
        "pre": text_of(file, "tokenizer.ggml.pre"),
        "pre_is_assumed": False,
        "tokens": tokens.count if tokens else 0,
        "bos": bos if type(bos) is int else None,
        "eos": eos if type(eos) is int else None,
        "fim": None,
    }
    try:
        source = read_metadata(file, family.default_pre_tokenizer if family else "gpt-2")
        described["pre"], described["pre_is_assumed"] = source.pre_tokenizer, source.pre_is_assumed
        named = source.roles.fim
        if not {"prefix", "suffix", "middle"} <= named.keys():  # only then is the vocabulary searched
            fim = Tokenizer(source).fim
            named = {} if fim is None else vars(fim)
        described["fim"] = fim_ids(named) or None
    except StarscopeError as error:
        return described, error.message
    return described, None


def fim_ids(named: Any) -> dict[str, int]:
    """The ids of the infilling tokens that there are, in their usual order."""
    order = ("prefix", "suffix", "middle", "pad", "repo", "separator")
    return {role: named[role] for role in order if named.get(role) is not None}


def text_of(file: GGUFFile, key: str) -> str | None:
    """The text under a key; None where the file has none, or a value of another type there."""
    value = file.get(key)
    return value if isinstance(value, str) else None


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def own_keys(file: GGUFFile) -> dict[str, Any]:
    """The architecture's own keys as the file spells them."""
    prefix = f"{text_of(file, 'general.architecture')}."
    return scalars({key: value.data for key, value in file.metadata.items() if key.startswith(prefix)})


def scalars(values: dict[str, Any]) -> dict[str, Any]:
    """What can be printed in one line each."""
    kinds = (str, int, float, bool)
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, kinds) and (not isinstance(value, float) or math.isfinite(value))
    }
