"""LLaMA against every check of the suite, and what is its own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from families.suite import FamilySuite, prompt, reference
from starscope.convert import convert
from starscope.engine import ENGINES
from starscope.engine.base import MASKED
from starscope.errors import CheckpointError, GGUFError, UnsupportedError
from starscope.families import llama
from starscope.family import make_hparams, read_config, write_config
from starscope.formats import find_format
from starscope.gguf import OutputTensor, Value, boolean, f32, read_gguf, string, u32, write_gguf
from starscope.microscope.tensors import as_array
from starscope.rope import inverse_frequencies, llama3_factors, rotation
from support.checkpoints import edit_config
from support.llama_checkpoints import LLAMAS, SCALINGS, Llama, make_llama
from support.numbers import ulps

FAMILY = llama.FAMILY
CODE_LLAMA = {  # of codellama/CodeLlama-7b-hf
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 16384,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32016,
}  # fmt: skip
DEEPSEEK = {  # of deepseek-ai/deepseek-coder-1.3b-base
    **CODE_LLAMA, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 100000, "vocab_size": 32256,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}  # fmt: skip
MISTRAL = {  # of mistralai/Mistral-7B-v0.1
    **CODE_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 32000,
}  # fmt: skip


class TestLlama(FamilySuite):
    family = "llama"
    settings = LLAMAS

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        return make_llama(folder, **setting.options())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_llama(made, kv_heads=2)
    return made


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def metadata_of(path: Path) -> dict[str, Any]:
    with read_gguf(path) as file:
        return {key: value.data for key, value in file.metadata.items() if key.startswith("llama.")}


@pytest.mark.parametrize("config", [CODE_LLAMA, DEEPSEEK, MISTRAL], ids=["codellama", "deepseek", "mistral"])
def test_released_configs_are_read_and_written_back(config: dict[str, Any]) -> None:
    hp = read_config(FAMILY, config)
    assert hp.rope_base == config["rope_theta"]
    assert hp.rope_scale == (config["rope_scaling"] or {"factor": 1}).get("factor")
    assert hp.sliding_window == config.get("sliding_window", 0)
    assert read_config(FAMILY, write_config(FAMILY, hp)) == hp


@pytest.mark.parametrize("setting", LLAMAS, ids=str)
def test_transformers_reads_an_exported_folder_with_the_same_logits(setting: Llama, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from starscope.export import export_gguf

    oracle = make_llama(tmp_path / "hf", **setting.options()).float()
    path = convert(tmp_path / "hf", tmp_path / "model.gguf", to="f32").out
    export_gguf(path, tmp_path / "again")
    ids = prompt(320, 40)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert type(again) is type(oracle)
    assert ulps(reference(again, ids), reference(oracle, ids)) <= 32


def test_query_rows_are_stored_in_pairs_as_other_readers_expect(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "model.gguf", to="f32").out
    model = starscope.load(path, engine="numpy")
    ours = model.weights["layers.0.self_attn.q_proj.weight"]
    with read_gguf(path) as file:
        stored = file.read("blk.0.attn_q.weight").view(np.float32).reshape(ours.shape)
    heads, dim = 4, 16
    turned = ours.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(ours.shape)
    np.testing.assert_array_equal(stored, turned)


def test_rows_left_in_their_stored_order_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = convert(folder, to="f32", force=True).out
    ids = prompt(320, 30)
    right = starscope.load(path, engine="numpy").forward(ids)
    monkeypatch.setattr(llama, "_paired", lambda heads, dim: np.arange(heads * dim))
    wrong = starscope.load(path, engine="numpy").forward(ids)
    assert ulps(wrong, right) > 1000 * 32


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_a_window_hides_what_is_too_far_back(tmp_path: Path, engine: str) -> None:
    make_llama(tmp_path, window=9)
    model = starscope.load(tmp_path, engine=engine)
    ids = prompt(320, 40)
    changed = [ids[0] ^ 1, *ids[1:]]
    # Two blocks pass on what is up to 2 · 8 tokens back, and no further.
    one, other = model.forward(ids)[0], model.forward(changed)[0]
    assert (one[:17] != other[:17]).any(-1).all()
    assert (one[17:] == other[17:]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_patterns_of_single_queries_have_the_window_too(tmp_path: Path, engine: str) -> None:
    make_llama(tmp_path, window=9)
    model = starscope.load(tmp_path, engine=engine)
    ids, names = prompt(320, 40), ["*.attention_scores", "*.attention_probabilities"]
    _, whole = model.run_with_cache(ids, names)
    _, some = model.run_with_cache(ids, names, rows=[3, 20, 39])
    for name, pattern in some.items():
        wanted = as_array(whole[name])[:, :, [3, 20, 39]]
        assert ((as_array(pattern) <= MASKED) == (wanted <= MASKED)).all(), name
        assert np.allclose(as_array(pattern), wanted, rtol=1e-5, atol=1e-6), name


def test_a_longer_context_with_dynamic_scaling_has_the_bits_of_its_whole_length(tmp_path: Path) -> None:
    oracle = make_llama(tmp_path, scaling="dynamic", positions=32)
    path = convert(tmp_path, to="f32").out
    model = starscope.load(path, engine="torch", context_length=60)
    assert model.context_length == 60
    ids = prompt(320, 60)
    assert ulps(model.forward(ids)[0], reference(oracle, ids)) <= 32
    with pytest.raises(starscope.StarscopeError, match="32"):
        starscope.load(path, context_length=65)


def test_dynamic_scaling_of_heads_with_one_frequency_is_refused(tmp_path: Path) -> None:
    make_llama(tmp_path, kv_heads=2, head_dim=2)
    edit_config(tmp_path, rope_parameters={"rope_theta": 10000.0, **SCALINGS["dynamic"]})  # type: ignore[dict-item]
    assert starscope.load(tmp_path, context_length=128).context_length == 128
    with pytest.raises(
        UnsupportedError, match="heads of 2 dimensions have one frequency, which does not depend on rope_base"
    ):
        starscope.load(tmp_path, context_length=129)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e-44, float("nan")])
def test_factors_that_frequencies_cannot_be_divided_by_are_refused(wrong: float, tmp_path: Path) -> None:
    make_llama(tmp_path / "model", kv_heads=2, scaling="llama3")
    path = convert(tmp_path / "model", tmp_path / "model.gguf", to="f32").out
    with read_gguf(path) as file:
        offset = file.tensors["rope_freqs.weight"].offset
    starscope.load(path)
    with path.open("r+b") as raw:
        raw.seek(offset + 8)
        raw.write(np.float32(wrong).tobytes())
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight holds .*expected numbers above 0"):
        starscope.load(path)


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("expert_count", u32(0), u32(8)),
        ("attention.causal", boolean(True), boolean(False)),
        ("rope.scaling.attn_factor", f32(1.0), f32(1.5)),
        ("embedding_scale", f32(1.0), f32(12.0)),
        ("final_logit_softcapping", f32(0.0), string("30")),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_a_file_that_wants_other_arithmetic_is_refused(key: str, neutral: Value, other: Value, tmp_path: Path) -> None:
    make_llama(tmp_path / "model", kv_heads=2)
    path = convert(tmp_path / "model", tmp_path / "model.gguf", to="f32").out
    with read_gguf(path) as file:
        stored = {**file.metadata, f"llama.{key}": neutral}
        outputs = [
            OutputTensor(name, info.shape, find_format("F32"), lambda name=name: [file.read(name)])  # type: ignore[misc]
            for name, info in file.tensors.items()
        ]
        write_gguf(tmp_path / "neutral.gguf", stored, outputs)
        write_gguf(tmp_path / "other.gguf", {**stored, f"llama.{key}": other}, outputs)
    assert starscope.load(tmp_path / "neutral.gguf", engine="numpy")
    with pytest.raises(UnsupportedError, match=f"{key} is .*does not compute here"):
        starscope.load(tmp_path / "other.gguf", engine="numpy")


def test_linear_scaling_of_a_model_without_it_would_be_seen(tmp_path: Path) -> None:
    oracle = make_llama(tmp_path, scaling="linear")
    edit_config(tmp_path, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    ids = prompt(320, 30)
    assert ulps(starscope.load(tmp_path, engine="numpy").forward(ids)[0], reference(oracle, ids)) > 1000 * 32


def test_factors_of_frequencies_are_those_that_transformers_computes() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, rope_theta=5e5,
        rope_scaling={**said, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = llama3_factors(128, 5e5, 8.0, 1.0, 4.0, 8192)
    found = inverse_frequencies(128, 5e5, factors=factors)
    np.testing.assert_allclose(found, expected.numpy(), rtol=4 * 2.0**-23)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_frequencies_and_far_angles_are_those_of_transformers(dim: int, theta: float) -> None:
    expected = (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))).numpy()
    found = inverse_frequencies(dim, theta)
    np.testing.assert_allclose(found, expected, rtol=2.0**-23)
    positions = np.array([0, 1, 1000, 131071])
    cos, sin = rotation(positions, expected)
    angles = torch.from_numpy(positions).float()[:, None] * torch.from_numpy(expected)
    np.testing.assert_allclose(cos, angles.cos().numpy(), atol=2.0**-23)
    np.testing.assert_allclose(sin, angles.sin().numpy(), atol=2.0**-23)


def test_what_is_usual_is_not_written_and_what_is_not_is(tmp_path: Path) -> None:
    make_llama(tmp_path / "plain", kv_heads=4)
    plain = metadata_of(convert(tmp_path / "plain", to="f32").out)
    unusual = ("scaling", "attention.key_length", "attention.value_length", "sliding_window", "hidden_activation")
    assert not [key for key in plain if any(part in key for part in unusual)]
    make_llama(tmp_path / "other", head_dim=24, window=9, scaling="linear")
    other = metadata_of(convert(tmp_path / "other", to="f32").out)
    wanted = {
        "attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 24,
        "attention.sliding_window": 9, "rope.scaling.factor": 2.5,
    }  # fmt: skip
    assert {key: other[f"llama.{key}"] for key in wanted} == wanted


@pytest.mark.parametrize(("trained", "known"), [(8192, True), (32, False)])
def test_factors_of_another_converter_are_recognised_or_refused_on_export(
    tmp_path: Path, trained: int, known: bool
) -> None:
    from transformers import AutoModelForCausalLM

    from starscope.export import export_gguf

    oracle = make_llama(tmp_path / "hf", scaling="llama3", theta=5e5, head_dim=32)
    oracle.config.rope_parameters["original_max_position_embeddings"] = trained
    oracle.save_pretrained(tmp_path / "hf")
    converted = convert(tmp_path / "hf", tmp_path / "ours.gguf", to="f32").out
    with read_gguf(converted) as file:  # as llama.cpp's converter writes it: the factors and nothing about them
        kept = {key: value for key, value in file.metadata.items() if ".llama3." not in key}
        assert len(kept) < len(file.metadata)
        tensors = [
            OutputTensor(name, info.shape, info.format, partial(lambda data: [data], file.read(name)))
            for name, info in file.tensors.items()
            if info.format is not None
        ]
        write_gguf(tmp_path / "other.gguf", kept, tensors)
    ids = prompt(320, 40)
    other = starscope.load(tmp_path / "other.gguf", engine="numpy")
    assert (other.forward(ids) == starscope.load(converted, engine="numpy").forward(ids)).all()
    if not known:
        with pytest.raises(UnsupportedError, match="no scaling that a config"):
            export_gguf(tmp_path / "other.gguf", tmp_path / "again")
        return
    export_gguf(tmp_path / "other.gguf", tmp_path / "again")
    assert config_of(tmp_path / "again")["rope_scaling"]["factor"] == 8.0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert ulps(reference(again, ids), other.forward(ids)[0]) <= 32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn.*supported: default, linear, dynamic, llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 1}}, "beta_fast"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "relu.*silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": 127}, None),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": "linear"}, "expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scale"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-44}}, "rope_scale is 1e-44; expected a number from 1e-06"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e-300}}, "rope_dynamic"),
        ({"rope_theta": 0}, "rope_base"),
        ({"rope_theta": 1e13}, r"above 1, up to 1e\+12"),
        ({"rope_theta": "high"}, "rope_theta"),
        ({"num_key_value_heads": 5}, "key heads"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"new_trick": 1}, "new_trick"),
    ],
    ids=str,
)
def test_a_config_that_says_something_else_is_refused(changes: dict[str, Any], said: str | None) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        read_config(FAMILY, {**CODE_LLAMA, **changes})


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"]
)
def test_a_missing_config_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=r"missing|has no"):
        read_config(FAMILY, {name: value for name, value in CODE_LLAMA.items() if name != key})


def test_a_head_is_tied_only_where_the_config_says_so(tmp_path: Path) -> None:
    make_llama(tmp_path, tied=True)
    config = config_of(tmp_path)
    assert config.pop("tie_word_embeddings") is True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no tie_word_embeddings, which means false"):
        convert(tmp_path, to="f32")


def test_sizes_that_contradict_each_other_in_a_file_are_refused() -> None:
    sizes = {**read_config(FAMILY, CODE_LLAMA)}
    given = {row.name: sizes[row.name] for row in FAMILY.hparams}
    for change in ({"rope_dims": 64}, {"head_dim": 64}, {"rope_scaling": "none", "rope_scale": 2.0}):
        with pytest.raises((CheckpointError, UnsupportedError)):
            make_hparams(FAMILY, {**given, **change})
