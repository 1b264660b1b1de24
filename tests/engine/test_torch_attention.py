"""Attention in one call: every length of a softmax row, and keys and values that are never copied for their queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from starscope.engine.base import MASKED
from starscope.engine.gpu.static import StaticCache
from starscope.engine.torch_kernels import Group, Step, fused_attention, mix, scores, softmax
from starscope.graph import Op
from support.numbers import ulps

DIM = 16
BLOCK = 256
"""Keys at a time: no kernel of torch's that a float32 row goes through has more, nor has a window its first size."""


def make_op(kind: str, **attrs: Any) -> Op:
    return Op(0, kind, (), (), (), attrs, None)


def attention(new: int, past: int, heads: int, kv_heads: int, window: int | None, *, fused: bool) -> Any:
    """Random queries, keys and values, and what becomes of them: found, expected (float64)."""
    rng = np.random.default_rng(past * 1000 + new)
    q = rng.normal(size=(new, heads, DIM)).astype(np.float32)
    k, v = (rng.normal(size=(1, kv_heads, past + new, DIM)).astype(np.float32) for _ in range(2))
    step, attrs = Step([Group(1, new, past, None)], None), {"scale": DIM**-0.5, "window": window}
    tq, tk, tv = (torch.from_numpy(x) for x in (q, k, v))
    if fused:
        found = fused_attention(step, attrs, tq, [tk], [tv])
    else:
        p = softmax({}, step, make_op("softmax"), [scores({}, step, make_op("scores", **attrs), [tq, [tk]])])
        found = mix({}, step, make_op("mix"), [p, [tv]])
    return found, expected_of(q, k[0], v[0], past, window)


def expected_of(q: Any, k: Any, v: Any, past: int, window: int | None) -> Any:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    new, heads, dim = q.shape
    k, v = (x.repeat(heads // len(x), 0) for x in (k, v))
    s = np.einsum("qhd,hkd->hqk", q, k) * dim**-0.5
    key, query = np.arange(past + new), past + np.arange(new)[:, None]
    hidden = (key > query) | ((key <= query - window) if window is not None else False)
    s = np.where(hidden, -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->qhd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (4, 4)])
def test_a_row_of_softmax_may_have_any_length_up_to_two_blocks(heads: int, kv_heads: int, fused: bool) -> None:
    for length in range(1, 2 * BLOCK + 1, 1 if kv_heads == 1 else 17):
        found, expected = attention(1, length - 1, heads, kv_heads, None, fused=fused)
        assert ulps(found, expected) <= 32, length


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("window", [None, 7, 300])
def test_rows_of_every_length_may_be_in_one_step(heads: int, kv_heads: int, window: int | None, fused: bool) -> None:
    for past in (0, 1, 31):
        found, expected = attention(2 * BLOCK, past, heads, kv_heads, window, fused=fused)
        assert ulps(found, expected) <= 32, past


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_a_recorded_step_sees_its_own_keys_at_every_length_and_none_behind_them(half: bool, window: int | None) -> None:
    """What is behind a row in its window is never nothing: here it is NaN."""
    kept = torch.float16 if half else torch.float32
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 2 * BLOCK, 2, DIM)).astype(np.float32).astype(np.float16).astype(np.float32)
    cache = StaticCache(
        num_layers=1, context_length=2 * BLOCK, make=lambda shape: torch.full(shape, torch.nan, dtype=kept),
        dtype=torch.float32,
    )  # fmt: skip
    place = torch.zeros(1, dtype=torch.int64)
    step = Step([Group(1, 1, 0, None, place)], None)
    for position in range(2 * BLOCK):
        place.fill_(position)
        size = BLOCK if position < BLOCK else 2 * BLOCK
        k, v = (
            cache.append_at(0, part, torch.from_numpy(x[position : position + 1]), place, size)
            for part, x in zip("kv", rows, strict=True)
        )
        q = rng.normal(size=(1, 4, DIM)).astype(np.float32)
        found = fused_attention(step, {"scale": DIM**-0.5, "window": window}, torch.from_numpy(q), [k[None]], [v[None]])
        keys, values = (x[: position + 1].swapaxes(0, 1) for x in rows)
        assert ulps(found, expected_of(q, keys, values, position, window)) <= 32, position


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes anew, and which operation that was."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.op = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(x)
        }
        for one in torch.utils._pytree.tree_leaves(made):
            if is_tensor(one) and one.untyped_storage().data_ptr() not in known:
                self.bytes, self.op = max((self.bytes, self.op), (one.untyped_storage().nbytes(), str(func)))
        return made


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize(("new", "recorded"), [(1, False), (1, True), (5, False)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_no_operation_copies_keys_or_values_for_each_of_their_query_heads(
    kv_heads: int, recorded: bool, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, dim, length = 16, 64, 701  # a row of keys is longer than all queries' scores of it
    seen = []
    call = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **b: seen.append((*a[1:3], b["attn_mask"])) or call(*a, **b)
    )
    q = torch.randn(new, heads, dim)
    k, v = (torch.randn(kv_heads, 1000, dim)[:, :length][None] for _ in range(2))
    place = torch.tensor([length - 3]) if recorded else None
    step = Step([Group(1, new, length - new, None, place)], None)
    with Largest() as largest:
        fused_attention(step, {"scale": 1.0, "window": None}, q, [k], [v])
    once = kv_heads * length * dim * 4
    assert largest.bytes <= once, largest.op  # expanded: 8 or 16 times that
    assert len(seen) == (new > 1)
    for *given, mask in seen:  # where they are, in the cache
        assert [x.untyped_storage().data_ptr() for x in given] == [x.untyped_storage().data_ptr() for x in (k, v)]
        assert all(x.shape[1] > 1 and x.stride(1) == 0 and x.stride(3) == 1 for x in given)
        assert mask.dtype == q.dtype
        assert mask.stride(0) % 16 == 0  # CUDA's kernels copy it otherwise


def test_what_is_masked_gets_nothing_of_the_mix() -> None:
    step = Step([Group(1, 3, 0, None)], None)
    q, k = torch.randn(3, 2, DIM), torch.randn(1, 1, 3, DIM)
    [made] = scores({}, step, make_op("scores", scale=1.0, window=None), [q, [k]])
    assert (made[0, :, 0, 1:] == MASKED).all()
    [p] = softmax({}, step, make_op("softmax"), [[made]])
    assert (p[0, :, 0, 1:] == 0).all()
