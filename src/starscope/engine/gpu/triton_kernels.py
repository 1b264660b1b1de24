"""Products with stored matrices as Triton kernels: decoded in registers, multiplied and summed in float32.

A row's bytes are walked in runs: 32 bytes, or 16 where two halves of a quant block, or groups of 16, share a byte's
nibbles. In the formats of 4 to 6 bits a byte holds two values of columns far apart; so a tile of bytes is two tiles of
weights, each with its own columns of x, and nothing is ever interleaved:

    out = sum over tiles of low @ x[columns].T + high @ x[columns + distance].T

`one_row` is for decoding: each program a few rows of the matrix, all of its columns. `many_rows` is for everything
else, on the matrix units. `stored.py` says what the fields are, `k_quants.py` what the numbers mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What is a constant to a kernel is in capitals.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


@triton.jit
def _columns(run, lane, FORMAT: tl.constexpr):
    """The column of x for the value in byte `lane` of a run: the low one, where there are two."""
    if FORMAT == "Q4_0":
        column = run * 32 + lane
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        column = run * 64 + lane
    elif FORMAT == "Q6_K":
        column = run // 4 * 128 + run % 4 * 16 + lane
    else:
        column = run * 32 + lane
    return column


@triton.jit
def _six_bits(groups, block, group, there):
    """The scale and minimum, as numbers of 6 bits, of a group of a block of Q4_K or Q5_K."""
    at = groups + block * 12 + group % 4
    first = tl.load(at, mask=there, other=0)
    second = tl.load(at + 4, mask=there, other=0)
    third = tl.load(at + 8, mask=there, other=0)
    early = group < 4
    scale = tl.where(early, first & 63, (third & 15) | (first >> 6 << 4))
    minimum = tl.where(early, second & 63, (third >> 4) | (second >> 6 << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _one(quants, scale, row, run, lane, runs, there, cols, FORMAT: tl.constexpr):
    """A tile of a format with one value an element: float32 [rows runs lanes]."""
    at = row[:, None, None] * cols + (run[:, None] * 32 + lane[None, :])[None, :, :]
    values = tl.load(quants + at, mask=there, other=0).to(tl.float32)
    if FORMAT == "Q8_0":
        s = tl.load(scale + row[:, None] * (cols // 32) + run[None, :], mask=runs, other=0).to(tl.float32)
        values = s[:, :, None] * values
    return values


@triton.jit
def _pair(quants, high, groups, scale, row, run, lane, runs, there, cols, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """A tile of a format with two values a byte: float32 [rows runs lanes], the low and the high ones."""
    at = row[:, None, None] * (cols // 2) + (run[:, None] * LANES + lane[None, :])[None, :, :]
    q = tl.load(quants + at, mask=there, other=0)
    low = q & 15
    top = q >> 4
    if FORMAT == "Q4_0":
        s = tl.load(scale + row[:, None] * (cols // 32) + run[None, :], mask=runs, other=0).to(tl.float32)
        return s[:, :, None] * (low.to(tl.float32) - 8), s[:, :, None] * (top.to(tl.float32) - 8)
    elif FORMAT == "Q6_K":
        block = row[:, None] * (cols // 256) + (run // 8)[None, :]
        part = run % 8  # runs of 16 bytes: four for each half of the block
        bits = part % 2 * 16 + part // 4 * 32
        h = tl.load(high + block[:, :, None] * 64 + (bits[:, None] + lane[None, :])[None, :, :], mask=there, other=0)
        h = h >> (part % 4 // 2 * 2).to(tl.uint8)[None, :, None]
        group = block * 16 + (part // 4 * 8 + part % 4)[None, :]
        d = tl.load(scale + block, mask=runs, other=0).to(tl.float32)
        s_low = d * tl.load(groups + group, mask=runs, other=0).to(tl.float32)
        s_top = d * tl.load(groups + group + 4, mask=runs, other=0).to(tl.float32)
        low = low | ((h & 3) << 4)
        top = top | ((h >> 4 & 3) << 4)
        return s_low[:, :, None] * (low.to(tl.float32) - 32), s_top[:, :, None] * (top.to(tl.float32) - 32)
    else:
        block = row[:, None] * (cols // 256) + (run // 4)[None, :]
        pair = run % 4
        if FORMAT == "Q5_K":
            h = tl.load(high + block[:, :, None] * 32 + lane[None, None, :], mask=there, other=0)
            h = h >> (pair * 2).to(tl.uint8)[None, :, None]
            low = low | ((h & 1) << 4)
            top = top | ((h >> 1 & 1) << 4)
        of_scales = tl.load(scale + block * 2, mask=runs, other=0).to(tl.float32)
        of_minima = tl.load(scale + block * 2 + 1, mask=runs, other=0).to(tl.float32)
        s_low, m_low = _six_bits(groups, block, (pair * 2)[None, :], runs)
        s_top, m_top = _six_bits(groups, block, (pair * 2 + 1)[None, :], runs)
        low = (of_scales * s_low)[:, :, None] * low.to(tl.float32) - (of_minima * m_low)[:, :, None]
        top = (of_scales * s_top)[:, :, None] * top.to(tl.float32) - (of_minima * m_top)[:, :, None]
        return low, top


@triton.jit
def one_row(
    x,  # float32 [n cols]
    quants,
    high,
    groups,
    scale,
    bias,
    out,  # float32 [n rows]
    rows,
    cols,
    FORMAT: tl.constexpr,
    PAIRED: tl.constexpr,
    DISTANCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """`out[i] = x[i] @ W.T + bias`: a program makes ROWS values of one row of x, over all columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x += tl.program_id(1).to(tl.int64) * cols
    lane = tl.arange(0, LANES)
    total = tl.zeros([ROWS, RUNS, LANES], tl.float32)
    per_run: tl.constexpr = LANES * 2 if PAIRED else LANES
    for start in range(0, tl.cdiv(cols, per_run), RUNS):
        run = start + tl.arange(0, RUNS)
        column = _columns(run[:, None], lane[None, :], FORMAT)
        inside = column < cols
        runs = (row < rows)[:, None] & (_columns(run, 0, FORMAT) < cols)[None, :]
        there = (row < rows)[:, None, None] & inside[None, :, :]
        if PAIRED:
            low, top = _pair(quants, high, groups, scale, row.to(tl.int64), run, lane, runs, there, cols, FORMAT, LANES)
            total += low * tl.load(x + column, mask=inside, other=0)[None, :, :]
            total += top * tl.load(x + column + DISTANCE, mask=inside, other=0)[None, :, :]
        else:
            w = _one(quants, scale, row.to(tl.int64), run, lane, runs, there, cols, FORMAT)
            total += w * tl.load(x + column, mask=inside, other=0)[None, :, :]
    made = tl.sum(tl.reshape(total, [ROWS, RUNS * LANES]), axis=1)
    if HAS_BIAS:
        made += tl.load(bias + row, mask=row < rows, other=0)
    tl.store(out + tl.program_id(1).to(tl.int64) * rows + row, made, mask=row < rows)


@triton.jit(do_not_specialize=["n"])
def many_rows(
    x,  # float32 [n cols]
    quants,
    high,
    groups,
    scale,
    bias,
    out,  # float32 [n rows]
    n,
    rows,
    cols,
    FORMAT: tl.constexpr,
    PAIRED: tl.constexpr,
    DISTANCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The same for tiles of COUNT rows of x by ROWS of the matrix. PRECISION: how the matrix units take float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    at = x + i.to(tl.int64)[:, None] * cols
    lane = tl.arange(0, LANES)
    flat = tl.arange(0, RUNS * LANES)
    total = tl.zeros([COUNT, ROWS], tl.float32)
    per_run: tl.constexpr = LANES * 2 if PAIRED else LANES
    for start in range(0, tl.cdiv(cols, per_run), RUNS):
        run = start + tl.arange(0, RUNS)
        inside = _columns(run[:, None], lane[None, :], FORMAT) < cols
        runs = (row < rows)[:, None] & (_columns(run, 0, FORMAT) < cols)[None, :]
        there = (row < rows)[:, None, None] & inside[None, :, :]
        column = _columns(start + flat // LANES, flat % LANES, FORMAT)
        some = (i < n)[:, None] & (column < cols)[None, :]
        if PAIRED:
            low, top = _pair(quants, high, groups, scale, row.to(tl.int64), run, lane, runs, there, cols, FORMAT, LANES)
            left = tl.load(at + column[None, :], mask=some, other=0)
            w = tl.trans(tl.reshape(low, [ROWS, RUNS * LANES]))
            total = tl.dot(left, w, total, input_precision=PRECISION)
            left = tl.load(at + column[None, :] + DISTANCE, mask=some, other=0)
            w = tl.trans(tl.reshape(top, [ROWS, RUNS * LANES]))
            total = tl.dot(left, w, total, input_precision=PRECISION)
        else:
            w = _one(quants, scale, row.to(tl.int64), run, lane, runs, there, cols, FORMAT)
            left = tl.load(at + column[None, :], mask=some, other=0)
            w = tl.trans(tl.reshape(w, [ROWS, RUNS * LANES]))
            total = tl.dot(left, w, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0)[None, :]
    tl.store(out + i.to(tl.int64)[:, None] * rows + row[None, :], total, mask=(i < n)[:, None] & (row < rows)[None, :])
