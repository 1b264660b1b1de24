"""What the checks of traced families share: prompts, tolerances, the shapes that layouts say, what padding is."""

from __future__ import annotations

from typing import Any

import starscope
from starscope.values import VALUES
from support.numbers import TOLERANCE
from support.traces import same, value_ulps

TYPES = ("f32", "q8_0")
PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
OTHER = [12, 301, 5, 78, 90, 33, 101, 4, 200]
STEPS = [PROMPT, [33], [250]]
HALF = 2.0**-10  # of the largest magnitude: what roundings to float16 and bfloat16 in attention move


def shape_of(
    model: starscope.Model, name: str, batch: int = 1, seq: int = len(PROMPT), key: int | None = None
) -> list[int]:
    """The shape that a value has, by the axes of its layout."""
    value = VALUES[name.rpartition(".")[2]]
    sizes = {"batch": batch, "seq": seq, "query": seq, "key": seq if key is None else key}
    has_history = value.layout in ("Keys", "Values")
    return [
        sizes["key"] if axis == "seq" and has_history else sizes.get(axis) or getattr(model, axis)
        for axis in value.axes
    ]


def assert_equal_but_for_attention(model: starscope.Model, name: str, found: Any, expected: Any) -> None:
    """Equal bits; but a pattern that is written, whatever is in it, is not what attention in one piece goes by."""
    if VALUES[name.rpartition(".")[2]].layout == "Pattern":
        assert value_ulps(found, expected) <= (HALF * 2**23 if model.weights.half_cache else TOLERANCE), name
    else:
        assert same(found, expected), name


def ids_of_step(model: starscope.Model, step: int, plain: list[Any]) -> Any:
    """What the unedited run fed into a step."""
    return model.input_ids if step == 0 else plain[step - 1][:, -1].argmax(-1)[:, None]


def unpadded(name: str, row: Any, missing: int) -> Any:
    """A row of a batch without its padding."""
    layout = VALUES[name.rpartition(".")[2]].layout
    if layout == "Pattern":
        return row[:, missing:, missing:]
    return row[:, missing:] if layout in ("Queries", "Keys", "Values") else row[missing:]
