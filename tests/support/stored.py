"""Random models in memory whose matrices are stored as a GGUF file would store them, without a file or a tokenizer.

weights = stored_weights(make_graph(hidden=96, heads=8), "Q8_0")
engine = NativeEngine(graph, weights)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from starscope.engine import Weights
from starscope.families import gpt_bigcode, llama
from starscope.family import Slot, make_hparams
from starscope.formats import decode, encode, find_format
from starscope.graph import Graph, record


def make_graph(
    *,
    hidden: int = 96,
    heads: int = 8,
    inner: int = 160,
    layers: int = 2,
    vocab: int = 61,
    positions: int = 160,
    multi_query: bool = True,
    activation: str = "gelu_tanh",
) -> Graph:
    """A GPT-BigCode graph of these sizes."""
    values = {
        "context_length": positions,
        "hidden_size": hidden,
        "num_layers": layers,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": 1 if multi_query else heads,
        "norm_epsilon": 1e-5,
        "activation": activation,
        "vocab_size": vocab,
    }
    return record(gpt_bigcode.FAMILY, make_hparams(gpt_bigcode.FAMILY, values))


def make_llama_graph(
    *,
    hidden: int = 96,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 160,
    layers: int = 2,
    vocab: int = 61,
    positions: int = 160,
    window: int = 0,
    bias: bool = False,
) -> Graph:
    """A LLaMA graph of these sizes."""
    values: dict[str, Any] = {
        "context_length": positions,
        "hidden_size": hidden,
        "num_layers": layers,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "qk_head_dim": head_dim,
        "rope_dims": head_dim,
        "norm_epsilon": 1e-5,
        "sliding_window": window,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "rope_factors": False,
        "vocab_size": vocab,
    }
    for row in llama.HPARAMS:
        values.setdefault(row.name, row.default_of(values))
    return record(llama.FAMILY, make_hparams(llama.FAMILY, values))


class StoredSource:
    """Tensors as bytes in memory: matrices in one format, the rest as float32. Implements `engine.weights.Source`."""

    def __init__(self, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
        self._tensors = tensors  # our name -> name of the format, uint8 [rows row_bytes]

    def has(self, slot: Slot) -> bool:
        return slot.name in self._tensors

    def format_name(self, slot: Slot) -> str:
        return self._tensors[slot.name][0]

    def read(self, slot: Slot) -> np.ndarray:
        name, raw = self._tensors[slot.name]
        return decode(find_format(name), raw).reshape(slot.shape)

    def read_rows(self, slot: Slot, rows: np.ndarray) -> np.ndarray:
        name, raw = self._tensors[slot.name]
        return decode(find_format(name), raw[rows])

    def read_stored(self, slot: Slot, start: int, stop: int, into: np.ndarray) -> np.ndarray:
        return self._tensors[slot.name][1][start:stop]


def stored_weights(
    graph: Graph, name: str, *, seed: int = 0, tied: bool = True, mixed: Mapping[str, str] = {}
) -> Weights:
    """Random weights, matrices as `name`; `mixed` gives another format for matrices whose name ends with its key.

    A format that starscope does not write gets random bytes, with scales that keep the values small.
    """
    rng, slots = np.random.default_rng(seed), graph.family.slots(graph.hp)
    tensors = {}
    for slot in slots:
        if tied and slot.tied_to:
            continue
        if len(slot.shape) == 1 or slot.always_f32:
            centre = 1 if "norm" in slot.name and slot.name.endswith("weight") else 0
            tensors[slot.name] = "F32", _encoded("F32", rng.normal(centre, 0.1, slot.shape), rng)
        else:
            chosen = next((other for end, other in mixed.items() if slot.name.endswith(end)), name)
            values = rng.normal(0, 1.5 / slot.shape[1] ** 0.5, slot.shape)
            tensors[slot.name] = chosen, _encoded(chosen, values, rng)
    return Weights(slots, StoredSource(tensors))


def _encoded(name: str, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    stored = find_format(name)
    if stored.encode is not None:
        return encode(stored, values.astype(np.float32))
    rows, cols = values.shape
    raw = rng.integers(0, 256, (rows * cols // stored.block_size, stored.block_bytes), np.uint8)
    scales = raw[:, slice(*stored.halves)].view(np.float16)
    scales[:] = rng.normal(0, 0.01, scales.shape)
    return raw.reshape(rows, -1)


def prompts(graph: Graph, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, graph.hp.vocab_size, n).tolist() for n in lengths]


def distance(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest magnitude expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def stored_matrix(
    format_name: str, rows: int, cols: int, *, seed: int = 0, by_triton: bool = False
) -> tuple[Any, np.ndarray]:
    """A random matrix as the torch engine has it on a GPU, here on the CPU; and its weights, float32 `[rows cols]`."""
    import torch

    from starscope.engine.gpu.stored import read_stored

    rng = np.random.default_rng(seed)
    raw = _encoded(format_name, rng.normal(0, 1.5 / cols**0.5, (rows, cols)), rng)
    weights = Weights([Slot("w", "w", "w", (rows, cols), always_f32=False)], StoredSource({"w": (format_name, raw)}))
    made = read_stored(weights, "w", torch.device("cpu"), by_triton=by_triton)
    return made, decode(find_format(format_name), raw)
