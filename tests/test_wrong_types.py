"""Whatever type a value in a file has, reading it ends in a model or in an error that names file, key and types; and
whatever type an argument has, in a sentence that names it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import starscope
from starscope.checkpoint import open_checkpoint, read_safetensors
from starscope.checkpoint.content import LONGEST, cut, short
from starscope.errors import (
    CheckpointError,
    GGUFError,
    InputError,
    InvalidContentError,
    StarscopeError,
    UnsupportedError,
    UsageError,
)
from starscope.families import gpt_bigcode
from starscope.family import find_family_for_config, find_family_of_file, hparams_from_metadata, read_config
from starscope.gguf import ValueType, array, f32, read_gguf, string, strings, u32, write_gguf
from starscope.mapping import map_checkpoint
from starscope.sampling import SamplingOptions
from starscope.sampling.options import COUNTS, NUMBERS
from support.checkpoints import edit_config, make_checkpoint

FAMILY = gpt_bigcode.FAMILY
WRONG: list[Any] = [
    None, True, False, 0, -1, 7, 10**400, 0.5, float("nan"), float("inf"), "", "x", "no", [], ["gelu"], [[]], {},
    {"a": 1}, "x" * 100_000,
]  # fmt: skip
JSON = st.recursive(
    st.sampled_from(WRONG), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("types")
    make_checkpoint(made, shards=2)
    return made


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read(config: dict[str, Any]) -> None:
    read_config(find_family_for_config(config), config)


def problem_of(config: dict[str, Any]) -> str | None:
    try:
        read(config)
    except (CheckpointError, UnsupportedError) as error:
        return error.message
    return None


def keys_that_are_read() -> list[str]:
    keys = {key for row in FAMILY.hparams for key in ((row.hf,) if isinstance(row.hf, str) else row.reads)}
    return sorted({*keys, *FAMILY.refused, "architectures", "model_type"})


# config.json


@pytest.mark.parametrize("key", keys_that_are_read())
def test_a_config_value_of_any_type_is_read_or_named(key: str, folder: Path) -> None:
    for value in WRONG:
        problem = problem_of({**config_of(folder), key: value})
        assert problem is None or ("config.json" in problem and len(problem) < 500)


@given(data=st.data())
@settings(max_examples=150)
def test_no_config_ends_in_a_traceback(data: st.DataObject, folder: Path) -> None:
    config = copy.deepcopy(config_of(folder))
    for key in data.draw(st.lists(st.sampled_from(keys_that_are_read()), min_size=1, max_size=3)):
        config[key] = data.draw(JSON)
    assert len(problem_of(config) or "") < 500


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("activation_function", ["gelu"], "a text"),
        ("activation_function", {}, "a text"),
        ("multi_query", "false", "true or false"),
        ("multi_query", "no", "true or false"),
        ("multi_query", [1], "true or false"),
        ("multi_query", 1, "true or false"),
        ("multi_query", None, "true or false"),
        ("scale_attn_weights", "false", "true or false"),
        ("add_cross_attention", "false", "true or false"),
        ("n_inner", 0, "a positive number or null"),
        ("n_inner", -4, "a positive number or null"),
        ("n_inner", 2.5, "a whole number"),
        ("n_inner", False, "a whole number"),
        ("n_embd", "64", "a whole number"),
        ("n_head_kv", [1], "a whole number"),
        ("attention_head_type", ["multiquery"], "a text"),
        ("layer_norm_epsilon", 10**400, "a finite number"),
        ("layer_norm_epsilon", True, "a number"),
        ("layer_norm_epsilon", 0, "a number between 0 and 1"),
        ("layer_norm_epsilon", 1e-50, "a number between 0 and 1"),
        ("layer_norm_epsilon", 1.5, "a number between 0 and 1"),
        ("architectures", "GPTBigCodeForCausalLM", "a list of class names"),
        ("architectures", [5], "a list of class names"),
        ("model_type", 5, "a text"),
        ("model_type", "llama", "gpt_bigcode or gpt2"),
        ("n_layer", 0, "1 to 512"),
        ("n_layer", 10**6, "1 to 512"),
        ("n_positions", 2**31, "1 to 2147483647"),
        ("vocab_size", 0, "1 to 2147483647"),
        ("vocab_size", -5, "1 to 2147483647"),
    ],
)
def test_a_wrong_config_value_is_named_with_what_was_expected(
    key: str, value: Any, expected: str, folder: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*; expected {re.escape(expected)}"):
        read({**config_of(folder), key: value})


def test_sizes_that_do_not_fit_name_the_file(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: hidden_size 64, num_heads 7"):
        read({**config_of(folder), "n_head": 7})


@pytest.mark.parametrize("value", ["false", 0, None, [False]])
def test_the_tie_is_said_with_true_or_false(value: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, tie_word_embeddings=value)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"config\.json: tie_word_embeddings is .*; expected true or false"),
    ):
        map_checkpoint(checkpoint)


def test_many_unknown_keys_are_not_all_printed(folder: Path) -> None:
    config = {**config_of(folder), **{f"key{i}" + "x" * 10_000: "y" * 10_000 for i in range(1000)}}
    with pytest.raises(UnsupportedError, match=r"key0x.* and 995 more") as caught:
        read(config)
    assert len(caught.value.message) < 1200


# Weight files


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize(
    "value", [*WRONG, [10**30], [0.0], ["F32"], [1 << 62] * 50, [2] * 100_000, [{}]], ids=lambda v: str(v)[:20]
)
def test_a_safetensors_header_of_any_type_is_refused_in_a_line(field: str, value: Any, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], field: value}
    raw = json.dumps({"w" * 5000: entry}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(tmp_path / "m.safetensors")
    assert len(caught.value.message) < len(str(tmp_path)) + 400


@pytest.mark.parametrize("value", [3, [], {}, None, "x" * 5000, "../" + "x" * 5000, True], ids=lambda v: str(v)[:10])
def test_a_place_in_an_index_of_any_type_is_refused_in_a_line(value: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["w" * 5000] = value
    path.write_text(json.dumps(index))
    with pytest.raises((CheckpointError, InputError)) as caught:
        open_checkpoint(tmp_path)
    assert len(caught.value.message) < len(str(tmp_path)) + 300


# GGUF files


def gguf(path: Path, **changes: Any) -> Path:
    """A vocabulary file of a small model; `changes` by the key without its prefix, None to leave one out."""
    keys = {
        "general.architecture": string("starcoder"),
        "starcoder.context_length": u32(64),
        "starcoder.embedding_length": u32(32),
        "starcoder.block_count": u32(2),
        "starcoder.feed_forward_length": u32(64),
        "starcoder.attention.head_count": u32(4),
        "starcoder.attention.head_count_kv": u32(1),
        "tokenizer.ggml.tokens": strings(["a", "b"]),
    }
    keys |= changes
    write_gguf(path / "m.gguf", {key: value for key, value in keys.items() if value is not None}, [], force=True)
    return path / "m.gguf"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", None, "has no general.architecture; expected the name"),
        ("general.architecture", u32(5), r"general\.architecture is <UINT32 5>; expected a text"),
        ("general.architecture", strings(["starcoder"]), r"general\.architecture is .*; expected a text"),
        ("starcoder.hidden_activation", strings(["gelu"]), r"hidden_activation is .*; expected a text"),
        ("starcoder.hidden_activation", array(ValueType.INT32, [1, 2]), r"hidden_activation is .*; expected a text"),
        ("starcoder.block_count", u32(0), r"starcoder\.block_count is 0; expected 1 to 512"),
        ("starcoder.block_count", None, r"starcoder\.block_count is missing"),
        ("starcoder.context_length", u32(2**31), r"context_length is 2147483648; expected 1 to 2147483647"),
        ("starcoder.attention.layer_norm_epsilon", f32(float("inf")), "expected a finite number"),
        ("tokenizer.ggml.tokens", u32(5), r"tokens is <UINT32 5>; expected an array"),
        ("starcoder.vocab_size", u32(999), r"starcoder\.vocab_size is 999; expected 2"),
        ("starcoder.vocab_size", string("2"), r"starcoder\.vocab_size is '2'; expected 2"),
        ("starcoder.vocab_size", array(ValueType.INT32, [2]), r"starcoder\.vocab_size is .*; expected 2"),
        ("starcoder.attention.key_length", u32(16), r"key_length is 16; expected 8"),
    ],
)
def test_a_wrong_key_of_a_gguf_file_is_named_with_the_file(key: str, value: Any, message: str, tmp_path: Path) -> None:
    with read_gguf(gguf(tmp_path, **{key: value})) as file:
        with pytest.raises(GGUFError, match=message) as caught:
            hparams_from_metadata(find_family_of_file(file), file)
        assert caught.value.message.startswith(str(file.path))


def test_redundant_keys_that_agree_are_fine(tmp_path: Path) -> None:
    with read_gguf(
        gguf(tmp_path, **{"starcoder.vocab_size": u32(2), "starcoder.attention.key_length": u32(8)})
    ) as file:
        assert hparams_from_metadata(find_family_of_file(file), file).vocab_size == 2


def test_a_long_name_of_an_architecture_is_cut(tmp_path: Path) -> None:
    path = gguf(tmp_path, **{"general.architecture": string("s" * 60_000)})
    message = r"general\.architecture is 's+\.\.\.s+'; supported"
    with read_gguf(path) as file, pytest.raises(UnsupportedError, match=message) as caught:
        find_family_of_file(file)
    assert len(caught.value.message) < 200


# What a message shows of a file


@pytest.mark.parametrize(
    "value",
    [*WRONG, {str(i): {str(j): [9] * 99 for j in range(99)} for i in range(99)}, 10**9000],
    ids=lambda v: type(v).__name__,
)
def test_a_value_in_a_message_is_one_short_line(value: Any) -> None:
    for text in (short(value), short([value]), cut("x" * 1000)):
        assert len(text) <= LONGEST
        assert text.isprintable()
    assert short("gelu") == "'gelu'"


# Links


def test_links_that_lead_nowhere_say_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=r"loop is a link that leads back to itself"):
        open_checkpoint(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"gone is a link to .*nowhere, which does not exist"):
        open_checkpoint(tmp_path / "gone")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_file_of_a_folder_that_is_such_a_link_says_so(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=f"{re.escape(name)} is a link that leads back to itself"):
        open_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../blobs/abc")
    with pytest.raises(InputError, match=rf"{re.escape(name)} is a link to \.\./blobs/abc, which does not exist"):
        open_checkpoint(tmp_path)


# Arguments


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """The message of the StarscopeError that a call ends in, None where there is none; other errors pass."""
    try:
        call(*args, **options)
    except StarscopeError as error:
        return error.message
    return None


@pytest.fixture(scope="module")
def demo() -> starscope.Model:
    return starscope.load("demo", engine="numpy")


@pytest.mark.parametrize("name", [*NUMBERS, *COUNTS, "logit_bias", "samplers"])
def test_a_sampling_option_of_any_type_is_taken_or_named(name: str) -> None:
    for value in [*WRONG, 1j, b"x", object, [1], {1: "a"}, {1: None}, {1: True}, {"a": 1.0}, {None: 1.0}, [None]]:
        problem = refusal(SamplingOptions, **{name: value})
        assert problem is None or re.match(rf"{name} (is|has|of) .*; expected ", problem)
        assert len(problem or "") < 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, r"temperature is 'hot'; expected 0 \(the most likely token\) or a number above"),
        ({"temperature": True}, "temperature is True; expected 0"),
        ({"temperature": 10**400}, "temperature is a number of 1329 bits; expected 0"),
        ({"top_p": None}, "top_p is None; expected a probability from 0 to 1"),
        ({"min_p": "a"}, "min_p is 'a'; expected a share of the best probability"),
        ({"mirostat_tau": "a"}, "mirostat_tau is 'a'; expected bits of surprise"),
        ({"presence_penalty": "x"}, "presence_penalty is 'x'; expected a number"),
        ({"logit_bias": {1: "a"}}, "logit_bias of token 1 is 'a'; expected a number"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; expected a mapping"),
        ({"samplers": None}, "samplers is None; expected a list of names"),
        ({"samplers": [5]}, "samplers has 5; expected penalties"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; expected a whole number"),
        ({"logprobs": True}, "logprobs is True; expected a whole number from 0 to 100"),
        ({"stop": 5}, "stop is 5; expected a text"),
        ({"suffix": "b", "files": 5}, "files is 5; expected a list of pairs"),
        ({"suffix": "b", "files": None}, "files is None; expected a list of pairs"),
        ({"suffix": "b", "files": [5]}, "a context file is int; expected a pair"),
        ({"files": 5}, "files is 5; expected a list of pairs"),
    ],
)
def test_an_argument_of_generate_of_a_wrong_type_is_named(
    options: dict[str, Any], message: str, demo: starscope.Model
) -> None:
    with pytest.raises(UsageError, match=message):
        demo.generate("a", **options)


@pytest.mark.parametrize("prompt", [[True], (1, False), [[1], [True]]])
def test_true_is_no_token_id(prompt: Any, demo: starscope.Model) -> None:
    with pytest.raises(InvalidContentError, match=r"a prompt is .*; expected token ids"):
        demo.generate(prompt)


@pytest.mark.parametrize("model", [5, None, True, b"demo", ["demo"], {}])
def test_a_model_is_named_by_a_text_or_a_path(model: Any) -> None:
    with pytest.raises(UsageError, match=r"the model is .*; expected a \.gguf file"):
        starscope.load(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": 5}, "lora is 5; expected a path"),
        ({"lora": None}, "lora is None; expected a path"),
        ({"lora": {"style.gguf": 0.5}}, "lora is {'style.gguf': 0.5}; expected a path"),
        ({"lora": [5]}, "lora is 5; expected a path"),
        ({"tensor_split": "ab"}, "tensor_split is 'ab'; expected a list of shares"),
        ({"tensor_split": 1}, "tensor_split is 1; expected a list of shares"),
        ({"tensor_split": [True]}, r"tensor_split is \[True\]; expected a list of shares"),
        ({"main_gpu": "0"}, "main_gpu is '0'; expected the number of a GPU"),
        ({"engine": ["numpy"]}, r"engine is \['numpy'\]; expected auto"),
    ],
)
def test_an_argument_of_load_of_a_wrong_type_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        starscope.load("demo", **options)


@pytest.mark.parametrize("name", ["engine", "device", "gpu_layers", "context_length", "threads", "main_gpu", "lora"])
def test_an_argument_of_load_of_any_type_is_taken_or_refused_on_purpose(name: str) -> None:
    for value in WRONG[:-1]:
        refusal(starscope.load, "demo", **{"engine": "numpy", "device": "cpu", name: value})
