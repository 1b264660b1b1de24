"""What each op computes, with torch functions: differentiable, on any device.

A value with a `query` or `key` axis is a list with one tensor `[n ...]` a group of n sequences of one length. The three
ops of attention have a form in one call, `fused_attention`, for wherever nobody asks for what is between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from starscope.engine.base import MASKED
from starscope.engine.gpu.products import linear as stored_linear
from starscope.engine.gpu.stored import StoredMatrix
from starscope.graph import Op
from starscope.ops import OPS
from starscope.rope import inverse_frequencies


class History(Protocol):
    """Where a sequence's keys and values are kept."""

    def append(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.append`."""

    def replace(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.replace`."""


@dataclass(frozen=True)
class Group:
    """Sequences that attend in one call: `count` of them, each with `new` rows behind `past` cached ones.

    `position`: int64 `[1]` on the device, instead of `past`, for a recorded step (`gpu.static`): one sequence, one row,
    which gets all of a window of keys, those behind it too.
    """

    count: int
    new: int
    past: int
    cache: History | None
    position: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One run over rows that lie one after another: the groups they belong to and the rows that are wanted."""

    groups: list[Group]
    wanted: Tensor | None  # None: all of them
    kept: dict[object, Tensor] = field(default_factory=dict)  # what several ops of the step need, made once

    def split(self, rows: Tensor) -> list[Tensor]:
        """`[rows ...]` -> one `[count new ...]` a group."""
        parts = torch.split(rows, [group.count * group.new for group in self.groups])
        return [
            part.reshape(group.count, group.new, *part.shape[1:])
            for part, group in zip(parts, self.groups, strict=True)
        ]


Weight = Tensor | StoredMatrix  # matrices alone may be stored ones, which `embed` and `linear` read
Kernel = Callable[[Mapping[str, Any], Step, Op, list[Any]], Any]


def embed(weights: Mapping[str, Weight], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    table = weights[op.weights[0]]
    return table.rows(inputs[0]) if isinstance(table, StoredMatrix) else F.embedding(inputs[0], table)


def add(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    total: Tensor = inputs[0] + inputs[1]
    return total


def layer_norm(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    weight, *bias = (weights[name] for name in op.weights)
    return F.layer_norm(inputs[0], weight.shape, weight, bias[0] if bias else None, op.attrs["epsilon"])


def rms_norm(weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    weight, *bias = (weights[name] for name in op.weights)
    y = F.rms_norm(inputs[0], weight.shape, weight, op.attrs["epsilon"])
    return y + bias[0] if bias else y


def linear(weights: Mapping[str, Any], _step: Step, op: Op, inputs: list[Any]) -> Tensor:
    weight, *bias = (weights[name] for name in op.weights)
    product = stored_linear if isinstance(weight, StoredMatrix) else F.linear
    made: Tensor = product(inputs[0], weight, *bias)
    return made


def split_heads(_weights: Mapping[str, Tensor], _step: Step, op: Op, inputs: list[Any]) -> tuple[Tensor, ...] | Tensor:
    x = inputs[0].unflatten(-1, (-1, op.attrs["head_dim"]))  # [rows sum(heads) head_dim]
    parts: tuple[Tensor, ...] = x.split(op.attrs["heads"], dim=1)
    return parts if len(parts) > 1 else parts[0]


def rope(weights: Mapping[str, Tensor], step: Step, op: Op, inputs: list[Any]) -> Tensor:
    x, positions = inputs
    key = ("frequencies", x.shape[-1], op.attrs["base"], op.attrs["scale"])
    if key not in step.kept:
        step.kept[key] = torch.from_numpy(inverse_frequencies(*key[1:])).to(x.device)
    frequencies = step.kept[key]
    if op.weights:
        frequencies = frequencies / weights[op.weights[0]].float()
    angles = positions.float()[:, None, None] * frequencies  # [rows 1 dim/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def cache(_weights: Mapping[str, Tensor], step: Step, op: Op, inputs: list[Any]) -> list[Tensor]:
    assert op.layer is not None
    made = []
    for group, rows in zip(step.groups, step.split(inputs[0]), strict=True):
        if group.cache is None:
            made.append(rows.transpose(1, 2))  # [n kv_heads new dim]
        else:
            made.append(group.cache.append(op.layer, op.attrs["part"], rows[0])[None])
    return made


def scores(_weights: Mapping[str, Tensor], step: Step, op: Op, inputs: list[Any]) -> list[Tensor]:
    made = []
    for group, q, k in zip(step.groups, step.split(inputs[0]), inputs[1], strict=True):
        n, kv_heads, key, _ = k.shape
        heads = q.shape[2]
        q = q.transpose(1, 2).reshape(n, kv_heads, -1, q.shape[-1])  # the query heads of a key head together
        s = (q @ k.transpose(-1, -2)).reshape(n, heads, group.new, key) * op.attrs["scale"]
        made.append(s.masked_fill(unseen(queries_of(group, s.device), key, op.attrs["window"]), MASKED))
    return made


def softmax(_weights: Mapping[str, Tensor], step: Step, _op: Op, inputs: list[Any]) -> list[Tensor]:
    return [probabilities(x, queries_of(group, x.device)) for group, x in zip(step.groups, inputs[0], strict=True)]


def probabilities(scores: Tensor, queries: Tensor) -> Tensor:
    """The softmax of scores `[... query key]`. Where everything is masked, for no key is seen, it is even over those up
    to the query: what comes behind it, and with it how a text is cut, makes no difference.
    """
    if scores.shape[-2] > 1:
        blind = scores.amax(-1, keepdim=True) <= MASKED
        scores = scores.masked_fill(blind & unseen(queries, scores.shape[-1], None), -math.inf)
    return scores.softmax(-1)


def mix(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    made = []
    for p, v in zip(inputs[0], inputs[1], strict=True):
        n, heads, query, key = p.shape
        o = (p.reshape(n, v.shape[1], -1, key) @ v).reshape(n, heads, query, -1)

        def alone(i: int, p: Tensor = p, v: Tensor = v, o: Tensor = o) -> Tensor:
            seen = p.shape[3] - p.shape[2] + i + 1
            if p[:, :, i, seen:].any():  # somebody has written probabilities there
                return o[:, :, i]
            first = int(p[:, :, i].any(dim=1).any(dim=0).int().argmax())  # behind what a window leaves out
            rows = p[:, :, i, first:seen].reshape(len(p), v.shape[1], -1, seen - first)
            return (rows @ v[:, :, first:seen]).reshape(len(p), p.shape[1], -1)

        made.append(_again(o, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(made)  # [rows num_heads head_dim]


def _again(o: Tensor, alone: Callable[[int], Tensor]) -> Tensor:
    """Attention's result `[n heads query dim]`, rows that are not finite made by themselves: alone(i), `[n heads dim]`.

    Rows that are made together multiply later values by 0, which gives NaN for infinities and NaN. On the CPU only:
    looking at numbers elsewhere means to wait for them.
    """
    if o.device.type != "cpu" or math.isfinite(o.detach().sum().item()):
        return o
    finite = o.isfinite().all(3).all(1).all(0).tolist()
    rows = [row if fine else alone(i) for i, (row, fine) in enumerate(zip(o.unbind(2), finite, strict=True))]
    return torch.stack(rows, 2)


def merge_heads(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    merged: Tensor = inputs[0].flatten(1)
    return merged


def gelu(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.gelu(inputs[0])


def gelu_tanh(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.gelu(inputs[0], approximate="tanh")


def silu(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    return F.silu(inputs[0])


def multiply(_weights: Mapping[str, Tensor], _step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    product: Tensor = inputs[0] * inputs[1]
    return product


def wanted_rows(_weights: Mapping[str, Tensor], step: Step, _op: Op, inputs: list[Any]) -> Tensor:
    rows: Tensor = inputs[0] if step.wanted is None else inputs[0][step.wanted]
    return rows


KERNELS: dict[str, Kernel] = {name: globals()[name] for name in OPS}


def fused_attention(
    step: Step, attrs: Mapping[str, Any], rows: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """scores, softmax and mix in one call for each group: queries `[rows heads dim]` -> `[rows heads dim]`.

    `attrs` are those of the scores: their scale and window. A key head that serves several query heads is never
    copied: it is a view for each of them or, for one query, has their rows as the rows of one product.
    """
    made = []
    for group, queries, k, v in zip(step.groups, step.split(rows), keys, values, strict=True):
        attend = _attend_one if group.new == 1 else _attend_many
        made.append(attend(group, attrs, queries, k, v))
    return torch.cat(made)


def _attend_one(group: Group, attrs: Mapping[str, Any], queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query a sequence: `[n 1 heads dim]`, keys and values `[n kv_heads key dim]` -> `[n heads dim]`."""
    n, _, heads, dim = queries.shape
    window = attrs["window"]
    q = queries.reshape(n, k.shape[1], -1, dim) * attrs["scale"]
    if group.position is None:
        if window is not None:
            k, v = k[:, :, -window:], v[:, :, -window:]
        made: Tensor = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    else:
        place = torch.arange(k.shape[2], device=k.device)
        hidden = place > group.position
        if window is not None:
            hidden |= place <= group.position - window
        # What an earlier text left there need not be finite, and 0 times that is not 0.
        made = (q @ k.transpose(-1, -2)).masked_fill(hidden, MASKED).softmax(-1) @ v.masked_fill(hidden[:, None], 0)
    return made.reshape(n, heads, -1)


def _attend_many(group: Group, attrs: Mapping[str, Any], queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Several queries a sequence: `[n new heads dim]` -> `[n·new heads dim]`."""
    n, new, heads, _ = queries.shape
    kv_heads, length, scale, window = k.shape[1], k.shape[2], attrs["scale"], attrs["window"]
    q = queries.transpose(1, 2)
    if 1 < kv_heads < heads:  # key heads are like sequences, each with the queries of its own
        q = q.reshape(n * kv_heads, heads // kv_heads, new, -1)
        k, v = (x.reshape(n * kv_heads, 1, length, -1) for x in (k, v))
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    reach = window if window is not None and window < length else None  # where it hides anything
    square = group.past == 0 and reach is None
    mask = None if square else _mask(q, unseen(queries_of(group, k.device), length, reach))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=scale)

    def alone(i: int) -> Tensor:
        stop = group.past + i + 1
        start = max(0, stop - reach) if reach is not None else 0
        key, value = (x[:, :, start:stop] for x in (k, v))
        return F.scaled_dot_product_attention(q[:, :, i : i + 1], key, value, scale=scale)[:, :, 0]

    o = _again(o, alone).reshape(n, heads, new, -1)
    return o.transpose(1, 2).flatten(0, 1)


def _mask(q: Tensor, hidden: Tensor) -> Tensor:
    """What is added to scores: float `[query key]`, its rows so far apart as CUDA's kernels want, who copy it else."""
    rows, cols = hidden.shape
    return q.new_zeros(rows, -(-cols // 16) * 16)[:, :cols].masked_fill_(hidden, -math.inf)


def queries_of(group: Group, device: torch.device) -> Tensor:
    """The positions of a group's new rows: int64 `[query]`."""
    return torch.arange(group.past, group.past + group.new, device=device)


def unseen(queries: Tensor, key: int, window: int | None) -> Tensor:
    """Where a key is behind its query, or too far before it for a window: bool `[query key]`."""
    keys, queries = torch.arange(key, device=queries.device), queries[:, None]
    future = keys > queries
    return future if window is None else future | (keys <= queries - window)
