"""What a run would read and take, without making it: data, model, disk.

plan = make_plan(resolve({"data": ("src/",)}, preset="demo"), Path("out"))
print(plan.data.train_tokens, plan.parameters, plan.data.problems)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starscope.engine.torch_engine import TorchEngine
from starscope.errors import DoesNotFitError
from starscope.family import find_family
from starscope.graph import Graph, record
from starscope.train.compiling import COMPILE_SECONDS, foreseen, step_seconds
from starscope.train.data import Batches, random_words
from starscope.train.estimate import MemoryEstimate, estimate
from starscope.train.examine import DataReport, Problem, examine
from starscope.train.job import (
    check_settings,
    count_parameters,
    data_options,
    disk_bytes,
    disk_problem,
    dtype_of,
    memory_problem,
    steps_of,
    train_options,
)
from starscope.train.loop import Trainer, TrainOptions
from starscope.train.new_adapter import NewAdapter, open_base
from starscope.train.prepare import Progress, nothing
from starscope.train.presets import family_sizes
from starscope.train.settings import Settings
from starscope.train.start import open_start


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes; `epochs` is how often each token would be read, `notes` what a model to start from says.

    `ranks` are those of an adapter, which the `parameters` are then of; empty where the whole model is trained.
    `seconds` are those of all steps, without evaluations; None where a run would make none.
    `problems` are those of the data and of this machine; `status` is what a run would end with because of them.
    """

    settings: Settings
    data: DataReport
    graph: Graph
    parameters: int
    ranks: Mapping[str, int]
    epochs: float
    disk_bytes: int
    memory: MemoryEstimate
    seconds: float | None
    precision: str
    compiled: str
    notes: list[str]
    problems: list[Problem]

    @property
    def status(self) -> int:
        return next((problem.status for problem in self.problems if problem.status), 0)

    def as_json(self) -> dict[str, Any]:
        """The document of a dry run."""
        return {
            "data": self.data.as_json(),
            "model": dict(self.graph.hp),
            "parameters": self.parameters,
            **({"ranks": dict(self.ranks)} if self.ranks else {}),
            "steps": self.settings.steps,
            "batch_size": self.settings.batch_size,
            "epochs": self.epochs,
            "disk_bytes": self.disk_bytes,
            "memory_bytes": {**self.memory.parts, "total": self.memory.total},
            "seconds": self.seconds,
            "precision": self.precision,
            "compiled": self.compiled,
            "problems": [problem.text for problem in self.problems],
            "settings": asdict(self.settings),
            "notes": self.notes,
        }


def make_plan(settings: Settings, out: Path | None = None, progress: Progress = nothing) -> Plan:
    """Read the text and add up. Raises what a run would raise for its settings, its text and its tokenizer.

    `out` is the folder of the run: what lies there is no text of it, and its disk has to suffice.
    """
    check_settings(settings)
    start, new = None, None
    if settings.rank:
        start, settings = open_base(settings)
        new = NewAdapter.beside(start, settings)
    elif settings.start:
        start = open_start(settings.start, settings.context_length)
        settings = start.settle(settings)
    options = replace(data_options(settings, Path()), exclude=() if out is None else (out,))
    data = examine(options if start is None else replace(options, vocab=start.path), progress)
    settings = replace(settings, steps=steps_of(settings, data.samples), epochs=None)
    epochs = settings.steps * settings.batch_size / max(1, data.samples)
    notes, problems = [] if start is None else start.notes, list(data.problems)
    asked = train_options(settings)
    dtype = dtype_of(asked.precision)
    if new is None:
        family = find_family(settings.family)
        hp = family_sizes(family, settings.sizes, data.vocab_size) if start is None else start.hparams
        graph, engine = record(family, hp), None
        parameters = count_parameters(graph, None if start is None else start.weights)
        memory = estimate(graph, asked, dtype)
    else:
        graph, engine = new.graph, new.engine()
        parameters, memory = new.parameters, new.memory(asked, dtype)
    seconds = None
    if out is not None and (problem := disk_problem(out, parameters)):
        problems.append(Problem(problem, DoesNotFitError.exit_status))
    if problem := memory_problem(memory):
        problems.append(Problem(problem, DoesNotFitError.exit_status))
    if not any(problem.status for problem in problems):  # else there would be no step
        seconds = settings.steps * step_seconds(make_step(graph, asked, dtype, engine))
    precision = str(dtype).removeprefix("torch.")
    disk = disk_bytes(parameters)
    compiled = foreseen(asked.compile, "cpu") or f"compiled: about {COMPILE_SECONDS:.0f} s, and what it saves is told"
    ranks = {} if new is None else new.ranks
    return Plan(
        settings, data, graph, parameters, ranks, epochs, disk, memory, seconds, precision, compiled, notes, problems
    )


def make_step(
    graph: Graph, options: TrainOptions, dtype: torch.dtype, engine: TorchEngine | None
) -> Callable[[], object]:
    """A step of a run like that, on tokens without meaning, written nowhere; `engine` has an adapter's parameters."""
    hp = graph.hp
    length = hp.context_length
    ids = (random_words(options.seed, 5, count=8 * length) % np.uint64(hp.vocab_size)).astype(np.int64)
    asked = replace(options, precision=str(dtype).removeprefix("torch."))
    return Trainer(graph, Batches(ids, context_length=length, seed=0), asked, folder=Path(), engine=engine).train_step
