"""Every format against the gguf package, bit for bit, in NumPy and compiled; all but the search of the K formats."""

from __future__ import annotations

from collections.abc import Callable

import gguf as oracle
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope import formats
from starscope.errors import InvalidContentError, UnsupportedError
from starscope.formats import (
    CHUNK_VALUES,
    FORMATS,
    KNOWN_TYPES,
    Format,
    decode,
    encode,
    find_format,
    format_by_id,
    round_activation,
)
from starscope.native import kernels

ENCODED = [f for f in FORMATS.values() if f.encode is not None]
IN_GGUF = [f for f in ENCODED if f.block_size <= 32]  # the K formats are in test_k_quants.py
FEW = settings(max_examples=40, deadline=None)

seeds = st.integers(0, 2**32 - 1)
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, 65504, 65520, -3e38, 3.4e38, np.inf, -np.inf, np.nan])
scales = st.sampled_from([1, 1e-3, 1e4, 2.0**-15, 2.0**-24, 2.0**-126, 2.0**-133, 2.0**-149, 2.0**120])


def hard_blocks(seed: int, scale: float, special: float) -> np.ndarray:
    """float32 [8 64]: halves (ties of the rounding) and others around a block's scale, a share of special values."""
    rng = np.random.default_rng(seed)
    shape = (8, 64)
    values = np.where(rng.random(shape) < 0.5, rng.integers(-254, 255, shape) / 2, rng.uniform(-300, 300, shape))
    values[0], values[1, ::2] = 0, -0.0
    values[2, :32] = rng.choice([-1.5, 1.5], 32)  # the largest magnitude with both signs
    for row, top in ((3, 15), (4, 31)):  # halves between the smallest and the largest of as many steps
        values[row] = np.concatenate([[0, top], rng.integers(0, 2 * top + 1, 62) / 2]) - 7
    values = np.where(rng.random(shape) < special, rng.choice(SPECIAL, shape) / scale, values)
    with np.errstate(over="ignore"):
        return (values * scale).astype(np.float32)


@pytest.fixture(params=["numpy", "compiled"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(formats, "kernels", lambda: None)
    elif kernels() is None:
        pytest.skip("the compiled kernels were not built")


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal as bytes, where every NaN counts as the same."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype == np.float32:
        a, b = (np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)) for x in (a, b))
    assert a.tobytes() == b.tobytes()


def oracle_encode(fmt: Format, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.quantize(values, oracle.GGMLQuantizationType[fmt.name]).view(np.uint8).reshape(len(values), -1)


def oracle_decode(fmt: Format, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, oracle.GGMLQuantizationType[fmt.name])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@FEW
@given(seed=seeds, plain=st.booleans())
def test_any_bytes_decode_as_in_the_gguf_package(fmt: Format, seed: int, plain: bool) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (3, 4 * fmt.block_bytes), dtype=np.uint8)
    if plain:  # scales near 1, so that no infinity hides what follows
        raw.reshape(-1, fmt.block_bytes)[:, 1::2] &= 0xBF
    assert_same_bits(decode(fmt, raw), oracle_decode(fmt, raw))


@pytest.mark.parametrize("fmt", [f for f in ENCODED if f.block_size == 1], ids=lambda f: f.name)
@FEW
@given(seed=seeds)
def test_any_float_encodes_as_in_the_gguf_package(fmt: Format, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << 32, (4, 4096), dtype=np.uint32).view(np.float32)
    assert_same_bits(encode(fmt, values), oracle_encode(fmt, values))


@pytest.mark.parametrize("fmt", IN_GGUF, ids=lambda f: f.name)
@FEW
@given(seed=seeds, scale=scales, special=st.sampled_from([0.0, 0.02, 0.5]))
def test_blocks_encode_as_in_the_gguf_package(fmt: Format, seed: int, scale: float, special: float) -> None:
    values = hard_blocks(seed, scale, special)
    found, expected = encode(fmt, values), oracle_encode(fmt, values)
    if fmt.halves == (0, 4):  # which of 0 and -0 is the minimum differs between NumPy's own loops
        for raw in (found, expected):
            minima = raw.reshape(-1, fmt.block_bytes)[:, 2:4]
            minima[(minima == [0, 0x80]).all(axis=1)] = 0
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_number_of_16_bits_survives_a_round_trip(name: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(256, -1)
    values = decode(FORMATS[name], raw)
    assert_same_bits(values, oracle_decode(FORMATS[name], raw))
    again = encode(FORMATS[name], values)
    numbers = ~np.isnan(values)
    assert np.array_equal(again.view(np.uint16)[numbers], raw.view(np.uint16)[numbers])
    assert np.isnan(decode(FORMATS[name], again)[~numbers]).all()


@pytest.mark.parametrize(("bits", "rounded"), [
    (0x3F800000, 0x3F80), (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x3F807FFF, 0x3F80),
    (0x7F7FFFFF, 0x7F80), (0xFF7F8000, 0xFF80), (0x80000000, 0x8000), (0x00008000, 0x0000), (0x00018000, 0x0002),
    (0x7F800000, 0x7F80), (0x7F800001, 0x7FC0), (0xFFA12345, 0xFFE1), (0x7FFFFFFF, 0x7FFF), (0xFFFFFFFF, 0xFFFF),
])  # fmt: skip
def test_bf16_rounds_ties_to_even_and_keeps_nan_a_quiet_nan(bits: int, rounded: int) -> None:
    value = np.array([[bits]], np.uint32).view(np.float32)
    assert encode(FORMATS["BF16"], value).view(np.uint16)[0, 0] == rounded


def test_q8_0_rounds_halves_away_from_zero_and_spans_127() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :7] = 127, 0.5, -0.5, 1.5, -2.5, 0.49999997, -127
    raw = encode(FORMATS["Q8_0"], values)
    assert raw[:, :2].view(np.float16)[0, 0] == 1
    assert raw[0, 2:9].view(np.int8).tolist() == [127, 1, -1, 2, -3, 0, -127]


def test_q4_0_maps_the_largest_magnitude_to_minus_eight() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, [0, 1, 16, 31]] = -4, 4, 0.25, 0.24
    raw = encode(FORMATS["Q4_0"], values)
    assert raw[:, :2].view(np.float16)[0, 0] == 0.5
    assert raw[0, 2:4].tolist() == [0 | 9 << 4, 15 | 8 << 4]
    assert raw[0, 17] >> 4 == 8


@pytest.mark.parametrize(("name", "top", "minimum"), [("Q4_1", 15, True), ("Q5_0", 31, False), ("Q5_1", 31, True)])
def test_steps_round_up_at_halves_and_span_the_range(name: str, top: int, minimum: bool) -> None:
    lowest = -3.0 if minimum else -16.0
    values = np.zeros((1, 32), np.float32)
    values[0] = lowest + np.arange(32) * top / 31  # the first is the largest magnitude
    values[0, 1:4] = lowest + np.array([0.5, 0.49, 1.5])
    raw = encode(FORMATS[name], values)
    assert raw[0, : 4 if minimum else 2].view(np.float16).tolist() == ([1, lowest] if minimum else [1])
    steps = decode(FORMATS[name], raw)[0] - lowest
    assert steps[[0, 1, 2, 3, 31]].tolist() == [0, 1, 0, 2, top]
    assert np.abs(steps - (values[0] - lowest)).max() <= 0.5


@pytest.mark.parametrize("fmt", ENCODED, ids=lambda f: f.name)
def test_a_matrix_larger_than_a_chunk_is_encoded_row_by_row(fmt: Format) -> None:
    values = np.random.default_rng(0).standard_normal((3, CHUNK_VALUES // 2 + 256), dtype=np.float32)
    raw = encode(fmt, values)
    assert raw.shape == (3, fmt.row_bytes(values.shape[1]))
    rows = [encode(fmt, values[i : i + 1, j : j + 8192]) for i in range(3) for j in range(0, values.shape[1], 8192)]
    assert raw.tobytes() == b"".join(row.tobytes() for row in rows)
    decoded = [decode(fmt, row) for row in rows]
    assert decode(fmt, raw).tobytes() == b"".join(row.tobytes() for row in decoded)


@pytest.mark.parametrize("fmt", ENCODED, ids=lambda f: f.name)
@pytest.mark.parametrize("change", [
    lambda x: np.asfortranarray(x), lambda x: x[::-1][::-1], lambda x: np.concatenate([x, x], axis=1)[:, :256],
    lambda x: np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
])  # fmt: skip
def test_layout_and_alignment_of_the_input_make_no_difference(
    fmt: Format, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    values = np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32)
    raw = encode(fmt, values)
    assert_same_bits(encode(fmt, change(values)), raw)
    shifted = np.frombuffer(b"x" + raw.tobytes(), np.uint8)[1:].reshape(raw.shape)
    for given_raw in (shifted, np.asfortranarray(raw)):
        assert_same_bits(decode(fmt, given_raw), decode(fmt, raw))


@pytest.mark.parametrize("fmt", ENCODED, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(512,), (1, 256), (0, 256), (2, 3, 256)])
def test_any_number_of_leading_dimensions_is_kept(fmt: Format, shape: tuple[int, ...]) -> None:
    raw = encode(fmt, np.ones(shape, np.float32))
    assert raw.shape == (*shape[:-1], fmt.row_bytes(shape[-1]))
    assert raw.nbytes == fmt.nbytes(shape)
    assert np.allclose(decode(fmt, raw), np.ones(shape), rtol=5e-4, atol=0)  # float16 rounds a scale by 2^-12 of it


def test_sizes_and_names_are_those_of_the_gguf_package() -> None:
    for kind, (block_size, block_bytes) in oracle.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # the package counts two float32; ggml's blocks hold two float16, and no file has any
            continue
        assert KNOWN_TYPES[kind.value] == (kind.name, block_size, block_bytes)
    for fmt in FORMATS.values():
        assert KNOWN_TYPES[fmt.type_id] == (fmt.name, fmt.block_size, fmt.block_bytes)
        assert format_by_id(fmt.type_id) is fmt
    assert format_by_id(4) is None


def test_a_format_is_found_in_any_case() -> None:
    assert find_format("q4_k") is find_format("Q4_K") is FORMATS["Q4_K"]


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"iq2_xs is not a format.*F32, F16, BF16, Q8_0.*IQ4_NL.*Q3_K"):
        find_format("iq2_xs")


def test_a_format_that_is_only_read_says_which_are_written() -> None:
    with pytest.raises(
        UnsupportedError, match=r"reads Q3_K and does not write it; it writes F32, F16, BF16, Q8_0, Q4_0"
    ):
        encode(FORMATS["Q3_K"], np.zeros((1, 256), np.float32))


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(InvalidContentError, match="a row of 33 values cannot be stored as Q8_0, which packs 32"):
        encode(FORMATS["Q8_0"], np.zeros((1, 33), np.float32))
    with pytest.raises(InvalidContentError, match="a row of 33 bytes is not Q8_0, whose blocks are 34 bytes"):
        decode(FORMATS["Q8_0"], np.zeros((1, 33), np.uint8))


@FEW
@given(seeds, scales)
def test_rounded_activations_are_within_half_a_step_and_the_largest_stays(seed: int, scale: float) -> None:
    x = np.random.default_rng(seed).normal(0, 1, (3, 5, 64)).astype(np.float32) * np.float32(scale)
    blocks, found = x.reshape(-1, 32), round_activation(x).reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    step = (largest / 127).astype(np.float32).astype(np.float64)
    usable = (step > 2.0**-127).ravel()  # it has a reciprocal
    steps = (found / np.where(step > 0, step, 1))[usable]
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert (np.abs(steps) <= 127.001).all()
    assert (np.abs(found - blocks) <= 0.50002 * step + 2.0**-149)[usable].all()
    at = np.abs(blocks).argmax(axis=1)[:, None]
    expected = np.take_along_axis(blocks, at, 1)[usable]
    np.testing.assert_allclose(np.take_along_axis(found, at, 1)[usable], expected, rtol=3e-7)


def test_activations_round_to_even_and_zeros_stay() -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, :6] = 127, 0.5, 1.5, -2.5, 3.49, -126.5
    assert round_activation(x)[0, :6].tolist() == [127, 0, 2, -2, 3, -126]
    assert not round_activation(x)[0, 6:].any()
    assert not round_activation(x)[1].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_number_that_is_not_finite_gives_none(value: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = value
    found = round_activation(x)
    assert np.array_equal(found[:, :32], x[:, :32])
    assert np.isnan(found[:, 32:]).all()


def test_activations_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(InvalidContentError, match="48 values is not whole blocks of 32"):
        round_activation(np.ones((2, 48), np.float32))
