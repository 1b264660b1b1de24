"""The recorded list and what is read off it."""

from __future__ import annotations

import pytest

from starscope.families.gpt_bigcode import FAMILY
from starscope.family import make_hparams
from starscope.graph import Recorder, record
from starscope.ops import OPS, ShapeError
from starscope.values import BESIDE_THE_GRAPH, VALUES

SIZES = {
    "context_length": 32,
    "hidden_size": 12,
    "num_layers": 2,
    "intermediate_size": 20,
    "num_heads": 3,
    "num_kv_heads": 1,
    "norm_epsilon": 1e-5,
    "activation": "gelu",
    "vocab_size": 50,
}
HP = make_hparams(FAMILY, SIZES)


def test_every_edge_is_made_before_it_is_read() -> None:
    graph = record(FAMILY, HP)
    made = set(graph.inputs.values())
    for op in graph.ops:
        assert set(op.inputs) <= made
        made |= set(op.outputs)
    assert made == set(range(len(graph.edges)))


def test_every_standard_value_names_an_edge_of_every_block() -> None:
    graph = record(FAMILY, HP)
    expected = {
        name if v.host == "model" else f"{v.host.format(i=i)}.{name}"
        for name, v in VALUES.items()
        if name not in BESIDE_THE_GRAPH
        for i in range(HP.num_layers)
    }
    assert set(graph.names) == expected


def test_every_engine_implements_every_op_and_no_other() -> None:
    from starscope.engine import numpy_engine, torch_engine

    assert set(numpy_engine.KERNELS) == set(torch_engine.KERNELS) == set(OPS)


def test_sizes_are_known_before_anything_is_allocated() -> None:
    graph = record(FAMILY, HP)
    sizes = {"rows": 5, "wanted": 1, "query": 5, "key": 9}
    each = graph.bytes(sizes)
    assert each[graph.edge("logits").index] == 4 * 1 * 50
    assert each[graph.edge("layers.1.self_attn.attention_scores").index] == 4 * 3 * 5 * 9
    assert each[graph.edge("layers.0.mlp.mlp_activation").index] == 4 * 5 * 20
    assert max(each) <= graph.peak_bytes(sizes) < sum(each)


def test_a_name_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(KeyError, match=r"layers\.0\.layer_output"):
        record(FAMILY, HP).edge("layers.0.layer_outputs")


def test_an_op_over_shapes_that_do_not_fit_is_refused_while_recording() -> None:
    g = Recorder(FAMILY, HP)
    x = g.embed("input_ids", "embed_tokens")
    with pytest.raises(ShapeError, match="linear"):
        g.linear(g.linear(x, "lm_head"), "lm_head")
    with pytest.raises(ShapeError, match="one shape"):
        g.add(x, g.linear(x, "lm_head"))


def test_a_family_that_never_uses_a_tensor_it_declares_is_refused() -> None:
    g = Recorder(FAMILY, HP)
    g.embed("input_ids", "embed_tokens")
    with pytest.raises(ShapeError, match="never uses"):
        g.finish()


def test_a_value_that_is_not_standard_or_named_twice_is_refused() -> None:
    g = Recorder(FAMILY, HP)
    x = g.value("token_embeddings", g.embed("input_ids", "embed_tokens"))
    with pytest.raises(ShapeError, match="not a standard value"):
        g.value("my_value", x)
    with pytest.raises(ShapeError, match="named twice"):
        g.value("token_embeddings", x)
