"""Sizes that go together: a shape, a vocabulary, and how to train it. Options given beside a preset win over it.

Values have the names of `Settings`. A preset is of no family: it says the sizes that every family has, and a family's
own table says the rest (`family_sizes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starscope.errors import UsageError
from starscope.family import Family, HParams, make_hparams

SIZES = (
    "context_length",
    "hidden_size",
    "num_layers",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "norm_epsilon",
    "activation",
)


@dataclass(frozen=True)
class Preset:
    """One row: what it is for, and its values by the names of `Settings`."""

    about: str
    values: Mapping[str, Any]


PRESETS = {
    "tiny": Preset(
        "a first model in minutes: 4 blocks × 128, 0.9 million parameters",
        {
            "vocab_size": 1024, "context_length": 256, "hidden_size": 128, "num_layers": 4, "num_heads": 4,
            "steps": 1000, "decay_steps": 1000, "batch_size": 16, "learning_rate": 3e-3,
        },
    ),
    "demo": Preset(
        "the shape of the model in the package: 6 blocks × 256, 4.1 million parameters",
        {
            "vocab_size": 2560, "context_length": 512, "hidden_size": 256, "num_layers": 6, "num_heads": 4,
            "intermediate_size": 768, "steps": 4000, "decay_steps": 4000, "batch_size": 16, "learning_rate": 2.5e-3,
        },
    ),
    "nano": Preset(
        "nanoGPT's recipe for a CPU: 4 blocks × 128 on characters, context 64",
        {
            "vocab": "chars", "context_length": 64, "hidden_size": 128, "num_layers": 4, "num_heads": 4,
            "steps": 2000, "decay_steps": 2000, "batch_size": 12, "learning_rate": 2e-3, "beta2": 0.99, "fim_rate": 0.0,
            "held_out": 0.1, "split": "last",
        },
    ),
    "text": Preset(
        "the shape of llama.cpp's train-text-from-scratch: 16 blocks × 256, context 64",
        {
            "vocab_size": 8192, "context_length": 64, "hidden_size": 256, "num_layers": 16, "num_heads": 8,
            "steps": 2000, "decay_steps": 2000, "batch_size": 16, "learning_rate": 1e-3, "fim_rate": 0.0,
        },
    ),
    "small": Preset(
        "tiny_starcoder_py's shape: 20 blocks × 768, for a machine with time",
        {
            "vocab_size": 16384, "context_length": 1024, "hidden_size": 768, "num_layers": 20, "num_heads": 12,
            "steps": 20000, "decay_steps": 20000, "batch_size": 32, "learning_rate": 6e-4,
        },
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """The preset of that name; UsageError lists them."""
    if name not in PRESETS:
        raise UsageError(f"no preset is called {name!r}; there are: {', '.join(PRESETS)}.")
    return PRESETS[name]


def family_sizes(family: Family, values: Mapping[str, Any], vocab_size: int) -> HParams:
    """A family's hyperparameters from sizes by their standard names; what is None follows from the rest.

    The family says what follows (`usual`), its table the others.
    """
    given = {name: value for name, value in values.items() if value is not None}
    usual = {**(family.usual(given) if family.usual else {}), "vocab_size": vocab_size}
    table = {row.name: row for row in family.hparams}
    unknown = [name for name in given if name not in table]
    if unknown:
        raise UsageError(f"{family.name} has no {unknown[0]}.")
    made: dict[str, Any] = {}
    for name, row in table.items():
        made[name] = given.get(name, usual.get(name))
        if made[name] is None:
            made[name] = row.default_of(made)
        if made[name] is None:
            raise UsageError(f"{family.name} needs {name}, which no preset says.")
    return make_hparams(family, made)
