"""The microscope on an engine that does as on a GPU: stored matrices, caches that never move, recorded steps."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

import starscope
from families.test_gpt_bigcode_traced import TestGPTBigCodeTraced as GPTBigCode
from families.test_llama_traced import TestLlamaTraced as Llama
from families.traced_support import TYPES
from starscope.engine.gpu.devices import Ways
from starscope.engine.torch_engine import TorchEngine

GPU_LIKE = Ways(stored=True, static=True, recorded=True)


class OnGPU:
    """Loads every file so."""

    @pytest.fixture(scope="class")
    @classmethod
    def load(cls, files: Any) -> Any:
        @cache
        def load(setting: Any, to: str, engine: str) -> starscope.Model:
            found = starscope.load(files(setting, to)[0], engine=engine, threads=1)
            made = TorchEngine(found.graph, found.weights, threads=1, ways=GPU_LIKE)
            return starscope.Model(found.path, found.weights, found.tokenizer, made)

        return load

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model" in metafunc.fixturenames:
            types = TYPES[:1] if "oracle" in metafunc.fixturenames else TYPES
            cases = list(product(self.traced_settings[:1], types, ["torch"]))  # type: ignore[attr-defined]
            metafunc.parametrize("model", cases, ids=["-".join(map(str, case)) for case in cases], indirect=True)


class TestGPTBigCodeOnGPU(OnGPU, GPTBigCode): ...


class TestLlamaOnGPU(OnGPU, Llama): ...
