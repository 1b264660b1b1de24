"""What the torch engine does on a GPU, done on the CPU: stored matrices, static caches, recorded steps, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from starscope.engine import Weights, torch_kernels
from starscope.engine.gpu import devices, static
from starscope.engine.gpu.devices import Ways, all_devices, find_device, free_bytes, memory_errors, ways_of
from starscope.engine.gpu.products import linear
from starscope.engine.gpu.stored import LAYOUTS, device_bytes, read_stored
from starscope.engine.torch_engine import TorchEngine
from starscope.errors import DoesNotFitError, UnsupportedError
from starscope.family import Slot
from starscope.formats import decode, find_format
from starscope.graph import Graph
from support.numbers import ulps
from support.stored import StoredSource, make_graph, prompts, stored_matrix, stored_weights

CPU = torch.device("cpu")
HALF = 2**13  # ulp: what a key that rounds to its other neighbour in float16 may move
GPU_LIKE = Ways(stored=True, static=True, recorded=True)


def make_engine(graph: Graph, form: str, ways: Ways | None = GPU_LIKE, *, half: bool | None = None) -> TorchEngine:
    """`half`: whether keys are rounded to float16, which is as the file says by default."""
    weights = stored_weights(graph, form)
    if half is not None:
        weights.half_cache = half
    return TorchEngine(graph, weights, ways=ways)


def graph_of(*, positions: int = 160, multi_query: bool = True) -> Graph:
    return make_graph(hidden=256, heads=4, inner=512, positions=positions, multi_query=multi_query)


# matrices


@pytest.mark.parametrize("form", LAYOUTS)
def test_a_stored_matrix_decodes_to_the_bits_of_the_file(form: str) -> None:
    fmt = find_format(form)
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (7, 3 * fmt.block_bytes), np.uint8)  # infinities and NaN among the scales
    cols = 3 * fmt.block_size
    weights = Weights([Slot("w", "w", "w", (7, cols), always_f32=False)], StoredSource({"w": (form, raw)}))
    matrix = read_stored(weights, "w", CPU)
    expected = decode(fmt, raw)
    found, number = matrix.decode().numpy(), ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~number)
    np.testing.assert_array_equal(found.view(np.uint32)[number], expected.view(np.uint32)[number])
    np.testing.assert_array_equal(matrix.decode(2, 5).numpy(), expected[2:5])
    np.testing.assert_array_equal(matrix.rows(torch.tensor([6, 0, 6])).numpy(), expected[[6, 0, 6]])
    assert matrix.nbytes == raw.nbytes == device_bytes(form, (7, cols))


def test_a_matrix_is_read_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starscope.engine.gpu.stored.UPLOAD_BYTES", 1000)
    matrix, expected = stored_matrix("Q6_K", 23, 256)
    np.testing.assert_array_equal(matrix.decode().numpy(), expected)


@pytest.mark.parametrize("form", LAYOUTS)
def test_torch_multiplies_with_a_stored_matrix_a_few_rows_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starscope.engine.gpu.products.TILE_VALUES", 2000)
    matrix, w = stored_matrix(form, 37, 512)
    rng = np.random.default_rng(2)
    x, bias = rng.normal(size=(5, 512)).astype(np.float32), rng.normal(size=37).astype(np.float32)
    found = linear(torch.from_numpy(x), matrix, torch.from_numpy(bias))
    assert ulps(found, x.astype(np.float64) @ w.astype(np.float64).T + bias) <= 32


def test_gradients_go_through_a_product_with_a_stored_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starscope.engine.gpu.products.TILE_VALUES", 2000)
    matrix, w = stored_matrix("Q4_K", 37, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    bias = torch.zeros(37, requires_grad=True)
    linear(x, matrix, bias).square().sum().backward()  # type: ignore[no-untyped-call]
    y = x.detach().double() @ torch.from_numpy(w).double().T
    assert x.grad is not None
    assert bias.grad is not None
    assert ulps(x.grad, 2 * y @ torch.from_numpy(w).double()) <= 32
    assert ulps(bias.grad, 2 * y.sum(0)) <= 32


# an engine with all of it


@pytest.mark.parametrize("form", [*LAYOUTS, "Q5_1", "F32"])
@pytest.mark.parametrize("multi_query", [True, False])
def test_an_engine_with_stored_matrices_gives_the_logits_of_the_decoded_ones(form: str, multi_query: bool) -> None:
    graph = graph_of(multi_query=multi_query)
    plain, other = make_engine(graph, form, None), make_engine(graph, form)
    texts = prompts(graph, [9, 1, 30])
    for found, expected in zip(other.forward(texts, None, "all"), plain.forward(texts, None, "all"), strict=True):
        assert ulps(found, expected) <= 32
    formats = {name: stored_weights(graph, form).format_name(name) for name in other.weights}
    expected_bytes = sum(
        device_bytes(formats[name], shape) for name, shape in graph.weights.items() if name != "lm_head.weight"
    )
    assert other.weight_bytes == expected_bytes


@pytest.mark.parametrize("form", ["Q4_0", "F16"])
def test_an_engine_multiplies_by_triton_where_it_is_told_to(form: str) -> None:
    pytest.importorskip("triton")
    graph = make_graph(hidden=64, heads=4, inner=96)
    plain, other = (make_engine(graph, form, ways, half=False) for ways in (None, replace(GPU_LIKE, triton=True)))
    texts = prompts(graph, [5, 2])
    for found, expected in zip(other.forward(texts), plain.forward(texts), strict=True):
        assert ulps(found, expected) <= 32


def decoded(engine: TorchEngine, texts: Sequence[list[int]], steps: int) -> np.ndarray:
    """Logits of so many decoding steps of all the texts together, each fed ids of its own: [steps texts vocab]."""
    caches = [engine.new_cache() for _ in texts]
    engine.forward(texts, caches)
    ids = np.random.default_rng(4).integers(0, engine.graph.hp.vocab_size, (steps, len(texts)))
    return np.stack([np.concatenate(engine.forward([[int(i)] for i in row], caches)) for row in ids])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("multi_query", [True, False])
@pytest.mark.parametrize("lengths", [[3], [1, 30, 12], [4] * 9])
def test_recorded_steps_give_the_logits_of_plain_ones(
    half: bool, multi_query: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "FIRST_WINDOW", 8)  # so that windows grow on the way
    graph = graph_of(multi_query=multi_query)
    texts = prompts(graph, lengths)
    found = decoded(make_engine(graph, "Q8_0", half=half), texts, 24)
    expected = decoded(make_engine(graph, "Q8_0", None, half=half), texts, 24)
    assert ulps(found, expected) <= (HALF if half else 32)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_a_step_is_recorded_once_a_window_and_old_ones_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "FIRST_WINDOW", 8)
    made = []
    monkeypatch.setattr(static, "_Recorded", lambda *given: made.append(given[2]) or RECORDED(*given))
    engine = make_engine(graph_of(positions=24), "F32")
    decoded(engine, [[1, 2]], 22)
    assert made == [8, 16, 24]
    for _ in range(20):
        decoded(engine, [[1]], 1)
    assert engine.recorder is not None
    assert len(engine.recorder._steps) <= static.RECORDED


RECORDED = static._Recorded


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`, with what was captured inside of it."""

    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_second_step_is_captured_and_later_ones_replayed_or_run_where_that_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def capture(graph: FakeGraph, *, stream: torch.device, **_: Any) -> Iterator[None]:
        assert stream == OnCuda.device
        yield
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(FakeGraph, "replays", 0)
    engine = make_engine(graph_of(), "Q8_0")
    assert engine.recorder is not None
    run, runs = engine.run, list[int]()
    monkeypatch.setattr(engine, "run", lambda *given, **more: (runs.append(1), run(*given, **more)))
    caches = [engine.new_cache(), engine.new_cache()]
    for cache in caches:
        engine.forward([[1, 2, 3]], [cache])
        engine.forward([[4]], [cache])
        *_, one = engine.recorder._steps.values()
        one._positions = OnCuda(one._positions)  # type: ignore[assignment]
        runs.clear()
        for i in range(5):
            engine.forward([[i]], [cache])
        assert len(runs) == (6 if fails else 1)  # the failed capture runs once more, and so does every step after it
    assert FakeGraph.replays == (0 if fails else 10)
    assert len(engine.notes) == fails  # both sequences failed; it is said once


class OnCuda:
    """A tensor on the CPU that says it is on a GPU."""

    device = torch.device("cuda:1")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy_ = tensor.copy_


def test_a_recorded_step_keeps_no_sequence_alive_and_goes_with_it() -> None:
    engine = make_engine(graph_of(), "F32")
    assert engine.recorder is not None
    texts = [weakref.ref(cache) for cache in decoding_caches(engine, 3)]
    assert len(engine.recorder._steps) == 3
    gc.collect()
    assert [text() for text in texts] == [None] * 3
    [kept] = decoding_caches(engine, 1)
    assert len(engine.recorder._steps) == 1
    assert kept.length == 2


def decoding_caches(engine: TorchEngine, count: int) -> list[Any]:
    """Caches of so many sequences, each decoded by itself."""
    caches = [engine.new_cache() for _ in range(count)]
    for cache in caches:
        engine.forward([[1]], [cache])
        engine.forward([[2]], [cache])
    return caches


def test_what_an_earlier_text_left_in_a_static_cache_reaches_nobody() -> None:
    graph = graph_of()
    engine, plain = make_engine(graph, "F32"), make_engine(graph, "F32", None)
    cache = engine.new_cache()
    engine.forward([np.full((40, 256), np.nan, np.float32)], [cache])
    cache.truncate(0)
    fresh = plain.new_cache()
    for ids in ([3, 4, 5], [6], [7]):
        assert ulps(engine.forward([ids], [cache])[0], plain.forward([ids], [fresh])[0]) <= 32


def test_a_static_cache_has_all_of_the_context_from_the_start_and_stays_where_it_is() -> None:
    graph = graph_of(positions=50)
    for form, size in (("Q8_0", 2), ("F32", 4)):
        cache = make_engine(graph, form).new_cache()
        assert isinstance(cache, static.StaticCache)
        engine = make_engine(graph, form)
        engine.forward([[1, 2]], [cache])
        places = [half.data_ptr() for layer in cache._stored for half in layer.values()]
        assert cache.nbytes == graph.hp.num_layers * 2 * 50 * graph.hp.head_dim * size
        engine.forward([[3] * 40], [cache])
        assert [half.data_ptr() for layer in cache._stored for half in layer.values()] == places


def test_a_step_without_caches_makes_no_room_for_more() -> None:
    engine = make_engine(graph_of(), "Q8_0")
    made: list[static.StaticCache] = []
    new = engine.new_cache
    engine.new_cache = lambda: made.append(new()) or made[-1]  # type: ignore[method-assign, assignment, func-returns-value, return-value]
    engine.forward([[1, 2, 3]])
    assert made[0].nbytes == 2 * 2 * 3 * engine.graph.hp.head_dim * 2


@pytest.mark.parametrize("form", ["F32", "Q4_K"])
def test_every_value_is_read_and_written_as_on_the_cpu(form: str) -> None:
    graph = graph_of()
    ids = prompts(graph, [12])
    passes = [make_engine(graph, form, ways).begin(ids, None, "all") for ways in (GPU_LIKE, None)]
    half = len(graph.ops) // 2
    for op in graph.ops:
        for one in passes:
            one.run(op.index + 1)
        for edge in op.outputs:
            found, expected = (one.read(edge) for one in passes)
            for a, b in zip(*((x if isinstance(x, list) else [x]) for x in (found, expected)), strict=True):
                assert a.dtype == torch.float32
                assert ulps(a, b) <= 64
            if op.index >= half and op.index % 3 == 0:
                for one, value in zip(passes, (found, expected), strict=True):
                    one.write(edge, [x * 1.5 for x in value] if isinstance(value, list) else value * 1.5)
    assert ulps(*(one.finish() for one in passes)) <= 64


def test_gradients_of_values_are_those_of_the_decoded_weights() -> None:
    graph = graph_of()
    gradients = []
    for ways in (GPU_LIKE, None):
        one = make_engine(graph, "Q6_K", ways).begin(prompts(graph, [6]), None, "all", grad=True)
        one.run(len(graph.ops))
        start = one.finish()
        (found,) = torch.autograd.grad(start.square().sum(), [leaf_of(start)])
        gradients.append(found)
    assert ulps(*gradients) <= 64


def leaf_of(value: torch.Tensor) -> torch.Tensor:
    """The one leaf that asks for a gradient: the embeddings."""
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf: torch.Tensor = node.variable
            return leaf
        todo += [following for following, _ in node.next_functions]
    raise AssertionError("no leaf")


# devices, and memory that runs out


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB."
    )


def test_memory_that_runs_out_while_weights_are_placed_names_the_tensor_and_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = graph_of()
    weights = stored_weights(graph, "Q8_0")
    with monkeypatch.context() as patched:
        patched.setattr("starscope.engine.torch_engine.read_stored", out_of_memory)
        with pytest.raises(DoesNotFitError) as found:
            TorchEngine(graph, weights, ways=GPU_LIKE)
    message = str(found.value)
    size = device_bytes("Q8_0", (61, 256))
    assert f"not enough memory on cpu for embed_tokens.weight, [61 256] in Q8_0 ({size:,} bytes)" in message
    assert "bytes are free there" in message
    assert "Tried to allocate 2.00 GiB." in message
    assert found.value.exit_status == 5
    TorchEngine(graph, weights, ways=GPU_LIKE).forward([[1, 2]])


@pytest.mark.parametrize("decoding", [False, True])
def test_memory_that_runs_out_in_a_step_names_the_value_and_the_engine_goes_on(
    decoding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(graph_of(), "Q8_0")
    cache = engine.new_cache()
    [before] = engine.forward([[1, 2, 3]], [cache])
    ids = [4] if decoding else [4, 5]
    with monkeypatch.context() as patched:
        patched.setitem(torch_kernels.KERNELS, "gelu_tanh", out_of_memory)
        with pytest.raises(DoesNotFitError, match=r"on cpu for layers\.0\.mlp\.mlp_activation;"):
            engine.forward([ids], [cache])
    assert cache.length == 3
    [after] = engine.forward([ids], [cache])
    plain = make_engine(graph_of(), "Q8_0", None)
    own = plain.new_cache()
    assert ulps(before, plain.forward([[1, 2, 3]], [own])[0]) <= 32
    assert ulps(after, plain.forward([ids], [own])[0]) <= 32


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB)",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_whatever_says_that_memory_ran_out_is_understood(said: str) -> None:
    with pytest.raises(DoesNotFitError, match="on cpu for a test"), memory_errors("cpu", "a test"):
        raise RuntimeError(said)


def test_other_errors_of_torch_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_errors("cpu", "a test", 12):
        torch.zeros(3).reshape(2)


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    for name in ("cuda:7", "mps", "xpu", "tpu"):
        if name not in all_devices():
            with pytest.raises(UnsupportedError, match=rf"device '{name}' cannot be used: .* There are: cpu") as found:
                find_device(name)
            assert found.value.exit_status == 4


def test_what_a_device_lacks_is_done_without_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of()
    monkeypatch.setattr("starscope.engine.torch_engine.holds", lambda dtype, device: False)
    engine = make_engine(graph, "BF16")
    assert all(isinstance(weight, torch.Tensor) for weight in engine.weights.values())
    assert engine.notes[0] == "embed_tokens.weight is decoded to float32: cpu has no bfloat16."
    expected = make_engine(graph, "BF16", None).forward([[1, 2, 3]])[0]
    assert ulps(engine.forward([[1, 2, 3]])[0], expected) <= 32


def test_the_ways_of_a_device_follow_from_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways_of(CPU, torch.float32) == Ways()
    mps = ways_of(torch.device("mps"), torch.float32)
    assert mps == Ways(stored=True, static=True)
    assert mps.notes("mps") == ["quantized weights are decoded by torch on mps: Triton, which is faster, is not there."]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    cuda = ways_of(torch.device("cuda:1"), torch.float32)
    assert cuda == Ways(stored=True, triton=True, static=True, recorded=True)
    assert cuda.notes("cuda:1") == []
    assert not ways_of(torch.device("cuda"), torch.float64).stored


def test_free_memory_of_the_cpu_is_some_of_all() -> None:
    found = free_bytes(CPU)
    assert found is None or 0 < found[0] <= found[1]
