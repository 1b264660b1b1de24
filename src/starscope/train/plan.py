"""What a run would read and take, without making it: data, model, disk.

plan = make_plan(resolve({"data": ("src/",)}, preset="demo"))
print(plan.data.train_tokens, plan.parameters, plan.data.problems)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from starscope.family import find_family
from starscope.graph import Graph, record
from starscope.recipes import find_recipe
from starscope.train.examine import DataReport, examine
from starscope.train.job import count_parameters, data_options, disk_bytes, steps_of, train_options
from starscope.train.prepare import Progress, nothing
from starscope.train.presets import family_sizes
from starscope.train.settings import Settings
from starscope.train.start import open_start


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes; `epochs` is how often each token would be read, `notes` what a model to start from says."""

    settings: Settings
    data: DataReport
    graph: Graph
    parameters: int
    epochs: float
    disk_bytes: int
    notes: list[str]

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
    return Plan(settings, data, graph, parameters, epochs, disk_bytes(parameters), [] if start is None else start.notes)
