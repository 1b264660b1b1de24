"""`print(model)`: the tree of parts and values, against the printout of the page for SantaCoder's shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import starscope
from starscope.family import Family, HParams, all_families, read_config
from starscope.graph import Graph, record
from starscope.microscope.names import Names
from starscope.microscope.printout import ORDER, print_part
from starscope.values import ATTENTION, MODEL, VALUES

GOLDEN = Path(__file__).parent.parent / "data" / "microscope" / "santacoder.txt"
SANTACODER = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "activation_function": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "n_embd": 2048,
    "n_head": 16,
    "n_inner": 8192,
    "n_layer": 24,
    "n_positions": 2048,
    "vocab_size": 49280,
}


def recorded(**changes: object) -> Graph:
    """The graph of a shape; no weights."""
    family: Family = all_families()["gpt_bigcode"]
    hp: HParams = read_config(family, {**SANTACODER, **changes})
    return record(family, hp)


@pytest.fixture(scope="module")
def model() -> starscope.Model:
    return starscope.load("demo", engine="numpy")


def test_the_printout_is_that_of_the_page() -> None:
    assert print_part(Names(recorded()), "") + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_the_epsilon_of_a_file_is_printed_as_the_config_has_it(model: starscope.Model) -> None:
    assert model.hparams.norm_epsilon != 1e-5  # the nearest float32
    assert "eps=1e-05, elementwise_affine=True, bias=True" in str(model.norm)


def test_the_exact_gelu_and_as_many_key_heads_are_seen() -> None:
    printed = print_part(Names(recorded(activation_function="gelu", multi_query=False)), "")
    assert "(act_fn/act): GELUActivation()" in printed
    assert "(c_attn): Linear(in_features=2048, out_features=6144, bias=True)" in printed


def test_one_block_is_printed_with_its_number() -> None:
    printed = print_part(Names(recorded(n_layer=1)), "layers")
    assert printed.splitlines()[:2] == ["ModuleList(", "  (0): GPTBigCodeBlock("]


def test_str_of_the_model_and_repr_of_every_part_are_the_tree_from_there(model: starscope.Model) -> None:
    whole = str(model)
    assert whole.startswith("GPTBigCodeForCausalLM(\n  (lm_head): Linear(")
    for part in (model.layers, model.layers[3].self_attn, model.layers[0].mlp, model.norm, model.lm_head):
        first, *rest = repr(part).splitlines()
        assert first in whole
        assert all(line.strip() in whole for line in rest)
    assert repr(model.layers[2]) == repr(model.layers[4])
    assert repr(model.layers[0].mlp.act_fn) == "GELUTanh()"
    assert repr(model).startswith("<starscope.Model demo.gguf: ")


def test_every_standard_value_but_learned_positions_is_printed(model: starscope.Model) -> None:
    printed = set(re.findall(r"\((\w+)\) ->", str(model)))
    assert printed == VALUES.keys() - {"position_embeddings"}
    for host in (MODEL, ATTENTION):
        named = {name for name, value in VALUES.items() if value.host == host}
        assert set(ORDER[host]) == named - {"position_embeddings"}
