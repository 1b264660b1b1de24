"""The contract of an engine, on a model made in memory: what it refuses, what it leaves unchanged, and its ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starscope.engine import ENGINES, Engine, Weights, make_engine, numpy_engine, torch_kernels
from starscope.engine.numpy_engine import NumpyEngine, erf
from starscope.engine.torch_engine import Group, Step, TorchEngine, memory_errors
from starscope.engine.weights import ArraySource
from starscope.errors import ContextOverflowError, DoesNotFitError, InvalidContentError, UnsupportedError, UsageError
from starscope.families.gpt_bigcode import FAMILY
from starscope.family import make_hparams
from starscope.graph import record
from support.numbers import ulps
from support.stored import make_graph, stored_weights

HP = make_hparams(
    FAMILY,
    {
        "context_length": 40,
        "hidden_size": 24,
        "num_layers": 2,
        "intermediate_size": 36,
        "num_heads": 3,
        "num_kv_heads": 1,
        "norm_epsilon": 1e-5,
        "activation": "gelu",
        "vocab_size": 60,
    },
)
GRAPH = record(FAMILY, HP)


def weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    slots = FAMILY.slots(HP)
    arrays = {
        s.name: rng.normal(0, 0.3, s.shape).astype(np.float32) + ("norm" in s.name and s.name.endswith("weight"))
        for s in slots
        if s.tied_to is None
    }
    return Weights(slots, ArraySource({k: v.astype(np.float32) for k, v in arrays.items()}))


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param, GRAPH, weights())


@pytest.mark.parametrize(
    ("sequences", "match"),
    [
        ([], "no sequence"),
        ([[]], "no token"),
        ([[1], []], "no token"),
        ([[60]], "60 is out of range; expected 0 to 59"),
        ([[3, -1]], "-1 is out of range"),
        ([[2**40]], "out of range"),
        ([[0.5, 1.5]], "expected a list of token ids"),
        ([np.zeros((3, 23), np.float32)], r"expected float \[n 24\]"),
        ([np.zeros((3, 24), np.int64)], r"expected float"),
        ([np.zeros((1, 3, 24), np.float32)], r"expected"),
    ],
)
def test_input_that_cannot_be_run_is_refused_in_words(engine: Engine, sequences: Any, match: str) -> None:
    with pytest.raises(InvalidContentError, match=match):
        engine.forward(sequences)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "form"),
    # Keys and values that are cached as float16 would make more of a rounding of the NumPy and torch engines.
    [("native", "F32"), ("native", "F16"), ("native", "Q8_0"), ("numpy", "F32"), ("torch", "F32")],
)
def test_a_token_changes_nothing_before_it_whatever_its_numbers(name: str, form: str, number: float) -> None:
    graph = make_graph(multi_query=form != "F16")
    made = make_engine(name, graph, stored_weights(graph, form))
    clean = np.random.default_rng(5).normal(size=(150, graph.hp.hidden_size)).astype(np.float32)
    [expected] = made.forward([clean], wanted="all")
    allowed = 0 if name == "native" else 32
    for place in (1, 6, 129, 149):
        rows = clean.copy()
        rows[place:, ::3] = number
        found, beside = made.forward([rows, clean[:20]], wanted="all")
        assert ulps(found[:place], expected[:place]) <= allowed
        assert ulps(beside, expected[:20]) <= allowed
        assert not np.isfinite(found[place:]).any()
        cache = made.new_cache()
        cut = [made.forward([rows[i : i + 70]], [cache], "all")[0] for i in (0, 70, 140)]
        assert ulps(np.concatenate(cut)[:place], expected[:place]) <= allowed


def test_values_between_the_ops_of_attention_too_depend_on_what_is_before_them_alone() -> None:
    rng = np.random.default_rng(6)
    p = np.tril(rng.random((3, 4, 6)), 2).astype(np.float32)
    v = rng.random((1, 6, 8)).astype(np.float32)
    op = next(op for op in GRAPH.ops if op.kind == "mix")
    kernels: list[Any] = [
        lambda p, v: numpy_engine.mix(None, None, op, [[p], [v]]),  # type: ignore[arg-type]
        lambda p, v: torch_kernels.mix({}, None, op, [[torch.tensor(p)[None]], [torch.tensor(v)[None]]]).numpy(),  # type: ignore[arg-type]
    ]
    for mix in kernels:
        expected = mix(p, v)
        later = v.copy()
        later[:, 4:] = np.nan
        assert ulps(mix(p, later)[:2], expected[:2]) <= 2
        assert np.isnan(mix(p, later)[2:]).all()
        written = p.copy()
        written[:, 0, 5] = 0.5  # a probability that somebody wrote where no query looks by itself
        assert np.isnan(mix(written, later)[0]).all()
        assert ulps(mix(written, v), np.einsum("hqk,kd->qhd", written, v[0])) <= 2


def test_past_the_last_position_is_an_error_and_the_cache_is_unchanged(engine: Engine) -> None:
    cache = engine.new_cache()
    engine.forward([[1] * 38], [cache])
    with pytest.raises(ContextOverflowError, match="41 tokens do not fit: the context is 40"):
        engine.forward([[1] * 3], [cache])
    assert cache.length == 38
    engine.forward([[1] * 2], [cache])
    assert cache.length == 40


def test_an_id_out_of_range_leaves_every_cache_unchanged(engine: Engine) -> None:
    caches = [engine.new_cache(), engine.new_cache()]
    with pytest.raises(InvalidContentError):
        engine.forward([[1, 2], [3, 60]], caches)
    assert [cache.length for cache in caches] == [0, 0]


def test_one_cache_for_two_sequences_is_refused(engine: Engine) -> None:
    cache = engine.new_cache()
    with pytest.raises(InvalidContentError, match="one each"):
        engine.forward([[1], [2]], [cache, cache])
    with pytest.raises(InvalidContentError, match="1 caches for 2"):
        engine.forward([[1], [2]], [cache])


def test_a_shorter_context_is_honoured_and_a_longer_one_refused() -> None:
    engine = make_engine("numpy", GRAPH, weights(), context_length=5)
    with pytest.raises(ContextOverflowError, match="the context is 5"):
        engine.forward([[1] * 6])
    with pytest.raises(ContextOverflowError, match="1 to 40"):
        make_engine("numpy", GRAPH, weights(), context_length=41)


def test_the_choice_of_engine_and_device_is_checked() -> None:
    with pytest.raises(UsageError, match="numpy, torch"):
        make_engine("fast", GRAPH, weights())
    with pytest.raises(UsageError, match="needs the torch engine"):
        make_engine("numpy", GRAPH, weights(), device="cuda")
    with pytest.raises(UnsupportedError, match="There are: cpu"):
        make_engine("torch", GRAPH, weights(), device="no-such-device")
    with pytest.raises(UsageError, match="threads"):
        make_engine("numpy", GRAPH, weights(), threads=0)
    assert make_engine("auto", GRAPH, weights()).name == "native"


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 10**20},
        {"threads": 1.5},
        {"context_length": 1.5},
        {"context_length": True},
        {"device": None},
        {"device": ""},
    ],
    ids=str,
)
def test_options_that_are_no_counts_or_names_are_refused(options: Any) -> None:
    with pytest.raises(UsageError):
        make_engine("numpy", GRAPH, weights(), **options)


def test_an_engine_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    for options in ({"engine": "torch"}, {"engine": "auto", "device": "cuda"}):
        with pytest.raises(UnsupportedError, match="needs torch, which is not installed"):
            make_engine(options.pop("engine"), GRAPH, weights(), **options)


def test_a_device_without_storage_cannot_be_used() -> None:
    with pytest.raises(UnsupportedError, match="'meta' cannot be used"):
        make_engine("torch", GRAPH, weights(), device="meta")


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_weights_that_are_not_finite_give_logits_and_no_warning(value: float) -> None:
    w = weights()
    w["layers.0.input_layernorm.weight"][3] = value
    w["embed_tokens.weight"][5] = value
    [logits] = NumpyEngine(GRAPH, w).forward([[5, 3]])
    assert not np.isfinite(logits).all()


@given(st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=4))
def test_the_engines_agree_on_any_ragged_batch(prompts: list[list[int]]) -> None:
    numpy, torch_ = (make_engine(name, GRAPH, weights()).forward(prompts, None, "all") for name in ("numpy", "torch"))
    for a, b in zip(numpy, torch_, strict=True):
        assert a.dtype == b.dtype == np.float32
        assert ulps(a, b) <= 32


def test_the_fused_attention_equals_its_three_ops() -> None:
    engine = TorchEngine(GRAPH, weights())
    assert len(engine.fusions) == HP.num_layers
    ids = torch.randint(0, 60, (3, 17), generator=torch.Generator().manual_seed(0))
    logits, edges = [], [GRAPH.edge(f"layers.{i}.self_attn.attention_scores").index for i in range(2)]
    for keep in ((), edges):
        values: dict[int, Any] = {
            GRAPH.inputs["input_ids"]: ids.flatten(),
            GRAPH.inputs["positions"]: torch.arange(17).repeat(3),
        }
        engine.run(Step([Group(3, 17, 0, None)], None), values, 0, len(GRAPH.ops), keep=keep)
        assert all((edge in values) == (edge in keep) for edge in edges)
        logits.append(values[GRAPH.names["logits"]])
    assert ulps(logits[0], logits[1]) <= 32


def test_training_logits_equal_the_inference_logits_and_every_weight_gets_a_gradient() -> None:
    engine = TorchEngine(GRAPH, weights())
    ids = torch.randint(0, 60, (4, 11), generator=torch.Generator().manual_seed(1))
    for parameter in engine.parameters.values():
        parameter.requires_grad_()
    logits = engine.logits(ids)
    assert ulps(logits.detach(), np.stack(engine.forward(ids.tolist(), None, "all"))) <= 32
    logits.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in engine.parameters.values())


def test_nothing_but_the_logits_outlives_a_run() -> None:
    engine = NumpyEngine(GRAPH, weights())
    from starscope.engine.base import input_values, make_batch

    batch = make_batch(engine, [[1, 2, 3]], None, "last")
    values, start = input_values(GRAPH, batch)
    engine.run(batch, values, start, len(GRAPH.ops))
    assert set(values) == {GRAPH.names["logits"]}


def test_memory_that_runs_out_in_torch_is_an_error_of_ours() -> None:
    with pytest.raises(DoesNotFitError, match="not enough memory on cpu"), memory_errors("cpu"):
        torch.empty(10**15)
    with pytest.raises(RuntimeError, match="shape"), memory_errors("cpu"):
        torch.zeros(3).reshape(2)


def test_preparing_decodes_every_matrix_once() -> None:
    w = weights()
    engine = NumpyEngine(GRAPH, w)
    engine.prepare()
    decoded = w["layers.0.mlp.up_proj.weight"]
    engine.prepare()
    assert w["layers.0.mlp.up_proj.weight"] is decoded


def test_a_table_read_by_rows_is_the_table_decoded_whole() -> None:
    w = weights()
    rows = w.rows("embed_tokens.weight", np.array([5, 0, 5]))
    np.testing.assert_array_equal(rows, w["embed_tokens.weight"][[5, 0, 5]])
    assert w["lm_head.weight"] is w["embed_tokens.weight"]
    assert w.is_tied("lm_head.weight")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30))
def test_erf_is_right_to_half_an_ulp_of_one(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    expected = np.array([math.erf(float(v)) for v in x])
    assert np.abs(erf(x) - expected).max() <= 2.0**-24
    assert np.abs(erf(x.astype(np.float64)) - expected).max() <= 1e-10


def test_erf_of_infinity_and_nan() -> None:
    np.testing.assert_array_equal(erf(np.array([np.inf, -np.inf], np.float32)), [1, -1])
    assert np.isnan(erf(np.array([np.nan], np.float32)))[0]
