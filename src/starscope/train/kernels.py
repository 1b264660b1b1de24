"""What training computes in other ways than the torch engine, because gradients make other things expensive.

`linear_bfloat16`: operands in bfloat16, sums in float32, weights kept in float32. `attend`: causal attention over whole
sequences, plain where they are short, since the fused kernel's gradient is slow there. `linear_loss`: the output matrix
and the loss for some rows at a time, gradients made at once, so that the logits of all rows are never held.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that is no target
SHORT = 128  # tokens: up to here plain attention is as fast as the fused one, or faster
CHUNK_BYTES = 16 << 20  # of float32 logits made at a time


class _LinearBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = torch.bfloat16
        narrow, matrix = x.to(low), weight.to(low)
        ctx.save_for_backward(narrow, matrix)
        ctx.input_dtype, ctx.has_bias = x.dtype, bias is not None
        return F.linear(narrow, matrix, None if bias is None else bias.to(low))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        narrow, matrix = ctx.saved_tensors
        g = gradients[0].to(torch.bfloat16)
        bias = g.sum(0, dtype=torch.float32) if ctx.has_bias else None
        return (g @ matrix).to(ctx.input_dtype), (g.t() @ narrow).float(), bias


def linear_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[rows in]` -> bfloat16 `[rows out]`; `weight` and `bias` are float32, and so are their gradients."""
    out: Tensor = _LinearBfloat16.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of `[n seq heads dim]` queries over `[n kv_heads seq dim]` keys: `[n·seq heads dim]`."""
    n, seq, heads, dim = q.shape
    kv_heads = k.shape[1]
    if seq > SHORT:
        if kv_heads != heads:
            k, v = (
                x.expand(-1, heads, -1, -1) if kv_heads == 1 else x.repeat_interleave(heads // kv_heads, 1)
                for x in (k, v)
            )
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale)
        return o.transpose(1, 2).flatten(0, 1)
    # The query heads of one key head follow one another, as rows of one product.
    rows = (q.transpose(1, 2) * scale).reshape(n, kv_heads, -1, dim)
    future = torch.full((seq, seq), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = (rows @ k.transpose(-1, -2)).view(n, heads, seq, seq) + future
    o = scores.softmax(-1).view(n, kv_heads, -1, seq) @ v
    return o.view(n, heads, seq, dim).transpose(1, 2).reshape(n * seq, heads, dim)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, low: torch.dtype, chunk: int) -> Tensor:
        narrow, matrix = x.to(low), weight.to(low)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if wanted else (None, None)
        for start in range(0, len(x), chunk):
            part, aims = narrow[start : start + chunk], targets[start : start + chunk]
            counts = aims != IGNORED
            index = aims.clamp_min(0)[:, None]
            logits = F.linear(part, matrix).to(weight.dtype)
            logits -= logits.amax(1, keepdim=True)
            of_targets = logits.gather(1, index)[:, 0]
            sums = logits.exp_().sum(1)
            total += ((sums.log() - of_targets) * counts).sum(dtype=torch.float64)
            if dx is None or dw is None:
                continue
            logits *= (counts / sums)[:, None]  # probabilities; nothing where there is no target
            logits.scatter_add_(1, index, -counts.to(logits.dtype)[:, None])
            gradient = logits.to(low)
            dx[start : start + chunk] = gradient @ matrix
            if low == weight.dtype:
                dw.addmm_(gradient.t(), part)
            else:
                dw += gradient.t() @ part
        ctx.save_for_backward(dx, dw)
        return total.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx * gradients[0], dw * gradients[0], None, None, None


def linear_loss(x: Tensor, weight: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """The summed negative log-likelihood in nats of `targets` `[rows]` under the logits `x @ weight.T`.

    `x` is `[rows hidden_size]`; products have operands of the dtype `low`. A target of -100 does not count.
    """
    chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
    loss: Tensor = _LinearLoss.apply(x, weight, targets, low, chunk)  # type: ignore[no-untyped-call]
    return loss
