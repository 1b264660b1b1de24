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
    layer.kind, layer.matrices, layer.cols = LINEAR, [matrix], rows
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
            "matrices": [matrix],
            "cols": 20,
            "a": module.View(0),
            "out": module.View(1),
            "biases": [vector],
        }
        for name, value in {**good, **fields}.items():
            setattr(layer, name, value)
        return layer

    code = program.compile([linear()], [30, 20], 2)
    for fields, message in [
        ({"cols": 19}, "another number of columns"),
        ({"matrices": [1]}, "names no matrix"),
        ({"a": module.View(0, 1)}, "past its slot"),
        ({"out": module.View(1, 1)}, "past its slot"),
        ({"out": module.View(2)}, "names no slot"),
        ({"out": module.View(-1)}, "names no slot"),
        ({"b": module.View(1, -1)}, "past its slot"),
        ({"biases": [7]}, "names no vector"),
        ({"norm_weight": short}, "too short"),
        ({"biases": [short]}, "too short"),
        ({"kind": 77}, "of no kind"),
        ({"activation": 4}, "names no activation"),
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


def small_code() -> tuple[Any, Any]:
    """A program and a code of it: an edit of a caller's array, one of a slot, and one of patterns."""
    program = module.Program(2, "scalar")
    kinds, made = module.kinds, []
    for number, (kind, fields) in enumerate(
        [
            ("edit", {"a": module.View(0), "cols": 16, "edit": 0}),
            ("add", {"a": module.View(0), "b": module.View(0), "out": module.View(1), "cols": 16}),
            ("edit", {"a": module.View(1, 4), "cols": 8, "edit": 1}),
            ("scores", {"a": module.View(1), "cols": 8}),
            ("edit", {"cols": 8, "edit": 2}),
            ("softmax", {"a": module.View(1), "cols": 8}),
            ("mix", {"a": module.View(1), "out": module.View(2), "cols": 8}),
        ]
    ):
        one = module.Instruction()
        one.kind, one.scale = kinds[kind], 0.5
        if number >= 3:
            one.heads, one.kv_heads, one.dim = 2, 1, 4
        for name, value in fields.items():
            setattr(one, name, value)
        made.append(one)
    return program, program.compile(made, [16, 16, 8], 1)


def edit(**fields: Any) -> tuple[Any, ...]:
    good = {"rows": np.array([0, 2]), "first_col": 1, "cols": 3, "scale": 1.0, "values": np.ones((2, 3), np.float32)}
    return tuple({**good, "first_head": 0, "heads": 1, **fields}.values())


def run_small(edits: list[list[Any]], sequences: list[Any] | None = None, last: int = 7) -> np.ndarray:
    program, code = small_code()
    x, buffers = np.arange(48, dtype=np.float32).reshape(3, 16), module.Buffers()
    pieces = [(0, 3, 0, module.KeyValues(True, 1, 1, 4, 8))] if sequences is None else sequences
    program.run(code, buffers, 0, last, 3, np.empty(0, np.int64), pieces, [x], edits)
    assert np.array_equal(buffers.read(module.View(1), 1, 1), [[2 * x[0, 0]]])
    return buffers.read_pattern(0, 2, 3, 3)


def test_edits_change_what_they_name() -> None:
    lowest = np.full((1, 1), np.finfo(np.float32).min)
    never = edit(rows=np.array([2]), values=lowest, scale=0.0, first_col=1, cols=99, first_head=1)
    pattern = run_small([[edit()], [edit(), edit()], [never]])
    np.testing.assert_allclose(pattern.sum(axis=-1), 1, rtol=1e-6)
    assert (pattern[:, 0] == [1, 0, 0]).all()
    assert (pattern[1, 2] == [1, 0, 0]).all()
    assert (pattern[0, 2] != [1, 0, 0]).any()


@pytest.mark.parametrize(
    ("number", "wrong", "message"),
    [
        (0, edit(rows=np.array([0, 3])), "row is out of range"),
        (0, edit(rows=np.array([-1, 0])), "row is out of range"),
        (0, edit(first_col=14), "past its value"),
        (0, edit(first_col=2**64 - 1), "past its value"),
        (0, edit(cols=4), "other columns"),
        (0, edit(values=np.ones((3, 3), np.float32)), "other rows"),
        (0, edit(values=np.ones((0, 0), np.float32)), "other rows"),
        (1, edit(first_col=6), "past its value"),
        (2, edit(first_head=2), "past its value"),
        (2, edit(heads=2**64 - 1, first_head=1), "past its value"),
        (0, edit()[:6], "seven fields"),
    ],
)
def test_edits_that_do_not_fit_are_refused(number: int, wrong: Any, message: str) -> None:
    edits: list[list[Any]] = [[], [], []]
    run_small(edits)
    edits[number] = [wrong]
    with pytest.raises(ValueError, match=message):
        run_small(edits)


@pytest.mark.parametrize("wrong", [edit(rows=np.array([0.0, 1.0])), edit(values=np.ones((2, 3))), edit(first_col=-1)])
def test_edits_of_another_type_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        run_small([[wrong], [], []])


def test_steps_without_their_edits_or_sequences_are_refused() -> None:
    none: list[list[Any]] = [[], [], []]
    with pytest.raises(ValueError, match="number of edits"):
        run_small(none[:2])
    with pytest.raises(ValueError, match="no sequences"):
        run_small(none, [])
    cache = module.KeyValues(True, 1, 1, 4, 8)
    for pieces in ([(0, 2, 0, cache)], [(1, 3, 0, cache)], [(2, 1, 0, cache), (0, 2, 0, cache)]):
        with pytest.raises(ValueError, match=r"all rows|follow one another"):
            run_small(none, pieces)
    with pytest.raises(ValueError, match="another shape"):
        run_small(none, [(0, 3, 0, module.KeyValues(True, 1, 2, 4, 8))])


def test_only_scores_may_be_asked_for_of_some_rows() -> None:
    program, code = small_code()
    x, buffers, cache = np.ones((3, 16), np.float32), module.Buffers(), module.KeyValues(True, 1, 1, 4, 8)
    none, edits = np.empty(0, np.int64), [[], [], []]
    buffers.fit(code, 3)
    program.run(code, buffers, 3, 4, 3, none, [(2, 1, 2, cache), (0, 1, 0, cache)], [x], edits)
    for first, last, piece in ((3, 4, (2, 2, 0, cache)), (3, 4, (3, 1, 0, cache)), (3, 7, (2, 1, 2, cache))):
        with pytest.raises(ValueError, match=r"follow one another"):
            program.run(code, buffers, first, last, 3, none, [piece], [x], edits)


def test_buffers_are_read_and_written_within_their_slots() -> None:
    _, code = small_code()
    buffers = module.Buffers()
    with pytest.raises(ValueError, match="no slot"):
        buffers.read(module.View(1), 1, 1)
    buffers.fit(code, 3)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffers.write(module.View(1, 5), values)
    np.testing.assert_array_equal(buffers.read(module.View(1, 4), 2, 5)[:, 1:4], values)
    for view, rows, cols, message in [
        (module.View(0), 1, 1, "the caller's"),
        (module.View(3), 1, 1, "no slot"),
        (module.View(-1), 1, 1, "no slot"),
        (module.View(1, 14), 1, 3, "past its slot"),
        (module.View(1, -1), 1, 1, "past its slot"),
        (module.View(1), 4, 1, "fewer rows"),
        (module.View(1, 1), 1, 2**64 - 1, "past its slot"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffers.read(view, rows, cols)
        if cols < 100:
            with pytest.raises(ValueError, match=message):
                buffers.write(view, np.zeros((rows, cols), np.float32))
    for where in ((0, 1, 1, 1), (1, 0, 0, 0), (0, 2**40, 2**40, 2**40)):
        with pytest.raises(ValueError, match="no such pattern"):
            buffers.read_pattern(*where)
    buffers.fit_patterns(12)
    room = 12
    buffers.write_pattern(4, np.ones((2, 2, 2), np.float32))
    assert buffers.read_pattern(3, 1, 1, room - 3).sum() == 8
    with pytest.raises(ValueError, match="no such pattern"):
        buffers.write_pattern(5, np.ones((2, 2, 2), np.float32))
    with pytest.raises(ValueError, match="larger than any memory"):
        buffers.fit_patterns(2**63)


@pytest.mark.parametrize("half", [True, False])
@given(data=st.data())
@settings(max_examples=25)
def test_caches_give_back_what_is_written_and_nothing_beside_it_changes(half: bool, data: st.DataObject) -> None:
    heads, dim, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 35)), 2
    cache, rng = module.KeyValues(half, layers, heads, dim, 140), np.random.default_rng(data.draw(st.integers(0, 9)))
    expected = {}
    for layer in range(layers):
        for part in "kv":
            whole = rng.normal(0, 1, (heads, 140, dim)).astype(np.float32)
            cache.write(layer, part, 0, whole)
            expected[layer, part] = whole.astype(np.float16).astype(np.float32) if half else whole
    layer, part = data.draw(st.sampled_from(sorted(expected)))
    start = data.draw(st.integers(0, 140))
    values = rng.normal(0, 1, (heads, data.draw(st.integers(0, 140 - start)), dim)).astype(np.float32)
    cache.write(layer, part, start, values)
    stop = start + values.shape[1]
    expected[layer, part][:, start:stop] = values.astype(np.float16) if half else values
    for (layer, part), whole in expected.items():
        np.testing.assert_array_equal(cache.read(layer, part, 0, 140), whole)
        np.testing.assert_array_equal(cache.read(layer, part, start, stop), whole[:, start:stop])


def test_positions_and_shapes_that_a_cache_has_not_are_refused() -> None:
    cache = module.KeyValues(True, 2, 1, 4, 8)  # with room for a tile of 128
    good = np.zeros((1, 3, 4), np.float32)
    cache.write(1, "v", 125, good)
    for layer, part, start in [(2, "k", 0), (0, "q", 0), (0, "k", 126), (0, "k", 129), (0, "k", 2**64 - 1)]:
        with pytest.raises(ValueError, match=r"the cache|part"):
            cache.write(layer, part, start, good)
        with pytest.raises(ValueError, match=r"the cache|part"):
            cache.read(layer, part, start, start + 3 if start < 2**32 else start)
    with pytest.raises(ValueError, match="positions"):
        cache.read(0, "k", 5, 4)
    for wrong in (np.zeros((2, 3, 4)), np.zeros((1, 3, 5))):
        with pytest.raises(ValueError, match="another shape"):
            cache.write(0, "k", 0, wrong.astype(np.float32))
    with pytest.raises(TypeError):
        cache.write(0, "k", 0, good.astype(np.float64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "append"}, "nothing to append"),
        ({"kind": "append", "b": 0, "kv_heads": 0}, "do not fit together"),
        ({"kind": "append", "b": 0, "window": -1}, "window"),
        ({"kind": "append", "b": 0, "kv_heads": 16, "heads": 16}, "past its slot"),
        ({"kind": "scores", "a": 0, "heads": 3, "kv_heads": 2}, "do not fit together"),
        ({"kind": "scores", "a": 0, "dim": 9}, "past its slot"),
        ({"kind": "scores"}, "no slot"),
        ({"kind": "softmax", "a": 0, "wanted": True}, "window or rows"),
        ({"kind": "mix", "a": 0}, "no slot"),
        ({"kind": "mix", "a": 0, "out": 1, "cols": 7}, "columns do not fit"),
        ({"kind": "edit", "a": 0}, "no number"),
        ({"kind": "edit", "a": 0, "edit": 2**30}, "very large"),
        ({"kind": "edit", "a": 0, "edit": 0, "cols": 17}, "past its slot"),
        ({"kind": "edit", "edit": 0, "heads": 0}, "do not fit together"),
        ({"kind": "edit", "edit": 0, "as_cached": True}, "not cached"),
    ],
)
def test_steps_of_attention_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    program, one = module.Program(1, "scalar"), module.Instruction()
    one.heads, one.kv_heads, one.dim, one.cols = 2, 1, 4, 8
    for name, value in fields.items():
        if name == "kind":
            value = module.kinds[value]
        elif name in ("a", "b", "c", "out"):
            value = module.View(value)
        setattr(one, name, value)
    with pytest.raises(ValueError, match=message):
        program.compile([one], [16, 16], 0)
