"""Triton's products with stored matrices, in Triton's interpreter on the CPU, against `formats.decode` and float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.engine.gpu.devices import Ways
from starscope.engine.gpu.products import WALKS, linear
from starscope.engine.gpu.stored import LAYOUTS
from starscope.engine.torch_engine import TorchEngine
from starscope.formats import find_format
from support.numbers import ulps
from support.stored import make_graph, stored_matrix, stored_weights

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux alone")

FORMATS = list(LAYOUTS)


def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and what its rounding errors are measured by: the same of magnitudes."""
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    add = 0 if bias is None else bias.astype(np.float64)
    return x64 @ w64.T + add, np.abs(x64) @ np.abs(w64).T + np.abs(add)


def check(format_name: str, n: int, rows: int, blocks: int, *, bias: bool, seed: int = 0) -> None:
    matrix, w = stored_matrix(
        format_name, rows, blocks * find_format(format_name).block_size, seed=seed, by_triton=True
    )
    rng = np.random.default_rng(seed + 1)
    x = rng.normal(size=(n, matrix.shape[1])).astype(np.float32)
    add = rng.normal(size=rows).astype(np.float32) if bias else None
    found = linear(torch.from_numpy(x), matrix, None if add is None else torch.from_numpy(add)).numpy()
    expected, size = reference(x, w, add)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    # Sums of so many terms in float32, in any order, each error at most half an ulp of what it is added to.
    assert (np.abs(found - expected) <= (4 + x.shape[1] ** 0.5) * 2.0**-24 * size).all()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("n", [1, 2, 16, 17])
def test_a_product_is_that_of_the_decoded_weights(format_name: str, n: int) -> None:
    check(format_name, n, rows=67, blocks=3, bias=n % 2 == 1)


@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=3, deadline=None)
@given(n=st.integers(1, 40), rows=st.integers(1, 70), blocks=st.integers(1, 3), bias=st.booleans())
def test_a_product_may_have_any_sizes(format_name: str, n: int, rows: int, blocks: int, bias: bool) -> None:
    check(format_name, n, rows, blocks, bias=bias, seed=n)


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_kernels_decode_every_weight_to_its_very_bits(format_name: str) -> None:
    """A row of x that is 1 in one place gives one column of the matrix, without any rounding."""
    matrix, w = stored_matrix(format_name, 5, 256, seed=3, by_triton=True)
    found = linear(torch.eye(256), matrix).numpy()
    np.testing.assert_array_equal(found, w.T)
    for column in range(0, 256, 17):
        alone = linear(torch.eye(256)[column : column + 1], matrix).numpy()
        np.testing.assert_array_equal(alone, w.T[column : column + 1])


@pytest.mark.parametrize("gpu", ["cuda:80", "hip:gfx942"])
def test_the_kernels_compile_for_gpus_that_are_not_here(gpu: str, tmp_path: Path) -> None:
    """The interpreter takes what a compiler refuses: types that do not fit, tiles too large for shared memory."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parent.parent / "support" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), gpu],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) == 2 * len(FORMATS)
    assert max(int(shared) for *_, shared in made) <= 48 << 10  # bytes that every GPU gives one program


def test_every_stored_format_has_a_way_through_its_rows() -> None:
    assert set(WALKS) == set(LAYOUTS)


def test_what_is_not_finite_stays_in_its_row() -> None:
    matrix, _ = stored_matrix("Q4_K", 70, 512, by_triton=True)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    x[3, 7] = float("nan")
    found = linear(x, matrix)
    assert found[[0, 1, 2, 4]].isfinite().all()
    assert found[3].isnan().all()


def test_where_triton_fails_torch_decodes_and_the_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore.")

    graph = make_graph(hidden=256, heads=4, inner=512)
    ways = Ways(stored=True, triton=True)
    with monkeypatch.context() as patched:
        patched.setattr("starscope.engine.gpu.products._by_triton", no_compiler)
        engine = TorchEngine(graph, stored_weights(graph, "Q4_K", mixed={"down_proj.weight": "Q6_K"}), ways=ways)
        [found] = engine.forward([[1, 2, 3]])
    assert not engine.ways.triton
    assert engine.notes == [
        "quantized weights are decoded by torch on cpu: Triton fails there: Failed to find C compiler. Please specify "
        "via CC environment variable."
    ]
    plain = TorchEngine(graph, stored_weights(graph, "Q4_K", mixed={"down_proj.weight": "Q6_K"}))
    assert ulps(found, plain.forward([[1, 2, 3]])[0]) <= 32
