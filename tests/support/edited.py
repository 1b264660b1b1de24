"""Edits done by hand, in traces, entry by entry: what those that the engine does have to equal.

An edit here is `Given`, with its selections as a user writes them; `by_hand` reads them without the package's help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import starscope
from starscope.engine import make_engine
from starscope.engine.base import MASKED
from starscope.microscope import Edit
from support.stored import make_graph, stored_weights

LAYERS, HEADS, WIDTH, INNER, POSITIONS = 2, 4, 64, 96, 96

# value -> the axes of what is edited, and where it is shown
KINDS = {
    "token_embeddings": "rows", "layer_input": "rows", "attention_norm_output": "rows", "attention_output": "rows",
    "layer_mid": "rows", "mlp_neurons": "rows", "mlp_output": "rows", "layer_output": "rows",
    "final_norm_output": "rows", "logits": "rows", "transformer.h.{i}.attn.c_attn.output": "rows",
    "attention_premix": "heads behind", "attention_head_outputs": "heads behind",
    "attention_queries": "heads before", "attention_keys": "cached", "attention_values": "cached",
    "attention_scores": "pattern", "attention_probabilities": "pattern",
}  # fmt: skip
OF_MODEL = ("token_embeddings", "final_norm_output", "logits")


@cache
def make_model(engine: str, form: str = "F32", *, multi_query: bool = True) -> starscope.Model:
    """A small random model with the demo's vocabulary."""
    demo = starscope.load("demo", engine="numpy")
    graph = make_graph(
        hidden=WIDTH,
        heads=HEADS,
        inner=INNER,
        layers=LAYERS,
        vocab=demo.vocab_size,
        positions=POSITIONS,
        multi_query=multi_query,
    )
    weights = stored_weights(graph, form, seed=3)
    return starscope.Model(Path("random"), weights, demo.tokenizer, make_engine(engine, graph, weights))


@dataclass(frozen=True)
class Given:
    """An edit, with every selection as it is written."""

    value: str
    op: str
    tensor: Any = None
    factor: float = 1.0
    layers: Any = None
    heads: Any = None
    positions: Any = None
    keys: Any = None
    steps: Any = None
    rows: Any = None

    @property
    def edit(self) -> Edit:
        return Edit(**vars(self))

    def names(self, model: starscope.Model) -> list[str]:
        """The full names of its values, by layer."""
        if self.value in OF_MODEL:
            return [self.value]
        pattern = self.value
        if "{i}" not in pattern:
            host = "self_attn." if self.value.startswith("attention_") else "mlp." if "mlp_" in self.value else ""
            host = "" if self.value == "attention_norm_output" else host
            pattern = f"layers.{{i}}.{host}{self.value}"
        return [pattern.format(i=layer) for layer in members(self.layers, model.num_layers, model.num_layers)]


def members(selection: Any, end: int, most: int = POSITIONS) -> list[int]:
    """The numbers selected, in order."""
    if selection is None:
        return list(range(most))
    if selection == "new":
        return list(range(end, most))
    if isinstance(selection, slice):
        start, stop = selection.start or 0, end if selection.stop is None else selection.stop
        return list(range(max(start + end * (start < 0), 0), stop + end * (stop < 0)))
    if isinstance(selection, int):
        selection = [selection]
    return list(dict.fromkeys(one + end if one < 0 else one for one in selection))


def by_hand(model: starscope.Model, given: Sequence[Given], t: Any, prompts: Sequence[Any], step: int) -> None:
    """In a trace of prompts, at one of its steps: every edit, in the order in which the model makes the values."""
    names = model.scope
    todo = [(names.reading(name).edge, i, name, one) for i, one in enumerate(given) for name in one.names(model)]
    for _, _, name, one in sorted(todo, key=lambda row: row[:2]):
        _change(model, name, one, prompts, step)


def _change(model: starscope.Model, name: str, one: Given, prompts: Sequence[Any], step: int) -> None:
    value, kind = model.scope.get(name), KINDS[one.value]
    if kind == "pattern":  # written in every step: attention goes another way then
        value = value.clone()
    for row, prompt in enumerate(prompts):
        length = len(prompt) if step == 0 else 1
        past = 0 if step == 0 else len(prompt) + step - 1
        longest = max(len(prompt) for prompt in prompts)
        seq = longest if step == 0 else 1
        key = longest + step
        if one.rows is not None and row not in members(one.rows, 0):
            continue
        for number, position in enumerate(members(one.positions, len(prompt))):
            if not past <= position < past + length or step not in members(one.steps, 10**6, 50):
                continue
            tensor = one.tensor[number] if one.op == "replace" else one.tensor
            at = seq - length + position - past
            if kind == "rows":
                _set(value[row, at], one, tensor, (value.shape[-1],))
                continue
            heads = members(one.heads, HEADS, value.shape[2 if kind == "heads behind" else 1])
            if kind != "pattern":
                if kind == "cached":
                    at = key - len(prompt) - step + position
                for n, head in enumerate(heads):
                    place = value[row, at, head] if kind == "heads behind" else value[row, head, at]
                    _set(place, one, _part(tensor, n, (len(heads), value.shape[-1])), (value.shape[-1],))
                continue
            keys = members(one.keys, len(prompt))
            for n, head in enumerate(heads):
                for m, column in enumerate(keys):
                    if column <= position:
                        shape = (len(heads), 1 if one.keys is None else len(keys))
                        part = _part(tensor, n, shape)
                        part = part if part is None or np.ndim(part) == 0 else part[m if len(part) > 1 else 0]
                        shown = key - len(prompt) - step + column
                        _set(value[row, head, at, shown : shown + 1], one, part, (1,))
    if kind == "pattern":
        model.scope.set(name, value)


def _part(tensor: Any, head: int, shape: tuple[int, ...]) -> Any:
    """The row of one head."""
    return None if tensor is None else np.broadcast_to(tensor, shape)[head]


def _set(place: torch.Tensor, one: Given, tensor: Any, shape: tuple[int, ...]) -> None:
    if one.op == "scale" and one.factor:
        place *= one.factor
        return
    numbers = {"zero": 0.0, "scale": 0.0, "mask": MASKED}.get(one.op, tensor)
    factor = np.float32(one.factor if one.op == "add" else 1)
    array = factor * np.broadcast_to(np.float32(numbers), shape)
    fresh = torch.from_numpy(np.array(array, np.float32))
    place[:] = place + fresh if one.op == "add" else fresh


def selections(end: int, *, new: bool = False, negative: bool = True) -> st.SearchStrategy[Any]:
    """Some of the numbers below `end`, in every way of writing them."""
    low = -end if negative else 0
    numbers = st.integers(low, end - 1)
    some = st.lists(st.integers(0, end - 1), min_size=1, max_size=4, unique=True).flatmap(
        lambda ones: st.just([one - end if negative and i % 2 else one for i, one in enumerate(ones)])
    )
    spans = st.tuples(st.integers(0, end - 1), st.integers(1, end)).map(
        lambda two: slice(min(two[0], two[1] - 1), max(two))
    )
    open_spans = st.integers(low, end - 1).map(lambda start: slice(start, None))
    kinds = [st.none(), numbers, some, spans, *([open_spans] if negative else []), *([st.just("new")] if new else [])]
    return st.one_of(kinds)


@st.composite
def given_edits(draw: Any, *, multi_query: bool, shortest: int, batch: int) -> Given:
    """Any edit of the small models, for prompts of `shortest` tokens or more."""
    value = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[value]
    pattern = kind == "pattern"
    ops = ["add", "scale", "set", "zero", "replace", *(["mask"] if value == "attention_scores" else [])]
    op = draw(st.sampled_from(ops))
    heads = None
    count = 1 if multi_query and kind == "cached" else HEADS
    if kind != "rows":
        heads = draw(
            st.none() | st.integers(0, count - 1) | st.lists(st.integers(0, count - 1), min_size=1, unique=True)
        )
    positions = draw(selections(shortest, new=True))
    if op == "replace":
        positions = draw(st.integers(-shortest, shortest + 2) | st.just([0, 1, shortest + 1]) | st.just(slice(0, 2)))
    keys = None
    if pattern:
        keys = draw(st.integers(0, shortest - 1) | st.just([1, 0]) | st.just([-1]) | st.just(slice(0, 2)))
        keys = keys if op == "mask" or draw(st.booleans()) else None
    steps = draw(st.none() | st.integers(0, 2) | st.just([0, 2]) | st.just(slice(1, 3)))
    rows = draw(st.none() | st.integers(0, batch - 1) | st.just([0]))
    layers = None if value in OF_MODEL else draw(st.none() | st.just([-1]) | st.integers(0, LAYERS - 1))
    shape: list[int] = []
    if kind == "rows":
        shape = [{"mlp_neurons": INNER, "logits": make_model("numpy").vocab_size}.get(value, WIDTH)]
        shape = [WIDTH + 2 * WIDTH // (HEADS if multi_query else 1)] if "c_attn" in value else shape
    else:
        selected = len(members(heads, count, count))
        width = (1 if keys is None else len(members(keys, shortest))) if pattern else WIDTH // HEADS
        shape = [selected, width]
    shape = shape[draw(st.integers(0, len(shape))) :]
    tensor, factor = None, 1.0
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    if op in ("add", "set", "replace"):
        before = [len(members(positions, shortest))] if op == "replace" else []
        tensor = numbers.normal(0, 0.7, (*before, *shape)).astype(np.float32)
        tensor = abs(tensor) if value == "attention_probabilities" else tensor
    if op in ("add", "scale"):
        factor = float(np.float32(draw(st.sampled_from([0.0, -0.5, 0.3, 1.7]))))
    return Given(value, op, tensor, factor, layers, heads, positions, keys, steps, rows)


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 500, length).tolist() for length in lengths]


def cuts(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A prompt in chunks of these sizes, again and again."""
    start = 0
    for i in range(total):
        stop = min(total, start + sizes[i % len(sizes)])
        if start < stop:
            yield start, stop
        start = stop
