"""Adapters as Hugging Face's PEFT keeps them: adapter_config.json and adapter_model.safetensors (or .bin) in a folder.

The tensors say what is adapted; the config says how strongly: lora_alpha / r (or / sqrt(r) with use_rslora), with
other numbers for some modules in rank_pattern and alpha_pattern. What would change the arithmetic and is not here
(DoRA and its relatives, weights of the base that were changed for training) is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from starscope.checkpoint import CheckpointTensor, StoredTensor, read_json, read_safetensors, read_torch_bin
from starscope.checkpoint.content import cut, is_finite, is_of, short, switch, typed
from starscope.errors import CheckpointError, InputError, UnsupportedError
from starscope.family import Family, HParams, Slot
from starscope.formats import Floats
from starscope.gguf.writer import atomic_output
from starscope.lora.adapter import Adapter, Half, Pair, Target, checked, in_our_order, in_their_order
from starscope.microscope.storing import write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS: Mapping[str, Callable[[Path], dict[str, StoredTensor]]] = {
    "adapter_model.safetensors": read_safetensors,
    "adapter_model.bin": read_torch_bin,
}
PREFIX = "base_model.model."
TENSOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(?P<adapter>\.(?!weight$|bias$)[^.]+)?"
    r"(?P<weight>\.weight)?"
)
WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.[^.]+)?)?\.(?P<kind>weight|bias)")
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # init_lora_weights that change the base's own weights

REFUSED: Mapping[str, str] = {  # keys that, when they say something, change what is computed
    "use_dora": "DoRA also scales every row of a weight",
    "use_qalora": "QALoRA pools the input",
    "use_bdlora": "its matrices are block-diagonal",
    "lora_bias": "its B has a bias",
    "layer_replication": "it repeats blocks of the base",
    "trainable_token_indices": "it replaces rows of the embedding",
    "alora_invocation_tokens": "it only takes effect after certain tokens",
    "target_parameters": "it adapts parameters that are not layers",
    "megatron_config": "its layers are those of Megatron",
    "arrow_config": "it chooses among adapters by the input",
    "kasa_config": "it changes the base's own weights",
    "monteclora_config": "it draws its weights",
}
IGNORED = frozenset({  # the tensors say it, or it is about training
    "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "bias", "modules_to_save",
    "layers_to_transform", "layers_pattern", "task_type", "inference_mode", "revision", "base_model_name_or_path",
    "auto_mapping", "peft_version", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "init_lora_weights",
})  # fmt: skip
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})

# Patterns are regular expressions of whoever made the folder; these forms of them cannot take long.
SAFE_PATTERN = re.compile(
    r"\^?(?:[\w/-]|\.(?![*+])|\\[.d]\+?|\.[*+]|\[0-9\]\+?|\((?:\?:)?[\w.\\-]+(?:\|[\w.\\-]+)*\))+\$?"
)
PATTERN_LENGTH, PATTERN_REPEATS = 200, 3


def read_peft(folder: Path, target: Target) -> Adapter:
    """The adapter in a folder, for one model. CheckpointError for what does not fit, UnsupportedError for what is not
    done here, InputError for what is not there.
    """
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} has no {CONFIG}; expected the folder of a PEFT adapter, or a GGUF file.")
    config = _read_config(folder / CONFIG)
    name = next((name for name in WEIGHTS if (folder / name).exists()), None)
    if name is None:
        raise InputError(f"{folder} has {CONFIG} but none of {', '.join(WEIGHTS)}.")
    tensors = WEIGHTS[name](folder / name)
    slots = {slot.hf: slot for slot in target.slots().values()}
    halves: dict[str, dict[str, Half]] = {}
    whole: dict[str, Half] = {}
    unknown: list[str] = []
    for tensor in tensors.values():
        stored = tensor.name.removeprefix(PREFIX)
        if "lora_magnitude_vector" in stored:
            raise UnsupportedError(
                f"{folder} is a DoRA adapter ({cut(tensor.name)}), which also scales every row of a weight."
            )
        match = TENSOR.fullmatch(stored)
        if match is None:
            full = WHOLE.fullmatch(stored)
            slot = slots.get(f"{full['module']}.{full['kind']}") if full else None
            if slot is None:
                unknown.append(tensor.name)
            else:
                _take(folder, whole, slot.name, Half(tensor.name, in_our_order(_read(tensor), slot.hf_rows)))
            continue
        slot = slots.get(f"{match['module']}.weight")
        if slot is None:
            unknown.append(tensor.name)
            continue
        half = match["half"].lower()
        values = _read(tensor)
        if match["embedding"] and values.ndim == 2:  # of a table [rows out]: a is [rank rows], b [out rank]
            half, values = ("b", values.T) if half == "a" else ("a", values.T)
        if half == "b":
            values = in_our_order(values, slot.hf_rows)
        _take(folder, halves.setdefault(slot.name, {}), half, Half(tensor.name, values))
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that belong to no part of {target.family.name} with "
            f"{target.hp.num_layers} layers: {', '.join(map(cut, unknown[:3]))}{', ...' if unknown[3:] else ''}.",
            hint="It was made for another model.",
        )
    ours = target.slots()
    scales = {name: _scale(folder, config, ours[name], found) for name, found in halves.items()}
    return checked(folder, target, halves, scales, whole)


def _take(folder: Path, found: dict[str, Half], key: str, half: Half) -> None:
    if key in found:
        raise CheckpointError(f"{folder} has both {cut(found[key].name)} and {cut(half.name)}; expected one of them.")
    found[key] = half


def _read(tensor: CheckpointTensor) -> np.ndarray:
    return tensor.read()


def _read_config(path: Path) -> dict[str, Any]:
    """The config, with every key that changes the arithmetic known or refused."""
    config, where = read_json(path), str(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{where}: peft_type is {short(kind)}; supported: LORA.")
    for key, reason in REFUSED.items():
        if config.get(key) not in (None, False, [], {}):
            raise UnsupportedError(f"{where} has {key} = {short(config[key])}: {reason}.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE):
        raise UnsupportedError(
            f"{where}: init_lora_weights is {short(init)}, which changes the base's own weights.",
            hint="Save it as an ordinary adapter: path_initial_model_for_weight_conversion of PEFT's save_pretrained.",
        )
    unknown = [key for key in config if key not in READ and key not in IGNORED and key not in REFUSED]
    for key in unknown:
        if config[key] not in (None, False, [], {}, ""):
            raise UnsupportedError(
                f"{where} has an unknown key, {cut(key)} = {short(config[key])}; expected those of LoRA."
            )
    for key in ("r", "lora_alpha"):
        value: Any = config.get(key)
        if not is_of(value, int if key == "r" else float) or not is_finite(value) or value < 0:
            raise CheckpointError(f"{where}: {key} is {short(value)}; expected a number above 0.")
    switch(config, "use_rslora", False, where)
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key)
        if table is not None and not (
            isinstance(table, dict) and all(is_of(n, float) and is_finite(n) and n > 0 for n in table.values())
        ):
            raise CheckpointError(f"{where}: {key} is {short(table)}; expected modules with a number above 0 each.")
    typed(config, "bias", str, where)
    return config


def _scale(folder: Path, config: Mapping[str, Any], slot: Slot, found: Mapping[str, Half]) -> float:
    """What B A of a module is multiplied by. CheckpointError when the config says another rank than the tensors."""
    module = slot.hf.removesuffix(".weight")
    rank = int(_of_pattern(folder, config.get("rank_pattern") or {}, module, config["r"]))
    half = found.get("a")
    is_table = half is not None and "lora_embedding" in half.name
    if half is not None and half.values.ndim == 2 and len(half.values) != rank:
        other = found.get("b", half)
        name = other.name if is_table else half.name
        raise CheckpointError(f"{folder}: {cut(name)} has rank {len(half.values)}; {CONFIG} says {rank} for it.")
    alpha = _of_pattern(folder, config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    if rank < 1:
        raise CheckpointError(f"{folder / CONFIG}: r is {rank}; expected at least 1.")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(folder: Path, table: Mapping[str, float], module: str, usual: float) -> float:
    """The number of the first pattern that a module's name ends with, or the usual one."""
    for pattern, number in table.items():
        repeats = sum(pattern.count(sign) for sign in "*+")
        if len(pattern) > PATTERN_LENGTH or repeats > PATTERN_REPEATS or not SAFE_PATTERN.fullmatch(pattern):
            raise UnsupportedError(
                f"{folder / CONFIG}: the pattern {short(pattern)} is not understood; expected a module's name, with "
                ".*, \\d+, [0-9]+ or (one|other) in it."
            )
        if re.match(rf"(.*\.)?({pattern})$", module):
            return number
    return usual


def peft_config(modules: Mapping[str, tuple[int, float]], base: str, targets: Sequence[str]) -> dict[str, Any]:
    """adapter_config.json for adapted modules, by their Hugging Face names: rank and alpha of each."""
    (rank, alpha), _ = Counter(modules.values()).most_common(1)[0]
    ranks = {re.escape(name): r for name, (r, _) in modules.items() if r != rank}
    alphas = {re.escape(name): a for name, (_, a) in modules.items() if a != alpha}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": list(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def write_peft(folder: Path, family: Family, hp: HParams, pairs: Mapping[str, Pair], *, base: str = "") -> None:
    """Write pairs, by our names, as a folder that PEFT loads; what is there of it is replaced, each file at once.

    `base` is the model's name on the hub, if it has one. Raises what `atomic_output` raises.
    """
    slots = {slot.name: slot for slot in family.slots(hp)}
    modules: dict[str, tuple[int, float]] = {}
    arrays: dict[str, Floats] = {}
    for name, pair in pairs.items():
        slot = slots[name]
        module = slot.hf.removesuffix(".weight")
        modules[module] = (pair.rank, pair.scale * pair.rank)
        arrays[f"{PREFIX}{module}.lora_A.weight"] = pair.a
        arrays[f"{PREFIX}{module}.lora_B.weight"] = in_their_order(pair.b, slot.hf_rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", arrays, {"format": "pt"}, force=True)
    text = json.dumps(peft_config(modules, base, _endings(slots, modules)), indent=2) + "\n"
    with atomic_output(folder / CONFIG, len(text), force=True) as put:
        put(text.encode())


def _endings(slots: Mapping[str, Slot], modules: Mapping[str, object]) -> list[str]:
    """The last words of the modules' names where these select them and no other matrix, or else all of their names."""
    last = sorted({name.rpartition(".")[2] for name in modules})
    every = [slot.hf.removesuffix(".weight") for slot in slots.values() if len(slot.shape) == 2]
    selected = {name for name in every if name.rpartition(".")[2] in last}
    return last if selected == set(modules) else sorted(modules)
