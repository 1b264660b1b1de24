"""GPT-BigCode against every check of the suite, and what is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from families.suite import FamilySuite, prompt, reference
from starscope.convert import convert
from starscope.errors import CheckpointError, UnsupportedError
from starscope.families import gpt_bigcode
from starscope.family import read_config
from support.checkpoints import PAIRWISE, edit_config, make_checkpoint
from support.numbers import ulps

FAMILY = gpt_bigcode.FAMILY


class TestGPTBigCode(FamilySuite):
    family = "gpt_bigcode"
    settings = PAIRWISE

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        return make_checkpoint(folder, **setting.options())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bigcode")
    make_checkpoint(made, activation="gelu")
    return made


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(("activation", "other"), [("gelu", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh", "gelu")])
@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_the_other_gelu_would_be_seen(tmp_path: Path, activation: str, other: str, engine: str) -> None:
    oracle = make_checkpoint(tmp_path / "right", activation=activation)
    path = convert(tmp_path / "right", to="f32").out
    ids = prompt(320, 50)
    expected = reference(oracle, ids)
    assert ulps(starscope.load(path, engine=engine).forward(ids)[0], expected) <= 32
    edit_config(tmp_path / "right", activation_function=other)
    wrong = convert(tmp_path / "right", tmp_path / "wrong.gguf", to="f32").out
    assert ulps(starscope.load(wrong, engine=engine).forward(ids)[0], expected) > 10 * 32


def test_a_qkv_projection_read_without_regrouping_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_checkpoint(tmp_path / "mha", multi_query=False)
    ids = prompt(320, 50)
    expected = reference(oracle, ids)
    right = convert(tmp_path / "mha", tmp_path / "right.gguf", to="f32").out
    assert ulps(starscope.load(right).forward(ids)[0], expected) <= 32
    monkeypatch.setattr(gpt_bigcode, "_qkv_rows", lambda hp: None)
    wrong = convert(tmp_path / "mha", tmp_path / "wrong.gguf", to="f32").out
    assert ulps(starscope.load(wrong).forward(ids)[0], expected) > 1000 * 32


def test_expanded_key_heads_are_folded_back_into_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "mqa")
    for to in ("f32", "f16", "q8_0"):
        plain = starscope.load(convert(tmp_path / "mqa", tmp_path / f"plain-{to}.gguf", to=to).out)
        expanded = starscope.load(
            convert(tmp_path / "mqa", tmp_path / f"expanded-{to}.gguf", to=to, expand_mqa=True).out
        )
        assert expanded.num_kv_heads == 1
        assert any("copies of the first" in note for note in expanded.notes)
        ids = prompt(320, 20)
        np.testing.assert_array_equal(expanded.forward(ids), plain.forward(ids))
        assert expanded.context_length == plain.context_length


def test_key_heads_that_differ_are_not_folded(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "mha", multi_query=False)
    model = starscope.load(convert(tmp_path / "mha", to="f32").out)
    assert model.num_kv_heads == 4
    ids = prompt(320, 20)
    assert ulps(model.forward(ids)[0], reference(oracle, ids)) <= 32


def test_an_unknown_config_key_is_an_error_that_names_it(folder: Path) -> None:
    config = {**config_of(folder), "rope_theta": 10000.0}
    with pytest.raises(UnsupportedError, match=r"rope_theta = 10000\.0.*--allow-key"):
        read_config(FAMILY, config)
    assert read_config(FAMILY, config, allow_unknown=["rope_theta"]).num_layers == 2


@pytest.mark.parametrize("key", sorted(FAMILY.refused))
def test_a_config_that_says_another_architecture_is_refused(folder: Path, key: str) -> None:
    value = {"scale_attn_weights": False, "quantization_config": {"bits": 4}}.get(key, True)
    with pytest.raises(UnsupportedError, match=key):
        read_config(FAMILY, {**config_of(folder), key: value})


@pytest.mark.parametrize("key", ["n_positions", "n_embd", "n_layer", "n_head"])
def test_a_missing_config_key_is_named(folder: Path, key: str) -> None:
    config = config_of(folder)
    del config[key]
    with pytest.raises(CheckpointError, match=key):
        read_config(FAMILY, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 7},
        {"n_layer": 0},
        {"n_embd": -64},
        {"n_embd": "64"},
        {"n_layer": 2.5},
        {"n_layer": True},
        {"layer_norm_epsilon": 0},
        {"layer_norm_epsilon": 1e-300},
        {"layer_norm_epsilon": float("nan")},
        {"n_head_kv": 2},
        {"num_key_value_heads": 4},
        {"multi_query": False},
        {"n_layer": 10**6},
        {"n_inner": "wide"},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read_config(FAMILY, {**config_of(folder), **changes})


def test_an_unknown_activation_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"relu.*gelu_pytorch_tanh"):
        read_config(FAMILY, {**config_of(folder), "activation_function": "relu"})


def test_n_inner_null_is_four_times_the_width(folder: Path) -> None:
    assert read_config(FAMILY, {**config_of(folder), "n_inner": None}).intermediate_size == 256
    assert read_config(FAMILY, {**config_of(folder), "n_inner": 100}).intermediate_size == 100
