"""Trainers of the tiny model on the tiny corpus, and what their runs left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource, Weights
from starscope.graph import Graph
from starscope.train.data import Batches
from starscope.train.fim import FillInTheMiddle, FimIds
from starscope.train.forward import Forward
from starscope.train.loop import HeldOut, Trainer, TrainOptions
from starscope.train.optim import initial_weights
from starscope.train.schedules import Schedule
from support.training import DOCUMENTS, VOCAB_SIZE, tiny_bpe, tiny_graph, tiny_ids

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


def make_engine(graph: Graph) -> TorchEngine:
    """An engine with initial weights that ask for gradients, vectors moved off their start."""
    arrays = {
        name: array if array.ndim > 1 else array + np.linspace(-0.1, 0.1, len(array), dtype=np.float32)
        for name, array in initial_weights(graph, 0).items()
    }
    engine = TorchEngine(graph, Weights(graph.family.slots(graph.hp), ArraySource(arrays)))
    for parameter in engine.parameters.values():
        parameter.requires_grad_()
    return engine


def tiny_batch() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (4, 33), generator=torch.Generator().manual_seed(1))


def trainer_gradients(*, num_kv_heads: int = 1, **options: object) -> dict[str, torch.Tensor]:
    """The gradients of one batch, by name."""
    engine = make_engine(tiny_graph(num_kv_heads=num_kv_heads))
    Forward(engine, **options).loss_sum(tiny_batch(), 7).backward()  # type: ignore[arg-type]
    return {name: parameter.grad for name, parameter in engine.parameters.items()}


def saved_bytes(*, recompute: bool) -> int:
    """What autograd holds between the forward and the backward pass of eight blocks, weights aside."""
    engine = make_engine(tiny_graph(num_layers=8))
    weights = {parameter.data_ptr() for parameter in engine.parameters.values()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = Forward(engine, recompute=recompute).loss_sum(tiny_batch(), None)
    loss.detach()
    return sum(held.values())
