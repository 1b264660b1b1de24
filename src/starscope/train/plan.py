"""What a run would read and take, without making it: data, model, disk.

plan = make_plan(resolve({"data": ("src/",)}, preset="demo"))
print(plan.data.train_tokens, plan.parameters, plan.data.problems)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starscope.family import find_family
from starscope.graph import Graph, record
from starscope.recipes import find_recipe
from starscope.train.data import Batches, random_words
from starscope.train.estimate import MemoryEstimate, estimate, step_seconds
from starscope.train.examine import DataReport, examine
from starscope.train.job import (
    count_parameters,
    data_options,
    disk_bytes,
    dtype_of,
    memory_problem,
    steps_of,
    train_options,
)
from starscope.train.loop import Trainer, TrainOptions
from starscope.train.prepare import Progress, nothing
from starscope.train.presets import family_sizes
from starscope.train.settings import Settings
from starscope.train.start import open_start


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes; `epochs` is how often each token would be read, `notes` what a model to start from says.

    `seconds` are those of all steps, without evaluations; None where the memory does not suffice to try some.
    `problems` are those of the data and of this machine.
    """

    settings: Settings
    data: DataReport
    graph: Graph
    parameters: int
    epochs: float
    disk_bytes: int
    memory: MemoryEstimate
    seconds: float | None
    precision: str
    notes: list[str]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """The document of a dry run."""
        return {
            "data": self.data.as_json(),
            "model": dict(self.graph.hp),
            "parameters": self.parameters,
            "steps": self.settings.steps,
            "batch_size": self.settings.batch_size,
            "epochs": self.epochs,
            "disk_bytes": self.disk_bytes,
            "memory_bytes": {**self.memory.parts, "total": self.memory.total},
            "seconds": self.seconds,
            "precision": self.precision,
            "problems": self.problems,
            "settings": asdict(self.settings),
            "notes": self.notes,
        }


def make_plan(settings: Settings, progress: Progress = nothing) -> Plan:
    """Read the text and add up. Raises what a run would raise for its settings, its text and its tokenizer."""
    find_recipe(settings.to)
    train_options(settings)
    start = open_start(settings.start, settings.context_length) if settings.start else None
    if start is not None:
        settings = start.settle(settings)
    options = data_options(settings, Path())
    data = examine(options if start is None else replace(options, vocab=start.path), progress)
    rows = data.vocab_size if start is None else start.hparams.vocab_size
    family = find_family(settings.family)
    graph = record(family, family_sizes(family, settings.sizes, rows))
    parameters = count_parameters(graph, None if start is None else start.weights)
    settings = replace(settings, steps=steps_of(settings, data.samples), epochs=None)
    epochs = settings.steps * settings.batch_size / max(1, data.samples)
    notes, problems = [] if start is None else start.notes, list(data.problems)
    asked = train_options(settings)
    dtype = dtype_of(asked.precision)
    memory = estimate(graph, asked, dtype)
    seconds = None
    if problem := memory_problem(memory):
        problems.append(problem)
    else:
        seconds = settings.steps * step_seconds(make_step(graph, asked, dtype))
    precision = str(dtype).removeprefix("torch.")
    disk = disk_bytes(parameters)
    return Plan(settings, data, graph, parameters, epochs, disk, memory, seconds, precision, notes, problems)


def make_step(graph: Graph, options: TrainOptions, dtype: torch.dtype) -> Callable[[], object]:
    """A step of a run like that, on tokens without meaning. Nothing is written."""
    hp = graph.hp
    length = hp.context_length
    ids = (random_words(options.seed, 5, count=8 * length) % np.uint64(hp.vocab_size)).astype(np.int64)
    asked = replace(options, precision=str(dtype).removeprefix("torch."))
    return Trainer(graph, Batches(ids, context_length=length, seed=0), asked, folder=Path()).train_step
