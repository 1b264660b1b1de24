"""Adapters of the peft library compute here what they compute there, on every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import starscope
from starscope.errors import CheckpointError
from starscope.lora import read_adapter
from support.adapters import halves, logits_of, make_adapter, write_folder

IDS = [1, 5, 9, 30, 77, 200, 31, 4]
ULP = 2.0**-23
ENGINES = ("numpy", "torch", "native")

FORMS: Mapping[str, dict[str, Any]] = {
    "all-linear": {"targets": "all-linear"},
    "attention": {"targets": ["c_attn"], "r": 3},
    "rslora": {"targets": ["c_attn", "c_proj"], "r": 6, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "targets": ["c_attn", "c_proj", "c_fc"],
        "rank_pattern": {"mlp.c_fc": 5, r"h\.1\.attn\.c_proj": 1},
        "alpha_pattern": {r"h\.\d+\.attn\.c_attn": 9, "^transformer.h.0.mlp.c_fc": 2},
    },
    "embedding and head": {"targets": ["wte", "lm_head", "c_fc"]},
    "positions": {"targets": ["wpe", "c_attn"]},
    "one layer": {"targets": ["c_fc"], "layers_to_transform": [1], "layers_pattern": "h"},
    "biases": {"targets": ["c_attn", "c_fc"], "bias": "lora_only"},
    "all biases": {"targets": ["c_attn"], "bias": "all"},
    "a saved module": {"targets": ["c_attn"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module", params=[(base, form) for base in ("checkpoint", "multi_head") for form in FORMS])
def adapted(request, tmp_path_factory):
    """A checkpoint, an adapter to it, and the logits that peft computes with both."""
    base, form = request.param
    folder, adapter = request.getfixturevalue(base), tmp_path_factory.mktemp("adapter")
    return folder, adapter, logits_of(make_adapter(folder, adapter, **FORMS[form]), IDS)


def assert_same(found: np.ndarray, wanted: np.ndarray, ulp: float = 32) -> None:
    assert np.abs(found - wanted).max() <= ulp * ULP * np.abs(wanted).max()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapted_model_computes_what_peft_does(adapted, engine):
    folder, adapter, wanted = adapted
    model = starscope.load(folder, engine=engine, lora=adapter)
    [found] = model.engine.forward([IDS], None, "all")
    assert_same(found, wanted)
    [plain] = starscope.load(folder, engine=engine).engine.forward([IDS], None, "all")
    assert np.abs(plain - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_a_torch_file_is_read_like_a_safetensors_one(checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "adapter"
    wanted = logits_of(make_adapter(checkpoint, folder, targets=["c_attn"]), IDS)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    assert_same(starscope.load(checkpoint, lora=folder).engine.forward([IDS], None, "all")[0], wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_may_be_stored_in_sixteen_bits(checkpoint, dtype, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    make_adapter(checkpoint, folder, targets=["c_attn"])
    path = folder / "adapter_model.safetensors"
    low = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
    save_file(low, path)
    model = starscope.load(checkpoint, engine="numpy")
    pair = read_adapter(folder, model.family, model.hparams).pairs["layers.0.self_attn.qkv_proj.weight"]
    a = low["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"].float().numpy()
    assert np.array_equal(pair.a, a)


def test_a_path_to_the_weights_or_the_config_is_the_folder(checkpoint, tmp_path):
    make_adapter(checkpoint, tmp_path, targets=["c_attn"])
    model = starscope.load(checkpoint, engine="numpy")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert read_adapter(tmp_path / name, model.family, model.hparams).pairs


@pytest.mark.parametrize("flag", [True, False])
def test_fan_in_fan_out_changes_nothing_of_the_halves(checkpoint, flag, tmp_path):
    pair = halves((96, 64), 2)
    config = {"r": 2, "lora_alpha": 2, "fan_in_fan_out": flag}
    write_folder(tmp_path, config, {"transformer.h.0.attn.c_attn": pair})
    model = starscope.load(checkpoint, engine="numpy")
    found = read_adapter(tmp_path, model.family, model.hparams).pairs["layers.0.self_attn.qkv_proj.weight"]
    assert np.array_equal(found.b, pair[1])


def test_a_whole_module_with_a_scale_lies_between_the_base_and_itself(checkpoint, tmp_path):
    make_adapter(checkpoint, tmp_path, targets=["c_attn"], modules_to_save=["lm_head"])
    plain = starscope.load(checkpoint, engine="numpy")
    whole, half = (starscope.load(checkpoint, engine="numpy", lora=(tmp_path, s)) for s in (1.0, 0.5))
    wanted = (plain.weights["lm_head.weight"] + whole.weights["lm_head.weight"]) / 2
    assert np.allclose(half.weights["lm_head.weight"], wanted, atol=1e-6)
    assert np.array_equal(half.weights["embed_tokens.weight"], plain.weights["embed_tokens.weight"])


def test_the_changes_of_several_whole_modules_add_up_whatever_their_order(checkpoint, tmp_path):
    make_adapter(checkpoint, tmp_path / "one", targets=["c_attn"], modules_to_save=["lm_head"])
    make_adapter(checkpoint, tmp_path / "two", targets=["c_attn"], modules_to_save=["lm_head"], seed=5)
    plain, one, two = (
        starscope.load(checkpoint, engine="numpy", lora=lora).weights["lm_head.weight"]
        for lora in ((), tmp_path / "one", tmp_path / "two")
    )
    assert not np.array_equal(one, two)
    for order in ([tmp_path / "one", tmp_path / "two"], [tmp_path / "two", tmp_path / "one"]):
        both = starscope.load(checkpoint, engine="numpy", lora=order).weights["lm_head.weight"]
        assert np.allclose(both - plain, (one - plain) + (two - plain), atol=1e-6)


def test_an_embedding_that_peft_saved_unchanged_costs_nothing(checkpoint, tmp_path):
    make_adapter(checkpoint, tmp_path, targets=["lm_head"])
    stored = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert stored["target_modules"] == ["lm_head"]
    model = starscope.load(checkpoint, engine="numpy", lora=tmp_path)
    assert model.weights.is_tied("lm_head.weight")


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*)*x", ".*.*.*.*x", "a" * 300, "[a-z]+", "(a|b)*", "x{1000}{1000}", "(?=x)"]
)
def test_a_pattern_that_could_take_long_is_refused(checkpoint, pattern, tmp_path):
    config = {"r": 2, "lora_alpha": 2, "alpha_pattern": {pattern: 4}}
    write_folder(tmp_path, config, {"transformer.h.0.attn.c_attn": halves((96, 64), 2)})
    with pytest.raises(starscope.errors.UnsupportedError, match="pattern"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path)


def test_a_config_of_another_rank_than_the_tensors_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    config = {"r": 8, "lora_alpha": 8}
    write_folder(tmp_path, config, {"transformer.h.0.attn.c_attn": halves((96, 64), 2)})
    with pytest.raises(CheckpointError, match=r"rank 2; adapter_config\.json says 8"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path)
