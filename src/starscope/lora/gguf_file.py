"""Adapters as GGUF files, in the form that llama.cpp reads and its convert_lora_to_gguf.py writes.

`general.type` is "adapter", `adapter.type` "lora", `general.architecture` the model's; each adapted tensor has two,
`blk.0.attn_qkv.weight.lora_a` `[rank in]` and `….lora_b` `[out rank]`, of the token embedding turned over as that
program has them. One `adapter.lora.alpha` says how strongly: alpha / rank, or 1 where it is 0 or absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from starscope.checkpoint.content import cut, is_finite, is_of, short
from starscope.errors import CheckpointError, UnsupportedError
from starscope.family import ARCHITECTURE_KEY, Family, HParams, Slot
from starscope.formats import decode, encode, find_format
from starscope.gguf import OutputTensor, f32, read_gguf, string, write_gguf
from starscope.gguf.reader import GGUFFile
from starscope.lora.adapter import HALVES, Adapter, Half, Pair, Target, checked, in_our_order, in_their_order

TYPE_KEY, ADAPTER_KEY, ALPHA_KEY = "general.type", "adapter.type", "adapter.lora.alpha"
TOKENS_KEY = "adapter.alora.invocation_tokens"
OLD_MAGIC = b"algg"  # "ggla", as llama.cpp's adapters began in 2023


def read_gguf_adapter(path: Path, target: Target) -> Adapter:
    """The adapter in a file, for one model. CheckpointError for what does not fit, GGUFError for a file that
    contradicts itself, UnsupportedError for what is not done here.
    """
    _check_age(path)
    with read_gguf(path) as file:
        alpha = _check_kind(file, target.family)
        slots = {slot.gguf: slot for slot in target.slots().values()}
        halves: dict[str, dict[str, Half]] = {}
        unknown: list[str] = []
        for name in file.tensors:
            stem, _, half = name.rpartition(".lora_")
            slot = slots.get(stem)
            if slot is None or half not in HALVES:
                unknown.append(name)
                continue
            values = _read(file, name)
            if _is_turned(slot) and values.ndim == 2:
                half, values = ("b", values) if half == "a" else ("a", values.T)
            if half == "b":
                values = in_our_order(values, slot.gguf_rows)
            halves.setdefault(slot.name, {})[half] = Half(name, values)
    if unknown:
        raise CheckpointError(
            f"{path} has {len(unknown)} tensors that are not halves of an adapted tensor of {target.family.name} with "
            f"{target.hp.num_layers} layers: {', '.join(map(cut, unknown[:3]))}{', ...' if unknown[3:] else ''}.",
            hint="It was made for another model.",
        )
    ranks = {name: len(found["a"].values) if "a" in found else 1 for name, found in halves.items()}
    scales = {name: alpha / rank if alpha and rank else 1.0 for name, rank in ranks.items()}
    return checked(path, target, halves, scales, {})


def _is_turned(slot: Slot) -> bool:
    return slot.name == "embed_tokens.weight"


def _check_age(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(OLD_MAGIC))
    except OSError:
        return  # for the reader to say
    if magic == OLD_MAGIC:
        raise UnsupportedError(
            f"{path} is an adapter in llama.cpp's format of 2023 (ggla); expected GGUF.",
            hint="Give the PEFT folder that it was made of.",
        )


def _check_kind(file: GGUFFile, family: Family) -> float:
    """Whether it is an adapter, and for this architecture; gives its alpha."""
    for key, expected in ((TYPE_KEY, "adapter"), (ADAPTER_KEY, "lora")):
        if file.get(key) != expected:
            raise CheckpointError(
                f"{file.path}: {key} is {short(file.get(key))}; expected {expected!r}.",
                hint="" if key != TYPE_KEY else "It is not an adapter; give a model as MODEL.",
            )
    if file.get(ARCHITECTURE_KEY) != family.gguf_architecture:
        found = short(file.get(ARCHITECTURE_KEY))
        raise CheckpointError(f"{file.path} is for {found}; the model is {family.gguf_architecture!r}.")
    if TOKENS_KEY in file.metadata:
        raise UnsupportedError(f"{file.path} has {TOKENS_KEY}: it only takes effect after certain tokens.")
    alpha = file.get(ALPHA_KEY, 0.0)
    if not is_of(alpha, float) or not is_finite(alpha):
        raise CheckpointError(f"{file.path}: {ALPHA_KEY} is {short(alpha)}; expected a number.")
    return float(alpha)


def _read(file: GGUFFile, name: str) -> np.ndarray:
    info = file.info(name)
    if info.format is None or info.format.decode is None:
        raise UnsupportedError(f"{file.path}: {name} is stored as {info.type_name}, which cannot be decoded.")
    return decode(info.format, file.read(name)).reshape(info.shape)


def write_gguf_adapter(
    path: str | os.PathLike[str],
    family: Family,
    hp: HParams,
    pairs: Mapping[str, Pair],
    *,
    name: str = "",
    force: bool = False,
) -> int:
    """Write pairs, by our names, as F32, and return the file's bytes.

    The format has one alpha for all: it is that of the pair with the greatest, and B of the others is scaled to fit.
    Raises what `write_gguf` raises.
    """
    format_ = find_format("F32")
    slots = {slot.name: slot for slot in family.slots(hp)}
    alpha = float(np.float32(max((pair.scale * pair.rank for pair in pairs.values()), default=0.0))) or 1.0
    texts = {
        ARCHITECTURE_KEY: family.gguf_architecture,
        TYPE_KEY: "adapter",
        "general.name": name,
        ADAPTER_KEY: "lora",
    }
    metadata = {**{key: string(text) for key, text in texts.items() if text}, ALPHA_KEY: f32(alpha)}
    outputs = []
    for slot in slots.values():
        if slot.name not in pairs:
            continue
        pair = pairs[slot.name]
        b, share = in_their_order(pair.b, slot.gguf_rows), np.float32(pair.scale * pair.rank / alpha)
        b = b if share == 1 else b * share
        halves = {"a": b, "b": pair.a.T} if _is_turned(slot) else {"a": pair.a, "b": b}
        for half, values in halves.items():
            raw = encode(format_, np.ascontiguousarray(values, np.float32))
            outputs.append(OutputTensor(f"{slot.gguf}.lora_{half}", values.shape, format_, lambda data=raw: [data]))  # type: ignore[misc]
    return write_gguf(path, metadata, outputs, force=force)
