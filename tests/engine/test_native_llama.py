"""What LLaMA's blocks ask of the native engine beside GPT-BigCode's: gates, rotations, groups of heads, windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from starscope import native
from starscope.engine.native_engine import NativeEngine
from starscope.engine.numpy_engine import NumpyEngine
from starscope.graph import Graph
from support.native_steps import Steps
from support.numbers import TOLERANCE, ulps
from support.rounding import RoundingEngine
from support.stored import distance, make_llama_graph, prompts, stored_weights

module = native.kernels()
assert module is not None, native.why_missing()
ISAS = pytest.mark.parametrize("isa", module.isas())
# Keys and values are often stored in more bits than queries: the rows of one norm are then rounded for both.
MIXED = {"v_proj.weight": "Q6_K", "up_proj.weight": "Q8_0"}
STORED = [("F32", {}), ("F16", {}), ("Q8_0", {}), ("Q4_0", {"v_proj.weight": "Q8_0"}), ("Q4_K", MIXED)]
FORMAT = pytest.mark.parametrize(("name", "mixed"), STORED, ids=["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
WINDOW = pytest.mark.parametrize("window", [0, 40])


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = module.isa()
    yield
    native.use_isa(before)


def graph_of(window: int = 0, **sizes: int) -> Graph:
    sizes = {"hidden": 256, "inner": 512, "head_dim": 32, "positions": 300, **sizes}
    return make_llama_graph(window=window, bias=True, **sizes)


@ISAS
@FORMAT
@WINDOW
def test_bits_depend_on_a_text_alone(isa: str, name: str, mixed: dict[str, str], window: int) -> None:
    graph = graph_of(window)
    native.use_isa(isa)
    engine, other = (NativeEngine(graph, stored_weights(graph, name, mixed=mixed), threads=n) for n in (1, 3))
    texts = prompts(graph, [150, 1, 40])
    alone = [engine.forward([text], None, "all")[0] for text in texts]
    for found, expected in zip(other.forward(texts, None, "all"), alone, strict=True):
        np.testing.assert_array_equal(found, expected)
    cache = other.new_cache()
    for start, stop in ((0, 1), (1, 3), (3, 27), (27, 149), (149, 150)):
        [found] = other.forward([texts[0][start:stop]], [cache], "all")
        np.testing.assert_array_equal(found, alone[0][start:stop])


@ISAS
@WINDOW
def test_float32_logits_are_those_of_numpy(isa: str, window: int) -> None:
    graph = graph_of(window, hidden=52, heads=6, kv_heads=3, head_dim=10, inner=77)
    weights = stored_weights(graph, "F32")
    native.use_isa(isa)
    texts = prompts(graph, [140, 3])
    for found, expected in zip(
        NativeEngine(graph, weights, threads=2).forward(texts, None, "all"),
        NumpyEngine(graph, weights).forward(texts, None, "all"),
        strict=True,
    ):
        assert ulps(found, expected) <= TOLERANCE


@FORMAT
@pytest.mark.parametrize("lengths", [[1], [1, 2, 3, 30]], ids=["one_row", "rows"])
def test_every_instruction_is_its_definition(name: str, mixed: dict[str, str], lengths: list[int]) -> None:
    graph = graph_of()
    steps = Steps(NativeEngine(graph, stored_weights(graph, name, mixed=mixed), threads=2))
    for wanted in ("last", "all"):
        steps.check(prompts(graph, lengths), wanted)


@FORMAT
def test_logits_are_those_of_the_rounding_engine(name: str, mixed: dict[str, str]) -> None:
    graph = graph_of(40)
    weights, texts = stored_weights(graph, name, mixed=mixed), prompts(graph, [1] * 8 + [2, 60])
    both = (
        engine.forward(texts, None, "all") for engine in (NativeEngine(graph, weights), RoundingEngine(graph, weights))
    )
    distances = sorted(distance(a, b) for a, b in zip(*both, strict=True))
    assert distances[len(distances) // 2] <= 1e-5  # the others have a value on the other side of a border
    assert distances[-1] <= 0.05


def test_a_block_is_six_instructions() -> None:
    graph = graph_of(layers=3)
    engine = NativeEngine(graph, stored_weights(graph, "Q8_0"), threads=1)
    numbers = {number: kind for kind, number in module.kinds.items()}
    kinds = [numbers[one.kind] for one in engine._plain.compiled.instructions]
    block = ["linear", "rope", "attention", "linear", "linear", "linear"]
    assert kinds[:12] == block * 2
    first, gate = (engine._plain.compiled.instructions[i] for i in (0, 4))
    assert (len(first.matrices), first.gated, len(gate.matrices), gate.gated) == (3, False, 2, True)


@ISAS
def test_far_positions_are_turned_as_near_ones(isa: str) -> None:
    """Angles are float32, their sines and cosines those of double: no error that grows with the position."""
    program, far = module.Program(2, isa), 131_000
    frequencies = (np.float32(1) / np.power(10_000, np.arange(0, 20, 2) / 20)).astype(np.float32)
    one, cache = module.Instruction(), module.KeyValues(True, 1, 1, 20, far + 64)
    one.kind, one.heads, one.dim, one.cols = module.kinds["rope"], 3, 20, 60
    one.a, one.out, one.frequencies = module.View(0), module.View(1), program.add_vector(frequencies)
    code = program.compile([one], [60, 60], 2)
    x, found = np.random.default_rng(0).normal(0, 1, (50, 60)).astype(np.float32), np.empty((50, 60), np.float32)
    program.run(code, module.Buffers(), 0, 1, 50, np.empty(0, np.int64), [(0, 50, far, cache)], [x, found])
    angles = (np.arange(far, far + 50, dtype=np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    first, second = np.split(x.reshape(50, 3, 20).astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    assert np.abs(found.reshape(50, 3, 20) - expected).max() <= 4 * 2.0**-24 * np.abs(x).max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matrices": []}, "no matrices"),
        ({"matrices": [0] * 4}, "too many"),
        ({"matrices": [0, 2]}, "different rows"),
        ({"matrices": [0, 0], "biases": [0]}, "another number of biases"),
        ({"matrices": [0, 1], "cols": 47}, "have rows"),
        ({"matrices": [0, 1], "gated": True, "cols": 16}, "size of what it multiplies"),
        ({"kind": "rope", "heads": 2, "dim": 7, "cols": 14, "frequencies": 0}, "do not fit"),
        ({"kind": "rope", "heads": 2, "dim": 8, "cols": 15, "frequencies": 0}, "columns do not fit"),
        ({"kind": "rope", "heads": 2, "dim": 8, "cols": 16}, "no frequencies"),
        ({"kind": "rope", "heads": 2, "dim": 8, "cols": 16, "frequencies": 0}, "number of frequencies"),
    ],
)
def test_instructions_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    program, one = module.Program(1, "scalar"), module.Instruction()
    for rows, cols in ((16, 32), (32, 32), (16, 64)):
        program.add_matrix(0, rows, cols)
    program.add_vector(np.ones(32, np.float32))
    one.kind, one.cols, one.a, one.out = module.kinds["linear"], 48, module.View(0), module.View(1)
    for name, value in fields.items():
        setattr(one, name, module.kinds[value] if name == "kind" else value)
    with pytest.raises(ValueError, match=message):
        program.compile([one], [64, 64], 2)
