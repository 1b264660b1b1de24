"""The ladder of `-ngl N` against the rules it comes from, and what a plan says of bytes, fits and devices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import DoesNotFitError, UsageError
from starscope.formats import find_format
from starscope.graph import Graph
from starscope.machine import bytes_text
from starscope.placement import BATCH, HOST, LOW_VRAM_BATCH, Device, Plan, make_plan, make_schedule, parse_devices
from support.ladder import CONTEXT, GOLDEN, MODELS, formats_of, graph_of, plan_of, table

GIB = 1 << 30


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def graph(model: str) -> Graph:
    return graph_of(model)


def rungs_of(graph: Graph) -> range:
    return range(graph.hp.num_layers + 5)


def test_the_table_is_the_golden_file() -> None:
    assert table() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("low_vram", [False, True])
def test_every_tensor_is_where_the_source_puts_it(model: str, graph: Graph, low_vram: bool) -> None:
    # Of llm_load_tensors: a backend for the embeddings, the norm, the output and each block.
    n_layer = graph.hp.num_layers
    for ngl in rungs_of(graph):
        plan = plan_of(model, ngl, low_vram=low_vram)
        backend_norm = "cuda" if ngl > n_layer and not low_vram else HOST
        backend_output = "cuda" if ngl > n_layer else HOST
        i_gpu_start = n_layer - ngl
        vram_weights = 0
        for slot in graph.family.slots(graph.hp):
            first, *rest = slot.gguf.split(".")
            if first == "blk":
                expected = HOST if int(rest[0]) < i_gpu_start else "cuda"
            else:
                expected = {"output_norm": backend_norm, "output": backend_output}.get(first, HOST)
            assert plan.tensors[slot.name] == expected, (ngl, slot.gguf)
            if expected == "cuda":
                stored = find_format("F32" if slot.always_f32 else "Q4_0")
                vram_weights += math.prod(slot.shape) // stored.block_size * stored.block_bytes
        assert plan.on_gpus.weights == vram_weights


@pytest.mark.parametrize("low_vram", [False, True])
def test_keys_and_values_are_where_the_source_says_it_puts_them(model: str, graph: Graph, low_vram: bool) -> None:
    # kv_cache_init and llama_eval_internal, with what low VRAM is said to do and did not.
    n_layer, hp = graph.hp.num_layers, graph.hp
    half = n_layer * CONTEXT * hp.num_kv_heads * hp.head_dim * 2  # bytes, as float16
    for ngl in rungs_of(graph):
        plan = plan_of(model, ngl, low_vram=low_vram)
        on_gpu = {"v": ngl > n_layer + 1 and not low_vram, "k": ngl > n_layer + 2 and not low_vram}
        for (layer, part), device in plan.caches.items():
            assert device == ("cuda" if on_gpu[part] else HOST), (ngl, layer, part)
        assert plan.on_gpus.kv == half * sum(on_gpu.values())
        assert plan.bytes[HOST].kv == half * (2 - sum(on_gpu.values()))
        for op in graph.ops:
            offload = {"scores": on_gpu["k"], "softmax": on_gpu["k"], "mix": on_gpu["v"]}.get(op.kind)
            if offload is not None:
                assert plan.ops[op.index] == ("cuda" if offload else HOST), (ngl, op)


@pytest.mark.parametrize("low_vram", [False, True])
def test_the_report_has_the_lines_of_the_source(model: str, graph: Graph, low_vram: bool) -> None:
    n_layer = graph.hp.num_layers
    for ngl in rungs_of(graph):
        plan = plan_of(model, ngl, low_vram=low_vram)
        lines = [f"offloading {min(ngl, n_layer)} repeating layers to GPU"]
        if ngl > n_layer:
            lines.append("offloading non-repeating layers to GPU")
        for rung, cache in ((n_layer + 1, "v"), (n_layer + 2, "k")):
            if ngl > rung and low_vram:
                lines.append(f"cannot offload {cache} cache to GPU due to low VRAM option")
            elif ngl > rung:
                lines.append(f"offloading {cache} cache to GPU")
        max_offloadable = n_layer + 1 if low_vram else n_layer + 3
        lines.append(f"offloaded {min(ngl, max_offloadable)}/{n_layer + 3} layers to GPU")
        found = plan.on_gpus
        lines.append(f"total VRAM used: {-(-(found.weights + found.scratch + found.kv) // (1 << 20))} MB")
        assert [line for line in plan.report() if "scratch buffer" not in line] == lines
        document = plan.as_document()
        assert document["max_offloadable"] == max_offloadable
        assert document["offloaded"] == min(ngl, max_offloadable)


def test_keys_and_values_of_starcoder_15b_at_8192_are_168_mb() -> None:
    plan = plan_of("starcoder-15b", 43, low_vram=False)
    assert plan.on_gpus.kv == 167_772_160
    assert round(plan.on_gpus.kv / 1e6) == 168


def test_one_key_head_is_no_reason_for_no_bytes() -> None:
    graph = graph_of("starcoder-15b")
    assert graph.hp.num_kv_heads == 1
    assert plan_of("starcoder-15b", 43, low_vram=False).bytes["cuda"].kv == 40 * 2 * 128 * CONTEXT * 2


def test_bytes_of_keys_and_values_follow_the_context(graph: Graph) -> None:
    formats = formats_of(graph)
    short, long = (
        make_plan(graph, formats, [Device("cuda")], gpu_layers="all", context_length=length) for length in (512, 4096)
    )
    assert long.on_gpus.kv == 8 * short.on_gpus.kv


def test_files_of_float32_keep_keys_and_values_as_float32(graph: Graph) -> None:
    plans = [make_plan(graph, formats_of(graph, kind), [Device("cuda")], gpu_layers="all") for kind in ("F16", "F32")]
    assert plans[1].on_gpus.kv == 2 * plans[0].on_gpus.kv


def test_low_vram_needs_no_more_scratch_than_one_block_and_less_than_without(model: str, graph: Graph) -> None:
    n_layer, hp = graph.hp.num_layers, graph.hp
    for ngl in range(1, n_layer + 5):
        low, plain = (plan_of(model, ngl, low_vram=low_vram) for low_vram in (True, False))
        assert low.on_gpus.scratch < plain.on_gpus.scratch
        # The widest values of a block: what it goes on with, and what is inside its MLP.
        widest = 3 * hp.hidden_size + 3 * hp.intermediate_size + 4
        assert low.on_gpus.scratch <= max(
            4 * LOW_VRAM_BATCH * widest, 4 * (hp.vocab_size + 2 * hp.hidden_size) + (1 << 20)
        )
        assert "not allocating a VRAM scratch buffer due to low VRAM option" in low.report()


def test_a_tied_head_on_the_gpu_is_a_copy_of_the_embeddings_that_stay(model: str, graph: Graph) -> None:
    apart, tied = (plan_of(model, graph.hp.num_layers + 1, low_vram=False, tied=tied) for tied in (False, True))
    assert tied.tensors["lm_head.weight"] == "cuda"
    assert tied.tensors["embed_tokens.weight"] == HOST
    assert tied.on_gpus.weights == apart.on_gpus.weights
    both = plan_of(model, 0, low_vram=False, tied=True)
    assert both.bytes[HOST].weights < plan_of(model, 0, low_vram=False).bytes[HOST].weights  # one for both


def test_formats_that_no_gpu_computes_on_are_there_as_float32(graph: Graph) -> None:
    plain, other = (
        make_plan(graph, formats_of(graph, kind), [Device("cuda")], gpu_layers=1) for kind in ("F32", "Q5_1")
    )
    assert other.on_gpus.weights == plain.on_gpus.weights


def test_without_kv_offload_keys_and_values_stay_and_the_norm_goes(graph: Graph) -> None:
    plan = make_plan(graph, formats_of(graph), [Device("cuda")], gpu_layers="all", kv_offload=False)
    assert set(plan.caches.values()) == {HOST}
    assert plan.rungs.norm
    assert plan.batch == BATCH
    asked = make_plan(graph, formats_of(graph), [Device("cuda")], gpu_layers=99, kv_offload=False)
    assert "cannot offload k cache to GPU due to no KV offload option" in asked.report()


# What fits.


def total(model: str, ngl: int) -> int:
    return plan_of(model, ngl, low_vram=False).on_gpus.total


def fitted(model: str, free: int, **options: object) -> Plan:
    graph = graph_of(model)
    return make_plan(graph, formats_of(graph), [Device("cuda", free)], context_length=CONTEXT, **options)  # type: ignore[arg-type]


def test_auto_takes_what_fits_with_a_margin_and_no_layer_less(model: str, graph: Graph) -> None:
    n_layer = graph.hp.num_layers
    for ngl in (1, 2, n_layer // 2, n_layer, n_layer + 1, n_layer + 3):
        need = total(model, ngl)
        free = max(math.ceil(need / 0.95) + 1, need + (64 << 20))
        plan = fitted(model, free)
        assert plan.rungs.offloaded == ngl
        assert plan.on_gpus.total + plan.devices[0].margin <= free
        assert (plan.shortfall is None) == (ngl == n_layer + 3)
        if ngl == 1:
            assert fitted(model, free - 1).rungs.offloaded == 0


def test_auto_says_what_one_more_layer_would_need(model: str) -> None:
    free = 3 * GIB
    plan = fitted(model, free)
    missing = total(model, plan.rungs.offloaded + 1) + plan.devices[0].margin - free
    assert plan.shortfall is not None
    assert f"one more would need {bytes_text(missing, 2)} more on cuda" in plan.shortfall
    assert fitted(model, math.ceil((free + missing) / 0.95)).rungs.offloaded > plan.rungs.offloaded


def test_auto_never_puts_values_apart_from_keys(model: str, graph: Graph) -> None:
    n_layer = graph.hp.num_layers
    low, high = total(model, n_layer + 1), total(model, n_layer + 3)
    for share in range(1, 12):
        plan = fitted(model, int((low + share * (high - low) / 8) / 0.95))
        assert plan.rungs.offloaded != n_layer + 2


@pytest.mark.parametrize("layers", [20, "all", 99])
def test_layers_that_do_not_fit_are_refused_with_what_would(model: str, layers: int | str) -> None:
    free = total(model, 7) + (total(model, 8) - total(model, 7)) // 2
    with pytest.raises(DoesNotFitError, match=r"7 would fit \(-ngl 7\), or ask for auto") as found:
        fitted(model, free, gpu_layers=layers)
    assert f"{bytes_text(free, 2)} are free" in str(found.value)
    assert fitted(model, free, gpu_layers=7).rungs.offloaded == 7


def test_a_device_too_small_for_one_block_gets_none_of_auto(model: str) -> None:
    plan = fitted(model, 1 << 20)
    assert plan.is_on_host
    assert plan.shortfall is not None
    assert "0 of" in plan.shortfall


# Several devices.


def test_blocks_are_divided_by_share_in_order(graph: Graph) -> None:
    n_layer, devices = graph.hp.num_layers, [Device("cuda"), Device("cuda:1"), Device("cuda:2")]
    plan = make_plan(graph, formats_of(graph), devices, gpu_layers="all", tensor_split=(3, 1))
    found = [plan.tensors[f"layers.{i}.mlp.down_proj.weight"] for i in range(n_layer)]
    assert found == ["cuda"] * (n_layer * 3 // 4) + ["cuda:1"] * (n_layer // 4)
    assert plan.tensors["lm_head.weight"] == "cuda:1"
    assert all(plan.caches[i, part] == found[i] for i in range(n_layer) for part in "kv")
    assert plan.bytes["cuda:2"].total == 0


def test_without_shares_devices_get_blocks_by_their_free_memory(graph: Graph) -> None:
    plan = make_plan(graph, formats_of(graph), [Device("cuda", 30 * GIB), Device("cuda:1", 10 * GIB)], gpu_layers="all")
    counts = [sum(place == name for place in plan.tensors.values()) for name in ("cuda", "cuda:1")]
    assert 2.5 < counts[0] / counts[1] < 3.5


@pytest.mark.parametrize("free", [(0, 24), (24, 0), (0.1, 24), (24, 0.1, 0)], ids=str)
def test_a_gpu_without_room_gets_nothing_of_auto_and_the_others_all(graph: Graph, free: tuple[float, ...]) -> None:
    formats = formats_of(graph)
    most = make_plan(graph, formats, [Device("cuda", 24 * GIB)], context_length=512)
    devices = [Device(f"cuda:{i}", int(one * GIB)) for i, one in enumerate(free)]
    plan = make_plan(graph, formats, devices, context_length=512)
    assert plan.rungs.offloaded == most.rungs.offloaded > 0
    assert {name for name, one in plan.bytes.items() if one.total} == {"cpu", f"cuda:{free.index(24)}"}


@pytest.mark.parametrize("split", [(1e308, 1e308), (5e-324, 5e-324)], ids=str)
def test_shares_are_divided_whatever_their_size(graph: Graph, split: tuple[float, float]) -> None:
    plan = make_plan(graph, formats_of(graph), [Device("cuda"), Device("cuda:1")], gpu_layers="all", tensor_split=split)
    places = [plan.tensors[f"layers.{i}.mlp.down_proj.weight"] for i in range(graph.hp.num_layers)]
    assert places == sorted(places)
    assert places.count("cuda") == len(places) // 2


def test_the_main_gpu_has_the_norm_and_the_head(graph: Graph) -> None:
    devices = [Device("cuda"), Device("cuda:1")]
    for main in (0, 1):
        plan = make_plan(graph, formats_of(graph), devices, gpu_layers="all", main_gpu=main)
        assert plan.tensors["lm_head.weight"] == plan.tensors["norm.weight"] == devices[main].name


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_layers": -1},
        {"gpu_layers": True},
        {"gpu_layers": "most"},
        {"gpu_layers": 1.5},
        {"main_gpu": 1},
        {"main_gpu": -1},
        {"tensor_split": (1, 1)},
        {"tensor_split": (0,)},
        {"tensor_split": (-1,)},
        {"tensor_split": (math.nan,)},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    graph = graph_of("llama-7b")
    with pytest.raises(UsageError):
        make_plan(graph, formats_of(graph), [Device("cuda")], **options)  # type: ignore[arg-type]


def test_without_devices_everything_is_on_the_host(graph: Graph) -> None:
    plan = make_plan(graph, formats_of(graph), [])
    assert plan.is_on_host
    assert plan.on_gpus.total == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda:24GiB", [Device("cuda", 24 * GIB)]),
        ("cuda:0:8GB,cuda:1:512MiB", [Device("cuda:0", 8 * 10**9), Device("cuda:1", 512 << 20)]),
        ("MPS:16gib", [Device("mps", 16 * GIB)]),
        ("cuda:1.5gb", [Device("cuda", 1_500_000_000)]),
        ("cuda", [Device("cuda", None)]),
        ("cuda:1", [Device("cuda:1", None)]),
    ],
)
def test_devices_are_read_as_they_are_written(text: str, expected: list[Device]) -> None:
    assert parse_devices(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cuda:",
        "cuda:x",
        "cuda:24",
        "cuda:24GiB:1",
        "cuda,cuda:0",
        "cpu:1GiB",
        "cuda:-1GB",
        "24GiB",
        "cuda:9999999TiB",
        f"cuda:{'9' * 400}GB",
    ],
)
def test_other_texts_are_no_devices(text: str) -> None:
    if text == "cuda:24":  # the twenty-fifth one
        assert parse_devices(text) == [Device("cuda:24", None)]
        return
    with pytest.raises(UsageError):
        parse_devices(text)


# In which order things run.


@given(st.sampled_from(list(MODELS)), st.integers(0, 50), st.booleans(), st.integers(0, 3))
def test_a_schedule_runs_each_operation_once_behind_what_it_needs(model: str, ngl: int, low: bool, begin: int) -> None:
    graph = graph_of(model)
    plan = plan_of(model, ngl % (graph.hp.num_layers + 5), low_vram=low)
    segments = make_schedule(graph, plan.ops, begin)
    assert sorted(op for segment in segments for op in segment.ops) == list(range(begin, len(graph.ops)))
    made = ((plan.ops[op.index], edge) for op in graph.ops[:begin] for edge in op.outputs)
    there = {(place, edge) for place, edge in made if graph.last_use(edge) >= begin}
    for segment in segments:
        for edge, home in segment.enter:
            assert (home, edge) in there, "it moves from where it is"
            there.add((segment.place, edge))
        for number in segment.ops:
            op = graph.ops[number]
            assert plan.ops[number] == segment.place
            assert all((segment.place, e) in there for e in op.inputs if graph.producers[e] is not None)
            there.update((segment.place, edge) for edge in op.outputs)
        assert not {(segment.place, edge) for edge in segment.keep} & set(segment.drop)
        there -= set(segment.drop)
    assert {edge for _, edge in there} == {graph.names["logits"]}


@pytest.mark.parametrize("model", list(MODELS))
def test_a_block_on_the_gpu_with_its_cache_on_the_host_waits_twice_for_it(model: str) -> None:
    graph = graph_of(model)
    n_layer = graph.hp.num_layers
    for ngl, low_vram, expected in ((0, False, 1), (n_layer, False, 2 * n_layer + 3), (n_layer + 3, False, 2)):
        segments = make_schedule(graph, plan_of(model, ngl, low_vram=low_vram).ops)
        assert len(segments) == expected
    moved = [
        edge
        for segment in make_schedule(graph, plan_of(model, n_layer, low_vram=True).ops)
        for edge, _ in segment.enter
    ]
    assert len(moved) == len(set(moved)), "nothing moves twice"
