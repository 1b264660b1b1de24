"""PEFT folders that do not fit, are damaged, or want what is not done here: a clear sentence each."""

from __future__ import annotations

import json

import numpy as np
import pytest

import starscope
from starscope.errors import CheckpointError, InputError, StarscopeError, UnsupportedError, UsageError
from support.adapters import PREFIX, halves, write_folder

CONFIG = {"r": 2, "lora_alpha": 4}
MODULE = "transformer.h.0.attn.c_attn"
A, B = halves((96, 64), 2)
NAMES = f"{PREFIX}{MODULE}.lora_A.weight", f"{PREFIX}{MODULE}.lora_B.weight"


def load(checkpoint, folder):
    return starscope.load(checkpoint, engine="numpy", lora=folder)


CONFIGS = {
    "dora": ({"use_dora": True}, UnsupportedError, "use_dora = True"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "changes the base"),
    "olora": ({"init_lora_weights": "olora"}, UnsupportedError, "changes the base"),
    "layers repeated": ({"layer_replication": [[0, 2], [1, 2]]}, UnsupportedError, "layer_replication"),
    "tokens": ({"trainable_token_indices": [1, 2]}, UnsupportedError, "trainable_token_indices"),
    "activated": ({"alora_invocation_tokens": [1]}, UnsupportedError, "certain tokens"),
    "a new variant": ({"use_hyper_lora": True}, UnsupportedError, "use_hyper_lora"),
    "another method": ({"peft_type": "IA3"}, UnsupportedError, "'IA3'; supported: LORA"),
    "no method": ({"peft_type": None}, UnsupportedError, "supported: LORA"),
    "r as a text": ({"r": "8"}, CheckpointError, "r is '8'"),
    "no r": ({"r": None}, CheckpointError, "r is None"),
    "r of zero": ({"r": 0}, CheckpointError, "rank"),
    "r of a fraction": ({"r": 2.5}, CheckpointError, "r is 2.5"),
    "alpha infinite": ({"lora_alpha": float("inf")}, CheckpointError, "lora_alpha is inf"),
    "alpha beyond floats": ({"lora_alpha": 10**400}, CheckpointError, "lora_alpha"),
    "a pattern beyond floats": ({"alpha_pattern": {"c_attn": 10**400}}, CheckpointError, "alpha_pattern"),
    "alpha a list": ({"lora_alpha": [1]}, CheckpointError, "lora_alpha"),
    "a flag as a text": ({"use_rslora": "yes"}, CheckpointError, "use_rslora"),
    "a pattern of texts": ({"rank_pattern": {"c_attn": "2"}}, CheckpointError, "rank_pattern"),
    "patterns as a list": ({"alpha_pattern": ["c_attn"]}, CheckpointError, "alpha_pattern"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_is_not_understood_is_refused(checkpoint, what, tmp_path):
    changes, error, message = CONFIGS[what]
    write_folder(tmp_path, {**CONFIG, **changes}, {MODULE: (A, B)})
    with pytest.raises(error, match=message):
        load(checkpoint, tmp_path)


def test_keys_of_later_versions_that_say_nothing_are_passed_over(checkpoint, tmp_path):
    write_folder(tmp_path, {**CONFIG, "some_variant": None, "another": False, "third": {}}, {MODULE: (A, B)})
    assert load(checkpoint, tmp_path)


def test_the_same_adapter_without_the_prefix_is_read(checkpoint, tmp_path):
    write_folder(tmp_path, CONFIG, {}, {name.removeprefix(PREFIX): x for name, x in zip(NAMES, (A, B), strict=True)})
    assert load(checkpoint, tmp_path)


NOT_FINITE = B.copy()
NOT_FINITE[3, 1] = np.nan

TENSORS = {
    "no B": ({NAMES[0]: A}, "lora_A.weight without its other half"),
    "no A": ({NAMES[1]: B}, "lora_B.weight without its other half"),
    "ranks that differ": ({NAMES[0]: A, NAMES[1]: B[:, :1]}, "one rank"),
    "another width": ({NAMES[0]: A[:, :32], NAMES[1]: B}, r"\[96 32\].*is \[96 64\]"),
    "another height": ({NAMES[0]: A, NAMES[1]: B[:64]}, r"\[64 64\].*is \[96 64\]"),
    "turned over": ({NAMES[0]: A.T.copy(), NAMES[1]: B.T.copy()}, "rank 64; adapter_config.json says 2"),
    "NaN": ({NAMES[0]: A, NAMES[1]: NOT_FINITE}, "not finite"),
    "infinity": ({NAMES[0]: np.full_like(A, np.inf), NAMES[1]: B}, "not finite"),
    "a vector": ({NAMES[0]: A[0].copy(), NAMES[1]: B}, "expected a matrix"),
    "one more axis": ({NAMES[0]: A[None].copy(), NAMES[1]: B}, "expected a matrix"),
    "another model's names": (
        {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{h}.weight": x for h, x in (("A", A), ("B", B))},
        "belong to no part of gpt_bigcode.*q_proj",
    ),
    "a block too many": (
        {f"{PREFIX}transformer.h.9.attn.c_attn.lora_{h}.weight": x for h, x in (("A", A), ("B", B))},
        "2 layers.*h.9",
    ),
    "an unknown tensor": ({NAMES[0]: A, NAMES[1]: B, "extra": A}, "no part of gpt_bigcode.*extra"),
    "a bias of B": ({NAMES[0]: A, NAMES[1]: B, f"{PREFIX}{MODULE}.lora_B.bias": B[:, 0].copy()}, "no part of"),
    "a wider vocabulary": (
        {f"{PREFIX}transformer.wte.weight": np.zeros((330, 64), np.float32), NAMES[0]: A, NAMES[1]: B},
        r"\[330, 64\].*vocabulary",
    ),
    "nothing": ({}, "no tensor"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_are_named(checkpoint, what, tmp_path):
    tensors, message = TENSORS[what]
    write_folder(tmp_path, CONFIG, {}, tensors)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        load(checkpoint, tmp_path)
    assert len(str(caught.value)) < 600


def test_magnitudes_of_dora_are_refused_whatever_the_config_says(checkpoint, tmp_path):
    extra = {f"{PREFIX}{MODULE}.lora_magnitude_vector": B[:, 0].copy()}
    write_folder(tmp_path, CONFIG, {MODULE: (A, B)}, extra)
    with pytest.raises(UnsupportedError, match="DoRA"):
        load(checkpoint, tmp_path)


def test_a_half_that_is_there_twice_is_an_error(checkpoint, tmp_path):
    write_folder(tmp_path, CONFIG, {MODULE: (A, B)}, {f"{MODULE}.lora_A.weight": A})
    with pytest.raises(CheckpointError, match="both"):
        load(checkpoint, tmp_path)


def test_what_is_not_there_is_said(checkpoint, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load(checkpoint, tmp_path / "none")
    with pytest.raises(InputError, match=r"no adapter_config\.json"):
        load(checkpoint, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **CONFIG}), encoding="utf-8")
    with pytest.raises(InputError, match="none of adapter_model"):
        load(checkpoint, tmp_path)


def test_a_cut_folder_is_an_error(checkpoint, tmp_path):
    write_folder(tmp_path, CONFIG, {MODULE: (A, B)})
    path = tmp_path / "adapter_model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StarscopeError):
            load(checkpoint, tmp_path)


@pytest.mark.parametrize(
    "given", [3, [3], [("a", "b")], ("a", float("nan")), ("a", 1e39), ("a", 10**400), [("a", 1.0, 2)], None]
)
def test_lora_is_paths_and_scales(checkpoint, given):
    with pytest.raises((UsageError, TypeError)):
        starscope.load(checkpoint, engine="numpy", lora=given)


@pytest.mark.parametrize("whole", [False, True])
def test_a_scale_that_takes_values_out_of_float32_is_refused(checkpoint, whole, tmp_path):
    extra = {f"{PREFIX}transformer.ln_f.weight": np.full(64, 4.0, np.float32)} if whole else {}
    write_folder(tmp_path, CONFIG, {} if whole else {MODULE: (A, B * 100)}, extra)
    with pytest.raises(CheckpointError, match="larger than a float32 holds"):
        starscope.load(checkpoint, engine="numpy", lora=(tmp_path, 3e38))


def test_a_base_without_adapters_is_refused(checkpoint):
    with pytest.raises(UsageError, match="lora_base"):
        starscope.load(checkpoint, engine="numpy", lora_base=checkpoint)


def test_a_base_of_other_sizes_is_refused(checkpoint, multi_head, tmp_path):
    write_folder(tmp_path, CONFIG, {MODULE: (A, B)})
    with pytest.raises(StarscopeError, match="not a base of this model"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path, lora_base=multi_head)
