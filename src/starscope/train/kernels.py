"""What training computes in other ways than the torch engine, because gradients make other things expensive.

`linear_bfloat16`: operands in bfloat16, sums in float32, weights kept in float32. `attend`: causal attention over whole
sequences, plain where they are short, since the fused kernel's gradient is slow there. `linear_loss`: the output matrix
and the loss for some rows at a time, gradients made at once, so that the logits of all rows are never held.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that is no target
SHORT = 128  # tokens: up to here plain attention is as fast as the fused one, or faster
CHUNK_BYTES = 16 << 20  # of float32 logits made at a time


class _LinearBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, matrix: Tensor, offset: Tensor | None
    ) -> Tensor:
        narrow = x.to(torch.bfloat16)
        ctx.save_for_backward(narrow, matrix)
        ctx.input_dtype = x.dtype
        return F.linear(narrow, matrix, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        narrow, matrix = ctx.saved_tensors
        g = gradients[0].to(torch.bfloat16)
        _, of_weight, of_bias, *_ = ctx.needs_input_grad  # weights may stand still
        bias = g.sum(0).float() if of_bias else None  # summed in float32; asked for it, torch copies all of g
        weight = (g.t() @ narrow).float() if of_weight else None
        return (g @ matrix).to(ctx.input_dtype), weight, bias, None, None


def linear_bfloat16(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_weight: Tensor, low_bias: Tensor | None
) -> Tensor:
    """`[rows in]` -> bfloat16 `[rows out]`. `weight` and `bias` are float32, and so are their gradients; their values
    are read from the copies in bfloat16.
    """
    out: Tensor = _LinearBfloat16.apply(x, weight, bias, low_weight, low_bias)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    """Attention written out, with the probabilities kept: the query heads of one key head are rows of one product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        n, seq, heads, dim = q.shape
        kv_heads = k.shape[1]
        rows = q.transpose(1, 2).reshape(n * kv_heads, -1, dim)
        keys, values = (x.reshape(n * kv_heads, seq, dim) for x in (k, v))
        hidden = _hidden(seq, heads // kv_heads, window, q.dtype, q.device)
        p = torch.baddbmm(hidden, rows, keys.transpose(1, 2), alpha=scale).softmax(-1)
        ctx.save_for_backward(rows, keys, values, p)
        ctx.shape, ctx.scale = q.shape, scale
        return (p @ values).view(n, heads, seq, dim).transpose(1, 2).reshape(n * seq, heads, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, p = ctx.saved_tensors
        n, seq, heads, dim = ctx.shape
        g = gradients[0].view(n, seq, heads, dim).transpose(1, 2).reshape(rows.shape)
        ds = torch._softmax_backward_data(g @ values.transpose(1, 2), p, -1, p.dtype).mul_(ctx.scale)
        dq = (ds @ keys).view(n, heads, seq, dim).transpose(1, 2)
        dk, dv = (x.view(n, -1, seq, dim) for x in (ds.transpose(1, 2) @ rows, p.transpose(1, 2) @ g))
        return dq, dk, dv, None, None


@lru_cache(maxsize=8)
def _hidden(seq: int, copies: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores `[copies·seq seq]`: minus infinity where a query does not see the key, else 0."""
    mask = torch.zeros(seq, seq, dtype=dtype, device=device)
    return mask.masked_fill(~_seen(seq, window, device), float("-inf")).repeat(copies, 1)


def _seen(seq: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees: bool `[query key]`, both `seq`."""
    before = torch.ones(seq, seq, dtype=torch.bool, device=device).tril()
    return before if window is None else before.triu(1 - window)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of `[n seq heads dim]` queries over `[n kv_heads seq dim]` keys: `[n·seq heads dim]`.

    With a `window`, a query sees so many keys at most, its own among them.
    """
    heads, kv_heads = q.shape[2], k.shape[1]
    if q.shape[1] > SHORT:
        if kv_heads != heads:
            k, v = (
                x.expand(-1, heads, -1, -1) if kv_heads == 1 else x.repeat_interleave(heads // kv_heads, 1)
                for x in (k, v)
            )
        is_narrow = window is not None and window < q.shape[1]
        mask = _seen(q.shape[1], window, q.device) if is_narrow else None
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return o.transpose(1, 2).flatten(0, 1)
    out: Tensor = _Attend.apply(q, k, v, scale, window)  # type: ignore[no-untyped-call]
    return out


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, low: torch.dtype, chunk: int) -> Tensor:
        narrow, matrix = x.to(low), weight.to(low)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if wanted else None
        dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(x), chunk):
            part, aims = narrow[start : start + chunk], targets[start : start + chunk]
            counts = aims != IGNORED
            index = aims.clamp_min(0)[:, None]
            logits = F.linear(part, matrix).to(weight.dtype)
            logits -= logits.amax(1, keepdim=True)
            of_targets = logits.gather(1, index)[:, 0]
            sums = logits.exp_().sum(1)
            total += ((sums.log() - of_targets) * counts).sum(dtype=torch.float64)
            if dx is None:
                continue
            logits *= (counts / sums)[:, None]  # probabilities; nothing where there is no target
            logits.scatter_add_(1, index, -counts.to(logits.dtype)[:, None])
            gradient = logits.to(low)
            dx[start : start + chunk] = gradient @ matrix
            if dw is None:
                continue
            if low == weight.dtype:
                dw.addmm_(gradient.t(), part)
            else:
                dw += gradient.t() @ part
        ctx.save_for_backward(dx, dw)
        return total.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx * gradients[0], None if dw is None else dw * gradients[0], None, None, None


def linear_loss(x: Tensor, weight: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """The summed negative log-likelihood in nats of `targets` `[rows]` under the logits `x @ weight.T`.

    `x` is `[rows hidden_size]`; products have operands of the dtype `low`. A target of -100 does not count.
    """
    chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
    loss: Tensor = _LinearLoss.apply(x, weight, targets, low, chunk)  # type: ignore[no-untyped-call]
    return loss
