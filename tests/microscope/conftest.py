"""One small checkpoint for all tests of the microscope, loaded once an engine and a type."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

import starscope
from starscope.convert import convert
from starscope.engine import ENGINES
from support.checkpoints import make_checkpoint

TYPES = ("f32", "q8_0")
CASES = [pytest.param(case, id="-".join(case)) for case in product(ENGINES, TYPES)]


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine, type) -> a model of three blocks with one key head."""
    folder = tmp_path_factory.mktemp("traced")
    make_checkpoint(folder, layers=3)

    @cache
    def file(to: str) -> Any:
        return convert(folder, folder / f"{to}.gguf", to=to).out

    @cache
    def load(engine: str, to: str) -> starscope.Model:
        return starscope.load(file(to), engine=engine, threads=1)

    return load


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, opened: Any) -> starscope.Model:
    """On each engine, float32 and quantized."""
    made: starscope.Model = opened(*request.param)
    return made


@pytest.fixture(params=[pytest.param(one, id=one) for one in ENGINES])
def quick(request: pytest.FixtureRequest, opened: Any) -> starscope.Model:
    """On each engine, quantized: for what the type has no part in."""
    made: starscope.Model = opened(request.param, "q8_0")
    return made
