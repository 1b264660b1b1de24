"""The end of a run: a GGUF file, checked against the weights that it was made from before it takes its name.

write_model(path, graph, trainer.weights(), tokenizer, to="q8_0", name="starscope demo", license_name="apache-2.0")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from starscope.convert import encode_checked, size_label
from starscope.engine import make_engine
from starscope.engine.weights import ArraySource, Weights, open_weights
from starscope.errors import VerificationError
from starscope.family import hparams_from_metadata, metadata_from_hparams
from starscope.formats import Bytes, decode
from starscope.gguf import OutputTensor, read_gguf, string, write_gguf
from starscope.graph import Graph, record
from starscope.recipes import choose_formats, file_type_metadata, find_recipe
from starscope.tokenizer import Tokenizer

ULP = 2.0**-23
TOLERANCE = 32  # ulp of the largest logit: two runs of the same float32 arithmetic


def write_model(
    path: Path,
    graph: Graph,
    weights: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    to: str,
    name: str = "",
    license_name: str = "",
    probe: list[int],
    force: bool = False,
) -> int:
    """Write the model and return the file's bytes. No path and no time goes into it: the same weights, the same file.

    Without a `name` it is called by its family and size; without a license the file names none.

    Before the file takes its name it is opened again: its logits for the ids `probe` must be those of the weights as
    `to` rounds them, else VerificationError. Raises what `write_gguf` raises.
    """
    family, hp = graph.family, graph.hp
    slots = [slot for slot in family.slots(hp) if slot.name in weights]
    recipe = find_recipe(to)
    formats, _ = choose_formats(slots, recipe)
    raw: dict[str, Bytes] = {}
    rounded: dict[str, np.ndarray] = {}
    for slot in slots:
        ours = weights[slot.name]
        stored = ours if slot.gguf_order is None else ours[slot.gguf_order]
        raw[slot.name] = encode_checked(slot.name, formats[slot.gguf], stored.reshape(-1, slot.shape[-1]))
        decoded = decode(formats[slot.gguf], raw[slot.name]).reshape(slot.shape)
        rounded[slot.name] = decoded if slot.gguf_rows is None else decoded[slot.gguf_rows]
    label = size_label(sum(slot.parameters for slot in slots))
    texts = {
        "general.architecture": family.gguf_architecture,
        "general.type": "model",
        "general.name": name or f"{family.name} {label}",
        "general.size_label": label,
        "general.license": license_name,
    }
    metadata = {
        **{key: string(text) for key, text in texts.items() if text},
        **metadata_from_hparams(family, hp),
        **file_type_metadata(recipe),
        **tokenizer.to_metadata(hp.vocab_size),
    }
    outputs = [
        OutputTensor(slot.gguf, slot.shape, formats[slot.gguf], lambda data=raw[slot.name]: [data])  # type: ignore[misc]
        for slot in slots
    ]

    def check(written: Path) -> None:
        _check(written, graph, rounded, probe)

    return write_gguf(path, metadata, outputs, force=force, check=check)


def _check(written: Path, graph: Graph, expected: Mapping[str, np.ndarray], probe: list[int]) -> None:
    family = graph.family
    with read_gguf(written) as file:
        hp, stored = open_weights(file, family, hparams_from_metadata(family, file))
        # As arrays both have float32 caches: what is compared is the file, not how keys and values are rounded.
        found = _logits(record(family, hp), {name: stored[name] for name in expected}, probe)
    wanted = _logits(graph, expected, probe)
    worst = float(np.abs(found - wanted).max() / np.abs(wanted).max() / ULP)
    if not worst <= TOLERANCE:
        raise VerificationError(
            f"the file's logits are {worst:.0f} ulp from the weights'; expected at most {TOLERANCE}."
        )


def _logits(graph: Graph, arrays: Mapping[str, np.ndarray], probe: list[int]) -> np.ndarray:
    engine = make_engine("numpy", graph, Weights(graph.family.slots(graph.hp), ArraySource(arrays)))
    return engine.forward([probe], None, "all")[0]
