"""Finetuning: an adapter of low rank is trained beside a model whose own weights stand still.

Only A and B of each adapted layer are parameters; the model may be quantized, its weights are decoded once. While it
is trained, alpha / rank lies in A; at the end the two are told apart: `adapter/` is a PEFT folder, `adapter.gguf` the
same for llama.cpp.

    job = AdapterJob(resolve({"start": "base.gguf", "data": ("src/",), "rank": 8}), Path("out"))
    job.prepare()
    if job.train().signal is None:
        job.finish()
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from starscope.engine import Weights, make_engine
from starscope.errors import VerificationError
from starscope.export import write_tokenizer
from starscope.family import Family, HParams
from starscope.graph import adapter_names
from starscope.hub import find_name
from starscope.lora import Adapter, Pair, read_adapter
from starscope.lora.apply import combined, recorded
from starscope.lora.gguf_file import write_gguf_adapter
from starscope.lora.peft import write_peft
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
from starscope.train.new_adapter import NewAdapter, open_base
from starscope.train.prepare import prepare
from starscope.train.report import REPORT

FOLDER, FILE, MERGED = "adapter", "adapter.gguf", "merged.gguf"
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
        start, self.settings = open_base(self.settings)
        for note in start.notes:
            self._say(note)
        self.new = NewAdapter.beside(start, self.settings)
        self.graph, self.ranks, self.alpha = self.new.graph, self.new.ranks, self.new.alpha
        self.parameters = self.new.parameters
        write_tokenizer(self.out / TOKENIZER, start.tokenizer)
        options = replace(data_options(self.settings, self.out), exclude=(self.out,))
        self.data = prepare(options, self.out / DATA, self._say, self._progress, resume=resume)
        self.data.check_fits(start.hparams.vocab_size)
        self.tokenizer = self.data.tokenizer.padded(start.hparams.vocab_size)
        batches = self.data.batches()
        self.settings = replace(self.settings, steps=steps_of(self.settings, batches.per_epoch))
        asked = train_options(self.settings)
        memory = self.new.memory(asked, dtype_of(asked.precision))
        facts = {**self.data.facts, "base": digest(start.weights), "ranks": self.ranks, "alpha": self.alpha}
        self._begin(memory, resume, batches=batches, options=asked, engine=self.new.engine(), facts=facts)

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
            _check(path, self.new.base, family, hp, ids, wanted)
        merged = None
        if merge:
            from starscope.merge import merge as run

            merged = self.out / MERGED
            run(s.start, merged, lora=folder, to=s.to or None, force=True)
        return FinishedAdapter(folder, file, self.out / REPORT, merged)


def _check(path: Path, base: Weights, family: Family, hp: HParams, ids: list[int], wanted: np.ndarray) -> None:
    """VerificationError unless the written adapter beside the model computes what was trained."""
    adapter: Adapter = read_adapter(path, family, hp)
    pairs, whole = combined([(adapter, 1.0)], base)
    graph, weights = recorded(family, hp, base, pairs, whole)
    [found] = make_engine("numpy", graph, weights).forward([ids], None, "all")
    distance = float(np.abs(found - wanted).max() / np.abs(wanted).max() / ULP)
    if not distance <= TOLERANCE:
        raise VerificationError(f"the logits with {path} are {distance:.0f} ulp from the trained; at most {TOLERANCE}.")
