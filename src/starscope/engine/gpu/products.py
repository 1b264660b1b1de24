"""`x @ W.T + bias` with a matrix that stays as it is stored.

Triton's kernels decode it in registers; where there is no Triton, a few rows at a time are decoded by torch and
multiplied. Both multiply and sum in float32: tensor cores get each float32 as three TF32 parts (`tf32x3`), so that a
row's result is the same alone and among others to within rounding.

    y = linear(x, matrix, bias)         # differentiable in x and bias; by Triton where the matrix says so
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from starscope.engine.gpu.stored import StoredMatrix

TILE_VALUES = 4 << 20
"""Decoded at a time by torch: 16 MiB of float32."""


class Walk(NamedTuple):
    """How the kernels go through a row: runs of `lanes` elements; a byte's second value is `distance` columns on."""

    lanes: int
    distance: int = 0  # 0: an element is one value


WALKS: Mapping[str, Walk] = MappingProxyType(
    {
        "F16": Walk(32),
        "BF16": Walk(32),
        "Q8_0": Walk(32),
        "Q4_0": Walk(16, 16),
        "Q4_K": Walk(32, 32),
        "Q5_K": Walk(32, 32),
        "Q6_K": Walk(16, 64),
    }
)


class Tile(NamedTuple):
    """What one program makes: `inputs` rows of x by `rows` of the matrix, `elements` of each of these at a time."""

    inputs: int
    rows: int
    elements: int
    warps: int
    precision: str = "ieee"


ONE_ROW = Tile(1, 4, 512, 4)
MANY_ROWS: Mapping[str, tuple[Tile, ...]] = MappingProxyType(
    {
        "tf32x3": tuple(Tile(count, 64, 32, warps, "tf32x3") for count, warps in ((16, 4), (32, 4), (64, 8))),
        "ieee": tuple(Tile(count, 32, 32, 4) for count in (16, 32)),
    }
)
"""Larger tiles spill registers on the GPUs that the kernels were compiled for."""


def linear(x: Tensor, matrix: StoredMatrix, bias: Tensor | None = None) -> Tensor:
    """float32 `[n cols]` -> `[n rows]`."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        made: Tensor = _Linear.apply(x, matrix, bias)  # type: ignore[no-untyped-call]
        return made
    return _linear(x, matrix, bias)


class _Linear(torch.autograd.Function):
    """The gradient of x is one more product, with rows decoded a few at a time; the matrix has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: StoredMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return _linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        total: Tensor | None = None
        for start, stop in _tiles(ctx.matrix):
            part = gradient[:, start:stop] @ ctx.matrix.decode(start, stop)
            total = part if total is None else total.add_(part)
        return total, None, gradient.sum(0) if ctx.needs_input_grad[2] else None


def _linear(x: Tensor, matrix: StoredMatrix, bias: Tensor | None) -> Tensor:
    if matrix.by_triton:
        return _by_triton(x.contiguous(), matrix, bias)
    parts = [
        F.linear(x, matrix.decode(start, stop), None if bias is None else bias[start:stop])
        for start, stop in _tiles(matrix)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _tiles(matrix: StoredMatrix) -> list[tuple[int, int]]:
    rows, cols = matrix.shape
    step = max(1, TILE_VALUES // cols)
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _by_triton(x: Tensor, matrix: StoredMatrix, bias: Tensor | None) -> Tensor:
    from starscope.engine.gpu import triton_kernels

    n, cols = x.shape
    rows = matrix.shape[0]
    out = torch.empty(n, rows, dtype=torch.float32, device=x.device)
    quants = matrix.fields["quants"]
    fields = [matrix.fields.get(part, quants) for part in ("quants", "high", "groups", "scale")]
    given = quants if bias is None else bias
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():  # Triton starts on the current one
        if n == 1:
            constants = options(matrix.format_name, ONE_ROW, has_bias=bias is not None)
            grid = (-(-rows // ONE_ROW.rows), n)
            triton_kernels.one_row[grid](x, *fields, given, out, rows, cols, **constants)
        else:
            tiles = MANY_ROWS[precision(x.device)]
            tile = next((one for one in tiles if one.inputs >= n), tiles[-1])
            constants = options(matrix.format_name, tile, has_bias=bias is not None)
            grid = (-(-rows // tile.rows), -(-n // tile.inputs))
            triton_kernels.many_rows[grid](x, *fields, given, out, n, rows, cols, **constants)
    return out


def why_no_triton(matrix: StoredMatrix) -> str | None:
    """Why Triton's kernels do not run where a matrix is, in its own words; None where they do.

    Triton may be there and fail: it wants a C compiler, a cache that it may write, a GPU that is not too old.
    """
    try:
        _by_triton(torch.zeros(1, matrix.shape[1], device=matrix.device), matrix, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton, a compiler or a driver may raise
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return None


def options(format_name: str, tile: Tile, *, has_bias: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    lanes, distance = WALKS[format_name]
    of_many = {} if tile.inputs == 1 else {"COUNT": tile.inputs, "PRECISION": tile.precision}
    return {
        "FORMAT": format_name,
        "PAIRED": distance > 0,
        "DISTANCE": distance,
        "HAS_BIAS": has_bias,
        "ROWS": tile.rows,
        "RUNS": tile.elements // lanes,
        "LANES": lanes,
        "num_warps": tile.warps,
        "num_stages": 2,
        **of_many,
    }


def precision(device: torch.device) -> str:
    """How matrix units are to take float32: as three TF32 parts where there is TF32, by themselves elsewhere."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "ieee"
    return "tf32x3"
