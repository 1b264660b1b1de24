"""The K formats' encoders: as good as llama.cpp's, bounded errors, and blocks that cannot be scaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope import formats
from starscope.formats import FORMATS, decode, encode
from starscope.native import kernels

NAMES = ["Q4_K", "Q5_K", "Q6_K"]
GROUP = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}  # values under one scale
STEPS = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 32}  # in a group's range, or up to its largest magnitude

# Root mean square errors of llama.cpp (ggml_quantize_chunk of ggml 0.25.3, no importance matrix) on samples().
LLAMA_CPP = {
    ("normal", "Q4_K"): 0.0714877, ("normal", "Q5_K"): 0.0362735, ("normal", "Q6_K"): 0.0177182,
    ("heavy tails", "Q4_K"): 0.349127, ("heavy tails", "Q5_K"): 0.19122, ("heavy tails", "Q6_K"): 0.0948399,
    ("offsets", "Q4_K"): 0.0783125, ("offsets", "Q5_K"): 0.0397115, ("offsets", "Q6_K"): 0.0350591,
}  # fmt: skip


def samples() -> dict[str, np.ndarray]:
    """float32 [64 1024] each."""
    normal = np.random.default_rng(7).standard_normal((64, 1024), dtype=np.float32)
    return {"normal": normal, "heavy tails": normal * np.abs(normal) ** 2, "offsets": normal + 3 * normal[:, :1]}


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.fixture(params=["numpy", "compiled"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(formats, "kernels", lambda: None)
    elif kernels() is None:
        pytest.skip("the compiled kernels were not built")


@st.composite
def blocks(draw: st.DrawFn, group: int) -> np.ndarray:
    """float32 [16 256]: normal values, or with offsets, with outliers, or with groups of very different sizes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((16, 256))
    kind = draw(st.sampled_from(["normal", "offsets", "outliers", "sizes", "zeros"]))
    if kind == "offsets":
        x += rng.uniform(-5, 5, (16, 1))
    if kind == "outliers":
        x = np.where(rng.random(x.shape) < 0.02, x * 50, x)
    if kind == "sizes":
        x *= np.repeat(2.0 ** rng.integers(-6, 6, (16, 256 // group)), group, axis=1)
    if kind == "zeros":
        x = np.where(rng.random(x.shape) < 0.9, 0, x)
    return np.float32(x * 2.0 ** draw(st.integers(-6, 12)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", samples())
def test_the_error_is_at_most_that_of_llama_cpp_and_1_percent(sample: str, name: str) -> None:
    x = samples()[sample]
    error = root_mean_square(decode(FORMATS[name], encode(FORMATS[name], x)) - x)
    assert 0.9 * LLAMA_CPP[sample, name] < error <= 1.01 * LLAMA_CPP[sample, name]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_value_is_farther_off_than_the_steps_of_the_widest_group_allow(name: str, data: st.DataObject) -> None:
    x = data.draw(blocks(GROUP[name]))
    error = np.abs(decode(FORMATS[name], encode(FORMATS[name], x)) - x).max(axis=1)
    groups = x.reshape(len(x), -1, GROUP[name])
    if name == "Q6_K":
        bound = 0.7 * np.abs(x).max(axis=1) / 32  # half a step, and half a step of the scales
    else:
        lowest = np.minimum(groups.min(axis=2), 0)
        step = (groups.max(axis=2) - lowest).max(axis=1) / STEPS[name]
        bound = 1.1 * step + -lowest.min(axis=1) / 126  # half a step of the minima
    assert (error <= bound).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_second_round_trip_loses_less_than_the_first(name: str, data: st.DataObject) -> None:
    x = data.draw(blocks(GROUP[name]))
    once = decode(FORMATS[name], encode(FORMATS[name], x))
    twice = decode(FORMATS[name], encode(FORMATS[name], once))
    assert root_mean_square(twice - once) <= 0.9 * root_mean_square(once - x)


@pytest.mark.parametrize("name", NAMES)
def test_the_steps_of_the_format_itself_are_met(name: str) -> None:
    """Groups that fill the range of integers under scales that float16 holds come out as they went in,
    but for a minimum of a few of float16's smallest steps, which rounding may leave.
    """
    group, rng = GROUP[name], np.random.default_rng(0)
    low, high = (-32, 31) if name == "Q6_K" else (0, STEPS[name])
    q = rng.integers(low, high + 1, (8, 256 // group, group))
    q[:, :, 0], q[:, :, 1] = low, high
    scales = np.full(q.shape[:2], 127 if name == "Q6_K" else 63)
    scales[:, 1::2] = rng.integers(20, 64, scales[:, 1::2].shape)
    if name == "Q6_K":
        scales[:, 0] = -128  # the largest of all, which takes the lowest number
    x = np.float32(2.0**-8 * scales[:, :, None] * q).reshape(8, 256)
    assert np.abs(decode(FORMATS[name], encode(FORMATS[name], x)) - x).max() <= 126 * 2.0**-24


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_a_constant_is_nearly_kept(name: str) -> None:
    zeros = np.zeros((2, 256), np.float32)
    raw = encode(FORMATS[name], zeros)
    assert not raw[:, slice(*FORMATS[name].halves)].any()
    assert decode(FORMATS[name], raw).tobytes() == zeros.tobytes()  # no -0 either
    zeros[1] = -0.0
    assert encode(FORMATS[name], zeros).tobytes() == raw.tobytes()
    for value in (1.0, -1.0, 3e4, -0.7):
        x = np.full((1, 256), value, np.float32)
        assert np.allclose(decode(FORMATS[name], encode(FORMATS[name], x)), x, rtol=5e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -(2.0**30), 6e8])
def test_a_block_that_cannot_be_scaled_is_an_infinite_scale_and_the_others_are_as_they_would_be(
    value: float, name: str
) -> None:
    """In a row of three blocks: two go together, and one is left over."""
    fmt = FORMATS[name]
    x = np.random.default_rng(0).standard_normal((1, 768), dtype=np.float32)
    good = encode(fmt, x).reshape(3, -1)
    for block in range(3):
        changed = x.copy()
        changed[0, 256 * block + 77] = value
        raw = encode(fmt, changed).reshape(3, -1)
        others = [i for i in range(3) if i != block]
        assert np.array_equal(raw[others], good[others])
        expected = np.zeros(fmt.block_bytes, np.uint8)
        expected[fmt.halves[0] : fmt.halves[0] + 2] = np.array([np.inf], np.float16).view(np.uint8)
        assert np.array_equal(raw[block], expected)
        with np.errstate(invalid="ignore"):
            assert np.isnan(decode(fmt, raw[block])).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_blocks_do_not_depend_on_their_neighbours(name: str) -> None:
    fmt = FORMATS[name]
    x = np.random.default_rng(3).standard_normal((3, 7 * 256), dtype=np.float32) * 2.0 ** np.arange(3)[:, None]
    alone = [encode(fmt, np.float32(x[i : i + 1, j : j + 256])) for i in range(3) for j in range(0, 7 * 256, 256)]
    assert encode(fmt, np.float32(x)).tobytes() == b"".join(raw.tobytes() for raw in alone)
