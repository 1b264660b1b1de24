"""Trainers of the tiny model on the tiny corpus, and what their runs left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from starscope.train.data import Batches
from starscope.train.fim import FillInTheMiddle, FimIds
from starscope.train.loop import HeldOut, Trainer, TrainOptions
from starscope.train.schedules import Schedule
from support.training import DOCUMENTS, tiny_bpe, tiny_graph, tiny_ids

FIM = FimIds.of(tiny_bpe())
SCHEDULE = Schedule(peak=1e-2, warmup_steps=5, decay_steps=60)
HELD_OUT = HeldOut([np.array(tiny_bpe().encode(DOCUMENTS[0]))], len(DOCUMENTS[0].encode()), FIM.end_of_text)


def make_trainer(
    folder: Path,
    *,
    steps: int = 60,
    seed: int = 0,
    fim_rate: float = 0.5,
    facts: dict[str, object] | None = None,
    **options: object,
) -> Trainer:
    transform = FillInTheMiddle(tiny_bpe(), FIM, seed=seed, rate=fim_rate)
    values = {
        "batch_size": 8,
        "micro_batch_size": 4,
        "precision": "float32",
        "log_every": 1,
        "schedule": SCHEDULE,
        **options,
    }
    return Trainer(
        tiny_graph(),
        Batches(tiny_ids(repeat=3), context_length=32, seed=seed, transform=transform),
        TrainOptions(steps=steps, seed=seed, **values),  # type: ignore[arg-type]
        folder=folder,
        held_out=HELD_OUT,
        pad=FIM.pad,
        facts=facts,
    )


def read_log(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
