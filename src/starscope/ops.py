"""The op table: every step that a forward pass may be recorded with.

A row gives the op's name, its meaning and its shape rule, which refuses what does not fit at the time of
recording. What an op computes is written once per engine, and a test holds every engine to every row; the NumPy
engine's is the definition. Axes are integers, or the names of sizes known only when it runs:

    rows     all new tokens of all sequences, one after another      wanted   the rows whose logits are wanted
    query    the new tokens of one sequence                          key      its cached and new tokens

A value with a `query` or `key` axis exists once for each sequence; nothing is ever padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starscope.errors import StarscopeError

Axes = tuple[int | str, ...]
ShapeRule = Callable[[Sequence[Axes], Sequence[tuple[int, ...]], Mapping[str, Any]], tuple[Axes, ...]]

PER_SEQUENCE = frozenset({"query", "key"})


class ShapeError(StarscopeError):
    """A family recorded what does not fit together: a mistake in the family's file."""

    code = "family"


@dataclass(frozen=True)
class OpSpec:
    """One row of the table. `shapes(inputs, weights, attrs)` gives the axes of each output."""

    name: str
    meaning: str
    shapes: ShapeRule


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _embed(inputs: Sequence[Axes], weights: Sequence[tuple[int, ...]], _: Mapping[str, Any]) -> tuple[Axes, ...]:
    _expect(len(inputs[0]) == 1, f"embed takes one index a row; found axes {inputs[0]}")
    return ((inputs[0][0], weights[0][1]),)


def _same(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    _expect(all(axes == inputs[0] for axes in inputs), f"expected values of one shape; found {list(inputs)}")
    return (inputs[0],)


def _norm(inputs: Sequence[Axes], weights: Sequence[tuple[int, ...]], _: Mapping[str, Any]) -> tuple[Axes, ...]:
    _expect(all(shape == inputs[0][-1:] for shape in weights), f"norm over {inputs[0]} with weights {list(weights)}")
    return (inputs[0],)


def _linear(inputs: Sequence[Axes], weights: Sequence[tuple[int, ...]], _: Mapping[str, Any]) -> tuple[Axes, ...]:
    out, size = weights[0]
    _expect(inputs[0][-1] == size, f"linear over {inputs[0]} with a weight [{out} {size}]")
    _expect(
        all(bias == (out,) for bias in weights[1:]),
        f"linear with a weight [{out} {size}] and a bias {list(weights[1:])}",
    )
    return ((*inputs[0][:-1], out),)


def _split_heads(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], attrs: Mapping[str, Any]) -> tuple[Axes, ...]:
    rows, size = inputs[0]
    heads, dim = attrs["heads"], attrs["head_dim"]
    _expect(size == sum(heads) * dim, f"{size} columns for {' + '.join(map(str, heads))} heads of {dim}")
    return tuple((rows, count, dim) for count in heads)


def _rope(inputs: Sequence[Axes], weights: Sequence[tuple[int, ...]], _: Mapping[str, Any]) -> tuple[Axes, ...]:
    dim = inputs[0][-1]
    _expect(len(inputs[0]) == 3 and isinstance(dim, int) and dim % 2 == 0, f"rope over heads {inputs[0]}")
    _expect(inputs[1] == inputs[0][:1], f"rope of {inputs[0]} at positions {inputs[1]}")
    _expect(all(shape == (int(dim) // 2,) for shape in weights), f"rope over {dim} with factors {list(weights)}")
    return (inputs[0],)


def _cache(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    _, heads, dim = inputs[0]
    return ((heads, "key", dim),)


def _scores(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    (_, heads, dim), (kv_heads, key, kv_dim) = inputs
    _expect(dim == kv_dim, f"queries of {dim} and keys of {kv_dim}")
    _expect(
        isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads == 0, f"{heads} heads over {kv_heads}"
    )
    return ((heads, "query", key),)


def _mix(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    (heads, _, _), (_, _, dim) = inputs
    return (("rows", heads, dim),)


def _merge_heads(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    rows, heads, dim = inputs[0]
    _expect(isinstance(heads, int) and isinstance(dim, int), f"heads to merge have known sizes; found {inputs[0]}")
    return ((rows, int(heads) * int(dim)),)


def _wanted_rows(inputs: Sequence[Axes], _w: Sequence[tuple[int, ...]], _a: Mapping[str, Any]) -> tuple[Axes, ...]:
    return (("wanted", *inputs[0][1:]),)


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec("embed", "row index of a table, for each index", _embed),
        OpSpec("add", "elementwise sum", _same),
        OpSpec("layer_norm", "(x - mean) / sqrt(variance + epsilon) · weight + bias over the last axis", _norm),
        OpSpec("rms_norm", "x / sqrt(mean(x²) + epsilon) · weight over the last axis", _norm),
        OpSpec("linear", "x @ weight.T + bias", _linear),
        OpSpec("split_heads", "columns cut into values of `heads[0]`, `heads[1]`, ... heads", _split_heads),
        OpSpec("rope", "pairs (i, i + dim/2) of each head turned by position · frequency[i], see rope.py", _rope),
        OpSpec("cache", "append the new rows to each sequence's cache, give all of it as it is kept there", _cache),
        OpSpec(
            "scores",
            "scale · q @ k.T for each query head, the most negative float32 where key > query or, with a "
            "`window`, key <= query - window",
            _scores,
        ),
        OpSpec("softmax", "exp(x - max) / sum over the last axis, in float32", _same),
        OpSpec("mix", "probabilities @ v for each query head", _mix),
        OpSpec("merge_heads", "the heads side by side", _merge_heads),
        OpSpec("gelu", "x · Φ(x), Φ the normal distribution function", _same),
        OpSpec("gelu_tanh", "x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))", _same),
        OpSpec("silu", "x / (1 + exp(-x))", _same),
        OpSpec("multiply", "elementwise product", _same),
        OpSpec("wanted_rows", "the rows whose logits are wanted", _wanted_rows),
    )
}
