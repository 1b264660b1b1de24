"""Going on with a model that exists: its weights, its sizes and its tokenizer are where a run begins.

    start = open_start("starcoderbase-1b.gguf")         # or a Hugging Face folder, demo, a hub name
    trainer = Trainer(record(start.family, start.hparams), ..., initial=start.weights)

Quantized weights are decoded to float32, which is what is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from starscope.family import Family, HParams
from starscope.model import load
from starscope.tokenizer import Tokenizer
from starscope.train.presets import SIZES
from starscope.train.settings import Settings


@dataclass(frozen=True)
class Start:
    """A model to go on with. `weights` are float32 by our names, tied ones left out."""

    path: Path
    family: Family
    hparams: HParams
    tokenizer: Tokenizer
    weights: dict[str, np.ndarray]
    notes: list[str]

    def settle(self, settings: Settings) -> Settings:
        """The settings of a run that goes on with it: its sizes are the model's."""
        sizes = {name: self.hparams[name] for name in SIZES if name in self.hparams}
        return replace(settings, family=self.family.name, **sizes)


def open_start(model: str, context_length: int | None = None) -> Start:
    """Read a model; `context_length`, when given, keeps so many of its positions. Raises what `load` raises.

    ContextOverflowError for more positions than the model has: they would have no embeddings.
    """
    loaded = load(model, engine="numpy", context_length=context_length)
    names = [name for name in loaded.weights if not loaded.weights.is_tied(name)]
    weights = {name: np.array(loaded.weights[name], np.float32) for name in names}
    hp, length = loaded.hparams, loaded.context_length
    if length != hp.context_length:
        shorter = hp.replace(context_length=length)
        shapes = {slot.name: slot.shape for slot in loaded.family.slots(shorter)}
        weights = {name: np.ascontiguousarray(array[: shapes[name][0]]) for name, array in weights.items()}
        hp = shorter
    return Start(loaded.path, loaded.family, hp, loaded.tokenizer, weights, loaded.notes)
