"""`show` of files that say odd things: every document is printed, and counts what a conversion keeps."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from starscope.gguf import ValueType, array, f32, read_gguf, string, strings, u32, write_gguf
from support.sentencepieces import model_file, small_pieces

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
ODD = [u32(5), f32(float("nan")), strings(["a"]), array(ValueType.INT32, [1, 2]), string("x" * 60_000)]


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture", "general.name", "general.license", "starcoder.hidden_activation",
        "starcoder.vocab_size",
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
    ],
)  # fmt: skip
def test_a_key_of_any_type_leaves_a_document(key, cli, model, tmp_path):
    for value in ODD:
        with read_gguf(model) as file:
            write_gguf(tmp_path / "odd.gguf", {**file.metadata, key: value}, [], force=True)
        shown = cli("show", tmp_path / "odd.gguf", "--json")
        assert shown.exit_code == 0
        document = json.loads(shown.stdout, parse_constant=pytest.fail)
        kinds = (str, type(None))
        assert all(isinstance(document[name], kinds) for name in ("architecture", "name", "license"))
        text = cli("show", tmp_path / "odd.gguf")
        assert text.exit_code == 0
        assert max(map(len, text.stdout.splitlines())) < 1000


@pytest.mark.parametrize("changes", [
    {"architectures": "x"}, {"architectures": [5]}, {"_name_or_path": {"a": 1}}, {"_name_or_path": "x" * 60_000},
    {"model_type": 5}, {"activation_function": ["gelu"]}, {"multi_query": "no"}, {"tie_word_embeddings": "no"},
    {"n_layer": {}}, {"n_positions": 10**400},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_a_config_of_any_types_leaves_a_document(changes, cli, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    shown = cli("show", copy, "--json")
    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert isinstance(document["name"], str)
    assert cli("show", copy).exit_code == 0
    if not changes.keys() & {"_name_or_path"}:
        assert document["problems"]


def test_a_pre_tokenizer_that_the_file_does_not_name_is_marked(cli, model, tmp_path):
    with read_gguf(model) as file:
        metadata = {key: value for key, value in file.metadata.items() if key != "tokenizer.ggml.pre"}
        write_gguf(tmp_path / "m.gguf", metadata, [])
    tokenizer = json.loads(cli("show", tmp_path / "m.gguf", "--json").stdout)["tokenizer"]
    assert (tokenizer["pre"], tokenizer["pre_is_assumed"]) == ("starcoder", True)
    assert "pre-tokenizer starcoder (assumed)" in cli("show", tmp_path / "m.gguf").stdout
    assert json.loads(cli("show", model, "--json").stdout)["tokenizer"]["pre_is_assumed"] is False
    assert "(assumed)" not in cli("show", model).stdout


def test_masks_and_a_tied_head_are_no_parameters_of_a_folder(cli, folder, model, tmp_path):
    from safetensors.numpy import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    for layer in range(2):
        tensors[f"transformer.h.{layer}.attn.bias"] = np.ones((1, 1, 64, 64), np.uint8)
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.float32([-1e4])
    save_file(tensors, copy / "model.safetensors")
    parameters = [json.loads(cli("show", path, "--json").stdout)["parameters"] for path in (model, copy)]
    assert parameters[0] == parameters[1]
    report = json.loads(cli("convert", copy, "-o", tmp_path / "out.gguf", "--json").stdout)
    assert report["parameters"] == parameters[0]


def test_a_head_of_its_own_is_counted(cli, folder, model, tmp_path):
    from safetensors.numpy import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] * np.float32(2)
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tied, untied = (json.loads(cli("show", path, "--json").stdout)["parameters"] for path in (model, copy))
    assert untied == tied + tensors["lm_head.weight"].size


def test_repeated_heads_are_counted_by_the_report_as_by_show(cli, folder, tmp_path):
    out = tmp_path / "wide.gguf"
    report = json.loads(cli("convert", folder, "--expand-mqa", "-o", out, "--json").stdout)
    assert report["parameters"] == json.loads(cli("show", out, "--json").stdout)["parameters"]


@pytest.mark.parametrize("shares", [True, False])
def test_a_head_that_is_the_embeddings_bytes_is_counted_once(shares, cli, folder, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.numpy import load_file

    tensors = {name: torch.from_numpy(data) for name, data in load_file(folder / "model.safetensors").items()}
    embedding = tensors["transformer.wte.weight"]
    tensors["lm_head.weight"] = embedding if shares else embedding.clone()
    shutil.copytree(folder, tmp_path / "torch", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(tensors, tmp_path / "torch" / "pytorch_model.bin")
    whole, found = (json.loads(cli("show", path, "--json").stdout) for path in (folder, tmp_path / "torch"))
    more = 0 if shares else embedding.numel() * 4
    assert found["bytes_by_format"] == {"F32": whole["bytes_by_format"]["F32"] + more}
    assert found["parameters"] == whole["parameters"]
    listed = json.loads(cli("show", tmp_path / "torch", "--tensors", "--json").stdout)["tensors"]
    assert "lm_head.weight" in {tensor["name"] for tensor in listed}  # it is a tensor of the file all the same


def test_a_sentencepiece_tokenizer_is_named_alike_for_a_folder_and_its_file(cli, tmp_path):
    source = tmp_path / "llama"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": len(small_pieces())}))
    (source / "tokenizer.model").write_bytes(model_file(small_pieces()))
    assert cli("convert", source, "--vocab-only", "-o", tmp_path / "v.gguf").exit_code == 0
    shown = [json.loads(cli("show", path, "--json").stdout)["tokenizer"] for path in (source, tmp_path / "v.gguf")]
    assert shown[0] == shown[1]
    assert shown[0]["model"] == "llama"
    assert re.search(r"^tokenizer +llama, ", cli("show", source).stdout, re.MULTILINE)
