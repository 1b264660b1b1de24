"""A new adapter beside a model: which layers get one, of which rank, and what training it takes.

    start, settings = open_base(resolve({"start": "base.gguf", "data": ("src/",), "rank": 8}))
    new = NewAdapter.beside(start, settings)
    new.parameters, new.ranks                       # 98304, {"layers.0.self_attn.qkv_proj.weight": 8, ...}
    new.engine()                                    # whose parameters are the adapter's alone

A begins as small random numbers, B as 0, so that the first step starts from the model itself. alpha / rank lies in A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from starscope.engine import Weights
from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource
from starscope.errors import UsageError
from starscope.graph import Graph, adapter_names, record
from starscope.lora import Pair
from starscope.lora.apply import recorded
from starscope.model import load
from starscope.train.estimate import MemoryEstimate, estimate
from starscope.train.loop import TrainOptions
from starscope.train.settings import Settings
from starscope.train.start import Start, open_start

ALL_LINEAR, HEAD = "all-linear", "lm_head.weight"
USUAL_CONTEXT = 512  # tokens of a sample, where the model has as many positions


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that changes nothing yet. `ranks` by the names of the adapted matrices; `base` are the model's own."""

    ranks: dict[str, int]
    alpha: float
    base: Weights
    graph: Graph
    weights: Weights

    @classmethod
    def beside(cls, start: Start, settings: Settings) -> NewAdapter:
        """The adapter that the settings ask for. UsageError for targets, ranks or an alpha that there cannot be."""
        family, hp = start.family, start.hparams
        plain = record(family, hp)
        ranks = choose_targets(plain, settings.targets, settings.rank)
        alpha = float(settings.rank if settings.alpha is None else settings.alpha)
        if not math.isfinite(alpha) or alpha <= 0:
            raise UsageError(f"alpha is {alpha:g}; expected a number above 0.")
        base = Weights(family.slots(hp), ArraySource(start.weights))
        pairs = new_pairs(plain, ranks, alpha, settings.seed)
        scaled = {name: Pair(pair.a * np.float32(pair.scale), pair.b, 1.0) for name, pair in pairs.items()}
        return cls(ranks, alpha, base, *recorded(family, hp, base, scaled, {}))

    @property
    def names(self) -> list[str]:
        """The tensors that are trained."""
        return [half for name in self.ranks for half in adapter_names(name)]

    @property
    def parameters(self) -> int:
        return sum(math.prod(self.graph.weights[name]) for name in self.names)

    def engine(self) -> TorchEngine:
        """The model with the adapter beside it, whose parameters are the adapter's."""
        engine = TorchEngine(self.graph, self.weights)
        engine.parameters = {name: engine.parameters[name] for name in self.names}
        return engine

    def memory(self, options: TrainOptions, dtype: torch.dtype) -> MemoryEstimate:
        """As `estimate`, with gradients and the optimizer's numbers for the adapter alone."""
        whole = estimate(self.graph, options, dtype).parts
        own = 4 * self.parameters
        share = own / max(1, whole["parameters"])
        moments = {"gradients": own, "optimizer": int(whole["optimizer"] * share)}
        return MemoryEstimate({**whole, "parameters": whole["parameters"] + own, **moments})


def open_base(settings: Settings) -> tuple[Start, Settings]:
    """The model that an adapter is for, and the settings with its sizes and the length of a sample."""
    length = settings.context_length
    if length is None:
        length = min(USUAL_CONTEXT, load(settings.start, engine="numpy").context_length)
    start = open_start(settings.start, length)
    return start, replace(start.settle(settings), context_length=length)


def choose_targets(graph: Graph, asked: Sequence[str], rank: int) -> dict[str, int]:
    """The rank beside each adapted matrix, by its name.

    `asked` are names of modules or what they end with, ours, Hugging Face's or GGUF's, with a rank of their own behind
    a colon if they have one; later ones win. "all-linear" are all linear layers but the output matrix, and the default.
    UsageError for a name that no linear layer has, and for a rank that is no number from 1 to the matrix's sizes.
    """
    slots = {slot.name: slot for slot in graph.family.slots(graph.hp)}
    linear = [slots[op.weights[0]] for op in graph.ops if op.kind == "linear" and op.weights[0] in slots]
    made: dict[str, int] = {}
    for one in asked or (ALL_LINEAR,):
        name, colon, number = one.partition(":")
        if colon and not (number.isascii() and number.isdigit()):
            raise UsageError(f"the target {one!r} has no rank behind its colon; expected NAME:RANK.")
        if name == ALL_LINEAR:
            found = [slot for slot in linear if slot.name != HEAD]
        else:
            stems = (
                (slot, (text.removesuffix(".weight") for text in (slot.name, slot.gguf, slot.hf))) for slot in linear
            )
            found = [slot for slot, names in stems if any(f".{stem}".endswith(f".{name}") for stem in names)]
        if not found:
            there = dict.fromkeys(slot.name.removesuffix(".weight").rpartition(".")[2] for slot in linear)
            raise UsageError(f"no linear layer is called {name!r}; there are: {', '.join(there)}, and {ALL_LINEAR}.")
        for slot in found:
            made[slot.name] = int(number) if colon else rank
            if not 1 <= made[slot.name] <= min(slot.shape):
                raise UsageError(f"the rank beside {slot.name} is {made[slot.name]}; expected 1 to {min(slot.shape)}.")
    return {slot.name: made[slot.name] for slot in linear if slot.name in made}


def new_pairs(graph: Graph, ranks: Mapping[str, int], alpha: float, seed: int) -> dict[str, Pair]:
    """An adapter that changes nothing yet: A uniform between ±1/√in, as PEFT draws it, and B 0."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, rank in ranks.items():
        out, size = graph.weights[name]
        bound = 1 / math.sqrt(size)
        a = (torch.rand((rank, size), generator=generator) * 2 - 1) * bound
        made[name] = Pair(a.numpy(), np.zeros((out, rank), np.float32), alpha / rank)
    return made
