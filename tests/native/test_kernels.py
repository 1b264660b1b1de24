"""Every instruction set gives the bits of the NumPy definitions; they and the gguf package agree on numbers."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from starscope import formats, native

kernels = native.kernels()
assert kernels is not None, native.why_missing()  # so that a compile error cannot hide behind the NumPy fallback

F16, Q4_0, Q8_0, BF16 = 1, 2, 8, 30
FORMATS = {f.type_id: f for f in formats.FORMATS.values() if f.encode is not None and f.name != "F32"}
BLOCKS = {f.type_id: (f.block_size, f.block_bytes) for f in FORMATS.values()}
TYPES = pytest.mark.parametrize("type_id", FORMATS, ids=[f.name for f in FORMATS.values()])
IN_GGUF = pytest.mark.parametrize(
    "type_id", [i for i, f in FORMATS.items() if f.block_size <= 32],
    ids=[f.name for f in FORMATS.values() if f.block_size <= 32],
)  # fmt: skip
ISAS = pytest.mark.parametrize("isa", kernels.isas())

any_bits = st.integers(0, 2**32 - 1)
# Ties, limits and the edges of float16's normal, subnormal and finite ranges, each with its two neighbours.
EDGES = np.array(
    [0.0, 2**-24, 2**-25, 3 * 2**-25, 2**-14, 65504.0, 65520.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8,
     1 + 3 * 2**-8, 0.5, 127.0, 126.5, 8.0, 7.5, 2**-126, 2**-149, 2**-128, 2**-127, 3e38, 2**22, 2**27, 2**30],
    np.float32,
)  # fmt: skip
EDGES = np.concatenate([EDGES, np.nextafter(EDGES, np.float32(0)), np.nextafter(EDGES, np.float32(3.4e38)), [np.inf]])
EDGES = np.concatenate([EDGES, -EDGES]).astype(np.float32)


@pytest.fixture(autouse=True)
def _restore_isa():
    before = kernels.isa()
    yield
    kernels.set_isa(before)


def encode(type_id: int, values: np.ndarray, isa: str = "scalar", threads: int = 1) -> np.ndarray:
    block_values, block_bytes = BLOCKS[type_id]
    packed = np.full((values.shape[0], values.shape[1] // block_values * block_bytes), 0xAA, np.uint8)
    kernels.set_isa(isa)
    kernels.encode(type_id, values, packed, threads)
    return packed


def decode(type_id: int, packed: np.ndarray, isa: str = "scalar", threads: int = 1) -> np.ndarray:
    block_values, block_bytes = BLOCKS[type_id]
    values = np.full((packed.shape[0], packed.shape[1] // block_bytes * block_values), 7, np.float32)
    kernels.set_isa(isa)
    kernels.decode(type_id, packed, values, threads)
    return values


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def oracle_encode(type_id: int, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if type_id == F16:
            return values.astype(np.float16).view(np.uint8)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(type_id)).view(np.uint8)


def oracle_decode(type_id: int, packed: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if type_id == F16:
            return packed.view(np.float16).astype(np.float32)
        return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(type_id)).view(np.float32)


@st.composite
def matrices(draw: st.DrawFn, type_id: int, *, every_bit_pattern: bool = False) -> np.ndarray:
    """Noise around an offset (0 often), with edges among it; or any bits at all."""
    block = BLOCKS[type_id][0]
    shape = (draw(st.integers(1, 5)), block * draw(st.integers(1, 5 if block > 1 else 70)))
    if every_bit_pattern and block < 256:
        return draw(hnp.arrays(np.uint32, shape, elements=any_bits)).view(np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = np.float32(2.0) ** np.float32(draw(st.integers(-30, 14)))
    noise = rng.standard_normal(shape, np.float32) + np.float32(draw(st.sampled_from([0, 0, 0, 0.5, -3, 100])))
    edges = rng.random(shape) < draw(st.sampled_from([0, 0.003, 0.5]))
    return np.where(edges, rng.choice(EDGES, shape), noise * scale).astype(np.float32)


@IN_GGUF
@given(data=st.data())
def test_scalar_encoding_is_that_of_gguf(type_id, data):
    values = data.draw(matrices(type_id))
    if BLOCKS[type_id][0] == 32:
        # gguf leaves to the processor what becomes of a NaN, an infinity, or a scale whose reciprocal is infinite
        values = np.where(np.abs(values) < 1e38, values, np.float32(1.5))
        spans = np.ptp(values.reshape(-1, 32), axis=1)
        tiny = np.maximum(spans, np.abs(values.reshape(-1, 32)).max(axis=1)) < 2.0**-119
        values = np.where(np.repeat(tiny, 32).reshape(values.shape), np.float32(0), values)
    assert same_bits(encode(type_id, values), oracle_encode(type_id, values))


@TYPES
@given(data=st.data())
def test_scalar_decoding_is_that_of_numpy_and_gguf(type_id, data):
    assert_decodes(data.draw(packed_rows(type_id)), type_id, "scalar", oracle_decode)


@ISAS
@TYPES
@given(data=st.data())
def test_every_instruction_set_encodes_the_bits_of_the_numpy_definition(isa, type_id, data):
    values = data.draw(matrices(type_id, every_bit_pattern=data.draw(st.booleans())))
    with np.errstate(all="ignore"):
        expected = FORMATS[type_id].encode(values.reshape(-1, BLOCKS[type_id][0])).reshape(len(values), -1)
    assert same_bits(encode(type_id, values, isa), expected)


@ISAS
@TYPES
@given(data=st.data())
def test_every_instruction_set_decodes_the_bits_of_the_numpy_definition(isa, type_id, data):
    def defined(type_id: int, packed: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return FORMATS[type_id].decode(packed.reshape(-1, BLOCKS[type_id][1])).reshape(len(packed), -1)

    assert_decodes(data.draw(packed_rows(type_id)), type_id, isa, defined)


@st.composite
def packed_rows(draw: st.DrawFn, type_id: int) -> np.ndarray:
    """Any bytes, of any number of blocks a row."""
    block_bytes = BLOCKS[type_id][1]
    shape = (draw(st.integers(1, 4)), block_bytes * draw(st.integers(1, 40 if block_bytes < 100 else 7)))
    return np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, shape, np.uint8)


def assert_decodes(packed, type_id, isa, expected):
    """The same bits, where one NaN is as good as another."""
    found, wanted = decode(type_id, packed, isa), expected(type_id, packed)
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert same_bits(np.nan_to_num(found), np.nan_to_num(wanted))


@ISAS
def test_every_float16_and_bfloat16_decodes_exactly_and_encodes_back(isa):
    every = np.arange(2**16, dtype=np.uint16)[None]
    for type_id in (F16, BF16):
        values = decode(type_id, every.view(np.uint8), isa)
        assert same_bits(values, oracle_decode(type_id, every.view(np.uint8)))
        back = encode(type_id, values, isa).view(np.uint16)
        assert np.array_equal(back[~np.isnan(values)], every[~np.isnan(values)])
        assert np.isnan(decode(type_id, back.view(np.uint8))[np.isnan(values)]).all()


@ISAS
def test_float16_rounds_like_numpy_over_the_whole_range(isa):
    bits = np.arange(
        0, 2**32, 9973, dtype=np.uint32
    )  # a prime step: every exponent, all kinds of mantissas, both signs
    values = np.concatenate([bits.view(np.float32), EDGES])[None]
    assert same_bits(encode(F16, values, isa), oracle_encode(F16, values))
    assert same_bits(encode(BF16, values, isa), oracle_encode(BF16, values))


@ISAS
@TYPES
def test_threads_change_nothing(isa, type_id):
    values = np.random.default_rng(0).standard_normal((96, 4096)).astype(np.float32)
    packed = encode(type_id, values, isa)
    for threads in (2, 3, 7, 1000):
        assert same_bits(encode(type_id, values, isa, threads), packed)
        assert same_bits(decode(type_id, packed, isa, threads), decode(type_id, packed, isa))


def block(*head: float) -> np.ndarray:
    return np.array([[*head, *[0.0] * (32 - len(head))]], np.float32)


@ISAS
def test_q8_0_rounds_halves_away_from_zero(isa):
    quants = encode(Q8_0, block(127.0, 0.5, -0.5, 1.5, -1.5, 2.4999998, np.nextafter(np.float32(0.5), 0)), isa)[0, 2:9]
    assert quants.view(np.int8).tolist() == [127, 1, -1, 2, -2, 2, 0]


@ISAS
@pytest.mark.parametrize("type_id", [Q4_0, Q8_0], ids=["Q4_0", "Q8_0"])
def test_values_on_the_edge_between_two_quants_round_as_in_gguf(isa, type_id):
    rng = np.random.default_rng(3)
    largest = rng.uniform(0.01, 10, (4096, 1)).astype(np.float32)
    levels = 8 if type_id == Q4_0 else 127
    edge = ((rng.integers(-levels, levels, (4096, 31)) + 0.5) * (largest / levels)).astype(np.float32)
    values = np.concatenate([largest, np.clip(edge, -largest, largest)], axis=1)
    for step in (
        values,
        np.nextafter(values, np.float32(0)),
        np.nextafter(values, np.float32(99)).clip(-largest, largest),
    ):
        assert same_bits(encode(type_id, step, isa), oracle_encode(type_id, step))


@ISAS
def test_q4_0_takes_its_sign_from_the_first_of_equal_magnitudes(isa):
    for first in (4.0, -4.0):
        packed = encode(Q4_0, block(1.0, first, -first), isa)
        assert packed[:, :2].copy().view(np.float16) == -first / 8
        assert [b & 15 for b in packed[0, 3:5]] == [0, 15]


@ISAS
@pytest.mark.parametrize("type_id", [Q4_0, Q8_0], ids=["Q4_0", "Q8_0"])
def test_what_cannot_be_scaled_becomes_quant_zero(isa, type_id):
    def quants(values: np.ndarray) -> list[int]:
        packed = encode(type_id, values, isa)[0, 2:]
        return packed.view(np.int8).tolist() if type_id == Q8_0 else [b & 15 for b in packed.tolist()]

    assert set(quants(block(np.nan, 1.0))) == {0}
    assert quants(block(np.inf, 1.0))[:2] == ([0, 0] if type_id == Q8_0 else [0, 8])
    assert set(quants(block(1e-40, -1e-40))) == {0}
    assert np.isnan(encode(type_id, block(np.nan, 1.0), isa)[:, :2].copy().view(np.float16)).all()
    assert np.isinf(encode(type_id, block(1e9, 1.0), isa)[:, :2].copy().view(np.float16)).all()


def test_several_python_threads_encode_at_once():
    values = np.random.default_rng(1).standard_normal((64, 2048)).astype(np.float32)
    expected = encode(Q8_0, values, kernels.isas()[-1])
    results: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: results.append(encode(Q8_0, values, kernels.isas()[-1], 2))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(same_bits(result, expected) for result in results)
