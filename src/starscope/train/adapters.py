"""Finetuning: an adapter of low rank is trained beside a model whose own weights stand still.

Only A and B of each adapted layer are parameters; the model may be quantized, its weights are decoded once. A begins as
small random numbers, B as 0, so that the first step starts from the model itself. alpha / rank lies in A while it is
trained, and is told apart from it at the end: `adapter/` is a PEFT folder, `adapter.gguf` the same for llama.cpp.

    job = AdapterJob(resolve({"start": "base.gguf", "data": ("src/",), "rank": 8}), Path("out"))
    job.prepare()
    if job.train().signal is None:
        job.finish()
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from starscope.engine import Weights, make_engine
from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource
from starscope.errors import UsageError, VerificationError
from starscope.family import Family, HParams
from starscope.graph import Graph, adapter_names, record
from starscope.hub import find_name
from starscope.lora import Adapter, Pair, read_adapter
from starscope.lora.apply import combined, recorded
from starscope.lora.gguf_file import write_gguf_adapter
from starscope.lora.peft import write_peft
from starscope.model import load
from starscope.train.estimate import MemoryEstimate, estimate
from starscope.train.export import write_tokenizer
from starscope.train.job import (
    DATA,
    PROBE_TOKENS,
    TOKENIZER,
    TrainingRun,
    data_options,
    dtype_of,
    steps_of,
    train_options,
)
from starscope.train.loop import TrainOptions
from starscope.train.prepare import prepare
from starscope.train.report import REPORT
from starscope.train.start import open_start

FOLDER, FILE, MERGED = "adapter", "adapter.gguf", "merged.gguf"
ALL_LINEAR, HEAD = "all-linear", "lm_head.weight"
USUAL_CONTEXT = 512  # tokens of a sample, where the model has as many positions
USUAL_RANK = 8
ULP, TOLERANCE = 2.0**-23, 256  # of two engines' logits
DEFAULTS = {
    "rank": USUAL_RANK,
    "steps": 200,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "evaluate_every": 50,
    "save_every": 50,
    "to": "",  # of a merged model: its own formats
}


def with_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """What is asked of a new run, with what is usual for an adapter; the rate falls to the last step."""
    asked = {name: value for name, value in given.items() if value is not None and value != ()}
    made: dict[str, object] = {**DEFAULTS, **asked}
    if "epochs" in asked:
        made.pop("steps")
    elif "decay_steps" not in asked:
        made["decay_steps"] = made["steps"]
    return made


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


def digest(weights: Mapping[str, np.ndarray]) -> str:
    """What tells one base from another: a hash of all its numbers."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(weights[name]).data)
    return sha.hexdigest()[:16]


@dataclass(frozen=True)
class FinishedAdapter:
    """The files of a finished run; `merged` is None where none was asked for."""

    folder: Path
    file: Path
    report: Path
    merged: Path | None


class AdapterJob(TrainingRun):
    """A run whose parameters are an adapter's. `settings.start` is the model, `settings.rank` at least 1."""

    def check_output(self, *, resume: bool) -> None:
        """Refuse, before any work, what would replace another run."""
        self._refuse_another_run(resume=resume)

    def prepare(self, *, resume: bool = False) -> None:
        """The tokens, the model with an adapter beside it, and a trainer of the adapter."""
        length = self.settings.context_length
        if length is None:
            length = min(USUAL_CONTEXT, load(self.settings.start, engine="numpy").context_length)
        start = open_start(self.settings.start, length)
        for note in start.notes:
            self._say(note)
        self.settings = replace(start.settle(self.settings), context_length=length)
        write_tokenizer(self.out / TOKENIZER, start.tokenizer)
        options = replace(data_options(self.settings, self.out), exclude=(self.out,))
        self.data = prepare(options, self.out / DATA, self._say, self._progress, resume=resume)
        family, hp = start.family, start.hparams
        self.data.check_fits(hp.vocab_size)
        self.tokenizer = self.data.tokenizer.padded(hp.vocab_size)
        plain = record(family, hp)
        self.ranks = choose_targets(plain, self.settings.targets, self.settings.rank)
        alpha = self.settings.alpha
        self.alpha = float(self.settings.rank if alpha is None else alpha)
        if not math.isfinite(self.alpha) or self.alpha <= 0:
            raise UsageError(f"alpha is {self.alpha:g}; expected a number above 0.")
        self.base = Weights(family.slots(hp), ArraySource(start.weights))
        pairs = new_pairs(plain, self.ranks, self.alpha, self.settings.seed)
        self.graph, weights = _beside(family, hp, self.base, pairs)
        names = [half for name in self.ranks for half in adapter_names(name)]
        self.parameters = sum(math.prod(self.graph.weights[name]) for name in names)
        batches = self.data.batches()
        self.settings = replace(self.settings, steps=steps_of(self.settings, batches.per_epoch))
        asked = train_options(self.settings)
        memory = adapter_memory(self.graph, names, asked, dtype_of(asked.precision))
        engine = TorchEngine(self.graph, weights)
        engine.parameters = {name: engine.parameters[name] for name in names}
        facts = {**self.data.facts, "base": digest(start.weights), "ranks": self.ranks, "alpha": self.alpha}
        self._begin(memory, resume, batches=batches, options=asked, engine=engine, facts=facts)

    def pairs(self) -> dict[str, Pair]:
        """The adapter as it is now, alpha / rank out of A."""
        found, made = self.trainer.weights(), {}
        for name, rank in self.ranks.items():
            a, b = (found[half] for half in adapter_names(name))
            made[name] = Pair((a / np.float32(self.alpha / rank)).astype(np.float32), b, self.alpha / rank)
        return made

    def finish(self, *, merge: bool = False) -> FinishedAdapter:
        """Write the adapter in both forms, each read again and compared with what was trained."""
        s, family, hp = self.settings, self.graph.family, self.graph.hp
        pairs, folder, file = self.pairs(), self.out / FOLDER, self.out / FILE
        name = find_name(s.start)
        write_peft(folder, family, hp, pairs, base=name.repo if name is not None else "")
        write_gguf_adapter(file, family, hp, pairs, name=s.name, force=True)
        ids = self.data.train.ids[: min(PROBE_TOKENS, hp.context_length)].tolist()
        [wanted] = self.trainer.engine.forward([ids], None, "all")
        for path in (folder, file):
            _check(path, self.base, family, hp, ids, wanted)
        merged = None
        if merge:
            from starscope.merge import merge as run

            merged = self.out / MERGED
            run(s.start, merged, lora=folder, to=s.to or None, force=True)
        return FinishedAdapter(folder, file, self.out / REPORT, merged)


def _beside(family: Family, hp: HParams, base: Weights, pairs: Mapping[str, Pair]) -> tuple[Graph, Weights]:
    """The model with pairs beside it, their scale in A."""
    scaled = {name: Pair(pair.a * np.float32(pair.scale), pair.b, 1.0) for name, pair in pairs.items()}
    return recorded(family, hp, base, scaled, {})


def _check(path: Path, base: Weights, family: Family, hp: HParams, ids: list[int], wanted: np.ndarray) -> None:
    """VerificationError unless the written adapter beside the model computes what was trained."""
    adapter: Adapter = read_adapter(path, family, hp)
    pairs, whole = combined([(adapter, 1.0)], base)
    graph, weights = recorded(family, hp, base, pairs, whole)
    [found] = make_engine("numpy", graph, weights).forward([ids], None, "all")
    distance = float(np.abs(found - wanted).max() / np.abs(wanted).max() / ULP)
    if not distance <= TOLERANCE:
        raise VerificationError(f"the logits with {path} are {distance:.0f} ulp from the trained; at most {TOLERANCE}.")


def adapter_memory(graph: Graph, names: Sequence[str], options: TrainOptions, dtype: torch.dtype) -> MemoryEstimate:
    """As `estimate`, with gradients and the optimizer's numbers for `names` alone."""
    whole = estimate(graph, options, dtype).parts
    own = 4 * sum(math.prod(graph.weights[name]) for name in names)
    share = own / max(1, whole["parameters"])
    moments = {"gradients": own, "optimizer": int(whole["optimizer"] * share)}
    return MemoryEstimate({**whole, "parameters": whole["parameters"] + own, **moments})
