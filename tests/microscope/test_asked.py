"""What names, patterns and functions stand for."""

from __future__ import annotations

import pytest
import torch

import starscope
from starscope.errors import TraceError
from starscope.microscope.asked import choose
from starscope.microscope.names import Names


@pytest.fixture(scope="module")
def model() -> starscope.Model:
    return starscope.load("demo", engine="numpy")


@pytest.fixture(scope="module")
def names(model: starscope.Model) -> Names:
    return model.scope.names


def chosen(names: Names, asked: object) -> list[str]:
    return [reading.name for reading, _ in choose(names, asked)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.*.layer_output", [f"layers.{i}.layer_output" for i in range(6)]),
        ("layers[*].layer_output", [f"layers.{i}.layer_output" for i in range(6)]),
        ("model.layers[*].layer_output", [f"layers.{i}.layer_output" for i in range(6)]),
        ("layers.[1-3].layer_mid", [f"layers.{i}.layer_mid" for i in (1, 2, 3)]),
        ("layers.?.self_attn.attention_keys", [f"layers.{i}.self_attn.attention_keys" for i in range(6)]),
        ("blocks.*.attn.hook_pattern", [f"layers.{i}.self_attn.attention_probabilities" for i in range(6)]),
        ("blocks[*].hook_resid_mid", [f"layers.{i}.layer_mid" for i in range(6)]),
        ("transformer.h.*.attn.c_attn.output", [f"layers.{i}.self_attn.qkv_proj.output" for i in range(6)]),
        ("layers.*.self_attn.c_attn.output", [f"layers.{i}.self_attn.qkv_proj.output" for i in range(6)]),
        ("blk.*.attn_qkv.output", [f"layers.{i}.self_attn.qkv_proj.output" for i in range(6)]),
        ("layers.*.mlp.down_proj.input", [f"layers.{i}.mlp.down_proj.input" for i in range(6)]),
        ("layers[2].layer_mid", ["layers.2.layer_mid"]),
        ("logits", ["logits"]),
        (["logits", "layers.0.layer_mid", "logits"], ["logits", "layers.0.layer_mid"]),
    ],
    ids=str,
)
def test_a_pattern_finds_standard_names_then_hooks_then_ends_of_parts(
    names: Names, pattern: object, found: list[str]
) -> None:
    assert chosen(names, pattern) == found


def test_nothing_in_particular_is_every_standard_value(names: Names) -> None:
    assert set(chosen(names, None)) == {*names.graph.names, "attention_mask", "next_token_probs"}


def test_a_function_is_asked_for_standard_names_then_for_hooks(names: Names) -> None:
    assert chosen(names, lambda name: name.endswith("layer_mid")) == [f"layers.{i}.layer_mid" for i in range(6)]
    assert chosen(names, lambda name: "hook_resid_post" in name) == [f"layers.{i}.layer_output" for i in range(6)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("layers.*.layer_outptu", "no value fits 'layers.*.layer_outptu'"),
        ("layers.0.layer_outptu", "no value is called 'layers.0.layer_outptu'. Near: layers.0.layer_output"),
        (["logits", "layers.9.layer_output"], "This model has layers 0 to 5"),
        (lambda _: False, "no value fits the function that was given"),
        ([], "no value was asked for"),
    ],
    ids=["pattern", "name", "layer", "function", "empty"],
)
def test_what_fits_nothing_is_an_error_with_the_nearest_names(names: Names, asked: object, said: str) -> None:
    with pytest.raises(TraceError) as error:
        chosen(names, asked)
    assert said in str(error.value)


def test_a_path_may_be_put_together_from_standard_and_native_names(names: Names) -> None:
    for path in ("layers.1.self_attn.c_attn", "layers.1.attn.c_attn", "blk.1.attn_qkv", "layers.1.attn_qkv"):
        assert names.part(path) == "layers.1.self_attn.qkv_proj"
    assert names.part("layers.1.self_attn.nothing") is None
    assert names.part("c_attn") is None


def test_what_the_head_reads_is_of_all_rows_and_can_be_changed(model: starscope.Model) -> None:
    with model.trace("def add(a, b):"):
        read = model.lm_head.input
        same = model.final_norm_output
        logits = model.logits
    assert torch.equal(read, same)
    with model.trace("def add(a, b):"):
        model.lm_head.input[:, -1] *= 2
        assert not torch.equal(model.logits, logits)
