"""One linear layer of the compiled program: panels of any bytes and any number of rows, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope import native
from starscope.formats import FORMATS, INTEGER_FORMATS, Format, decode, find_format, format_by_id, round_activation

module = native.kernels()
assert module is not None, native.why_missing()
LINEAR, ATTENTION = module.kinds["linear"], module.kinds["attention"]
COMPUTED = [fmt for type_id in module.computes() if (fmt := format_by_id(type_id)) is not None]
TYPES = pytest.mark.parametrize("fmt", COMPUTED, ids=[fmt.name for fmt in COMPUTED])
ISAS = pytest.mark.parametrize("isa", module.isas())
ROUNDING = 2.0**-24  # of one float32 operation


def product(fmt: Format, raw: np.ndarray, x: np.ndarray, isa: str, threads: int = 1, piece: int = 10**6) -> np.ndarray:
    """x [n cols] times the matrix whose rows are `raw` [rows row_bytes], filled `piece` rows at a time from the end."""
    program = module.Program(threads, isa)
    rows, cols = len(raw), x.shape[1]
    matrix = program.add_matrix(fmt.type_id, rows, cols)
    for start in reversed(range(0, rows, piece)):
        program.fill(matrix, start, raw[start : start + piece])
    layer = module.Instruction()
    layer.kind, layer.matrix, layer.cols = LINEAR, matrix, rows
    layer.a, layer.out = module.View(0), module.View(1)
    code = program.compile([layer], [cols, rows], 2)
    out = np.full((len(x), rows), np.nan, np.float32)
    program.run(code, module.Buffers(), 0, 1, len(x), np.empty(0, np.int64), [], [x, out])
    return out


def stored(fmt: Format, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Any bytes, but for scales, which are ordinary numbers."""
    if fmt.name == "F32":
        return rng.normal(0, 1, (rows, cols)).astype(np.float32).view(np.uint8)
    if fmt.name == "BF16":
        return np.ascontiguousarray(rng.normal(0, 1, (rows, cols)).astype(np.float32).view(np.uint16)[:, 1::2]).view(
            np.uint8
        )
    raw = rng.integers(0, 256, (rows * cols // fmt.block_size, fmt.block_bytes), np.uint8)
    halves = raw[:, slice(*fmt.halves)]
    halves[:] = rng.normal(0, 0.1, (len(raw), halves.shape[1] // 2)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def allowed(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What float32 sums of these products may be off by: [n rows]. A rounding for each term, of all before it."""
    return 1.1 * ROUNDING * (weights.shape[1] + 8) ** 0.5 * 4 * (np.abs(x) @ np.abs(weights).T)


@ISAS
@TYPES
@given(data=st.data())
@settings(max_examples=15)
def test_products_are_those_of_the_decoded_weights(isa: str, fmt: Format, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(1, 40))
    cols = fmt.block_size * data.draw(st.integers(1, {1: 90, 32: 19}.get(fmt.block_size, 3)))
    count = data.draw(st.one_of(st.integers(1, 30), st.sampled_from([36, 47, 60])))
    raw, x = stored(fmt, rows, cols, rng), rng.normal(0, 1, (count, cols)).astype(np.float32)
    found = product(fmt, raw, x, isa, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 32, 48])))
    weights = decode(fmt, raw).astype(np.float64)
    rounded = (round_activation(x) if fmt.name in INTEGER_FORMATS else x).astype(np.float64)
    assert (np.abs(found - rounded @ weights.T) <= allowed(weights, rounded)).all()
    # The same sums in another arithmetic: a few roundings apart.
    assert (np.abs(found - product(fmt, raw, x, "scalar")) <= allowed(weights, rounded)).all()


@ISAS
@TYPES
def test_a_wide_matrix_goes_through_its_parts_in_order(isa: str, fmt: Format) -> None:
    """More columns than are unpacked at a time, more rows than one tile, and fewer rows that are not unpacked."""
    rng = np.random.default_rng(5)
    cols = {1: 4133, 32: 4192}.get(fmt.block_size, 4352)
    raw, x = stored(fmt, 53, cols, rng), rng.normal(0, 1, (170, cols)).astype(np.float32)
    found = product(fmt, raw, x, isa, 2)
    for few in (1, 2, 3, 12, 23):
        np.testing.assert_array_equal(product(fmt, raw, x[:few], isa), found[:few])
    weights = decode(fmt, raw).astype(np.float64)
    rounded = (round_activation(x) if fmt.name in INTEGER_FORMATS else x).astype(np.float64)
    assert (np.abs(found - rounded @ weights.T) <= allowed(weights, rounded)).all()


@ISAS
@pytest.mark.parametrize("name", INTEGER_FORMATS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_the_largest_quants_do_not_saturate(isa: str, name: str, byte: int, sign: int) -> None:
    """All bits of the quants alike, activations all of the largest magnitude (0: in turns)."""
    fmt = find_format(name)
    cols = max(fmt.block_size, 64)
    raw = np.full((3 * cols // fmt.block_size, fmt.block_bytes), byte, np.uint8)
    halves = raw[:, slice(*fmt.halves)]
    halves[:] = np.full((len(raw), halves.shape[1] // 2), 0.5, np.float16).view(np.uint8)
    raw = raw.reshape(3, -1)
    x = np.full((5, cols), sign, np.float32) if sign else np.resize(np.float32([1, -1, 1, 1, -1]), (5, cols))
    found = product(fmt, raw, x, isa)
    weights = decode(fmt, raw).astype(np.float64)
    np.testing.assert_allclose(found, x @ weights.T, rtol=1e-6, atol=1e-6 * np.abs(weights).sum(axis=1).max())


def test_every_other_format_is_decoded_first() -> None:
    others = [fmt for fmt in FORMATS.values() if fmt not in COMPUTED]
    program = module.Program(1, "scalar")
    assert others
    for fmt in others:
        with pytest.raises(ValueError, match=f"does not compute on type {fmt.type_id}"):
            program.add_matrix(fmt.type_id, 16, 256)


@pytest.mark.parametrize(
    ("first", "rows", "message"),
    [
        (8, np.zeros((8, 34), np.uint8), "multiples of 16"),
        (0, np.zeros((17, 34), np.uint8), "multiples of 16"),
        (32, np.zeros((16, 34), np.uint8), "within the matrix"),
        (0, np.zeros((16, 68), np.uint8), "another number of bytes"),
        (2**64 - 16, np.zeros((16, 34), np.uint8), "within the matrix"),
    ],
)
def test_rows_that_do_not_fit_are_refused(first: int, rows: Any, message: str) -> None:
    program = module.Program(1, "scalar")
    matrix = program.add_matrix(8, 40, 32)
    with pytest.raises(ValueError, match=message):
        program.fill(matrix, first, rows)
    with pytest.raises(ValueError, match="no such matrix"):
        program.fill(matrix + 1, 0, rows)


def test_instructions_that_reach_past_their_slots_are_refused() -> None:
    program = module.Program(1, "scalar")
    matrix, vector = program.add_matrix(0, 20, 30), program.add_vector(np.ones(20, np.float32))
    short = program.add_vector(np.ones(16, np.float32))

    def linear(**fields: Any) -> Any:
        layer = module.Instruction()
        good = {
            "kind": LINEAR,
            "matrix": matrix,
            "cols": 20,
            "a": module.View(0),
            "out": module.View(1),
            "bias": vector,
        }
        for name, value in {**good, **fields}.items():
            setattr(layer, name, value)
        return layer

    code = program.compile([linear()], [30, 20], 2)
    for fields, message in [
        ({"cols": 19}, "another number of columns"),
        ({"matrix": 1}, "names no matrix"),
        ({"a": module.View(0, 1)}, "past its slot"),
        ({"out": module.View(1, 1)}, "past its slot"),
        ({"out": module.View(2)}, "names no slot"),
        ({"out": module.View(-1)}, "names no slot"),
        ({"b": module.View(1, -1)}, "past its slot"),
        ({"bias": 7}, "names no vector"),
        ({"norm_weight": short}, "too short"),
        ({"bias": short}, "too short"),
        ({"kind": 77}, "of no kind"),
        ({"activation": 3}, "names no activation"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.compile([linear(**fields)], [30, 20], 2)
    x, out = np.zeros((3, 30), np.float32), np.zeros((3, 20), np.float32)
    cache, none = module.KeyValues(True, 1, 1, 1, 5), np.empty(0, np.int64)
    for arguments, message in [
        ((0, 2, 3, none, [(0, 3, 0, cache)], [x, out]), "no such instructions"),
        ((0, 1, 3, none, [(0, 2, 0, cache)], [x, out]), "must have all rows"),
        ((0, 1, 3, none, [(1, 3, 0, cache)], [x, out]), "follow one another"),
        ((0, 1, 3, none, [(0, 3, 126, cache)], [x, out]), "too small"),
        ((0, 1, 3, none, [(0, 3, 2**64 - 2, cache)], [x, out]), "too small"),
        ((0, 1, 3, none, [(0, 3, 0, None)], [x, out]), "no cache"),
        ((0, 1, 3, np.array([3]), [(0, 3, 0, cache)], [x, out]), "out of range"),
        ((0, 1, 3, none, [(0, 3, 0, cache)], [x]), "another number of arrays"),
        ((0, 1, 3, none, [(0, 3, 0, cache)], [x, out[:, :19].copy()]), "another width"),
        ((0, 1, 3, none, [(0, 3, 0, cache)], [x, out[:2]]), "another number of rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.run(code, module.Buffers(), *arguments)
    with pytest.raises(ValueError, match="another program"):
        module.Program(1, "scalar").run(code, module.Buffers(), 0, 1, 3, none, [], [x, out])


@pytest.mark.parametrize("shape", [(True, 1, 1, 4), (True, 2, 2, 4), (True, 2, 1, 5)])
def test_a_cache_of_another_model_is_refused(shape: tuple[bool, int, int, int]) -> None:
    program = module.Program(1, "scalar")
    attention = module.Instruction()
    attention.kind, attention.layer, attention.heads, attention.kv_heads, attention.dim = ATTENTION, 1, 2, 1, 4
    attention.a, attention.b, attention.c = module.View(0), module.View(0, 8), module.View(0, 12)
    attention.out, attention.cols, attention.scale = module.View(1), 8, 0.5
    code = program.compile([attention], [16, 8], 2)

    def run(*caches: Any) -> None:
        sequences = [(i, 1, 0, cache) for i, cache in enumerate(caches)]
        rows = [np.ones((len(caches), width), np.float32) for width in (16, 8)]
        program.run(code, module.Buffers(), 0, 1, len(caches), np.empty(0, np.int64), sequences, rows)

    good = [module.KeyValues(half, 2, 1, 4, 5) for half in (True, True, False)]
    run(*good[:2])
    with pytest.raises(ValueError, match="no sequences"):
        program.run(code, module.Buffers(), 0, 1, 1, np.empty(0, np.int64), [], [np.ones((1, 16), np.float32)] * 2)
    for caches in ([module.KeyValues(*shape, 5)], [good[0], module.KeyValues(*shape, 5)], [good[0], good[2]]):
        with pytest.raises(ValueError, match="another shape"):
            run(*caches)
