"""Every standard value of a model by its full name, read and written as users do it, and what to write there.

for name in value_names(model):
    value = read(model, name)
    write(model, name, changed(value))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import starscope
from starscope.engine.base import MASKED
from starscope.formats import INTEGER_FORMATS, round_activation
from starscope.microscope.tensors import as_array
from starscope.values import BESIDE_THE_GRAPH, MODEL, VALUES, qualified
from support.numbers import ulps

INPUTS = frozenset({"input_ids", *BESIDE_THE_GRAPH})


def value_names(model: starscope.Model, layers: Sequence[int] | None = None) -> list[str]:
    """The names of all floating-point values that the model has, in the order in which it makes them."""
    made = [name for name, value in VALUES.items() if value.host == MODEL and name not in INPUTS]
    before, after = made[:2], made[2:]
    inner = [name for name, value in VALUES.items() if value.host != MODEL]
    chosen = range(model.num_layers) if layers is None else layers
    names = [*before, *(qualified(name, layer) for layer in chosen for name in inner), *after]
    return [name for name in names if name in model.graph.names]


def part_of(model: starscope.Model, name: str) -> tuple[Any, str]:
    """The object that has a value, and the value's own name."""
    *path, last = name.split(".")
    part: Any = model
    for one in path:
        part = part[int(one)] if one.isdigit() else getattr(part, one)
    return part, last


def read(model: starscope.Model, name: str) -> Any:
    part, last = part_of(model, name)
    return getattr(part, last)


def write(model: starscope.Model, name: str, value: Any) -> None:
    part, last = part_of(model, name)
    setattr(part, last, value)


def changed(value: Any, seed: int = 0) -> Any:
    """Other numbers of the same size in its place; what is masked stays so."""
    noise = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.3, tuple(value.shape)).astype(np.float32))
    noise = noise * float(abs(value[value > MASKED]).max())
    if value.ndim == 4 and value.shape[-2] <= value.shape[-1]:  # a pattern: masked entries and zeros stay
        noise = noise.abs()
    return torch.where((value == MASKED) | (value == 0), value, value + noise).as_subclass(torch.Tensor)


def all_values(model: starscope.Model, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """In a trace: all values of this step, as copies of what they are."""
    return {name: read(model, name).clone() for name in (value_names(model) if names is None else names)}


def logits_of(model: starscope.Model, prompt: Any, **options: Any) -> torch.Tensor:
    """Logits of a run that nobody looks at otherwise: `[batch seq vocab_size]`."""
    with model.trace(prompt, **options) as t:
        pass
    logits: torch.Tensor = t.result.logits.detach().clone().as_subclass(torch.Tensor)
    return logits


def multiplied(model: starscope.Model, hidden: Any, weight: str) -> Any:
    """What a linear layer takes: on the native engine with quantized weights, rounded activations."""
    if model.engine.name != "native" or model.weights.format_name(weight) not in INTEGER_FORMATS:
        return hidden
    return torch.from_numpy(round_activation(hidden.numpy()))


def same(found: Any, expected: Any) -> bool:
    """Equal bit for bit, shapes and types too."""
    a, b = (np.ascontiguousarray(as_array(x)) for x in (found, expected))
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def value_ulps(found: Any, expected: Any) -> float:
    """`ulps` of what is not masked; infinite where other entries are masked."""
    found, expected = (as_array(x).astype(np.float64) for x in (found, expected))
    if found.shape != expected.shape or ((found == MASKED) != (expected == MASKED)).any():
        return float("inf")
    return ulps(np.where(found == MASKED, 0, found), np.where(expected == MASKED, 0, expected))
