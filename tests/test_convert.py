"""Conversion: every value, every key, and the rules for ties, forms and formats, against transformers and gguf-py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize as reference_quantize
from gguf.utility import size_label as reference_size_label
from safetensors.torch import load_file, save_file

import starscope.convert
from starscope.checkpoint import WeightFile
from starscope.convert import convert, size_label
from starscope.errors import (
    CheckpointError,
    InputError,
    TokenizerError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from starscope.gguf import read_gguf
from support.checkpoints import PAIRWISE, Setting, edit_config, gguf_tensors, make_checkpoint

QUANTS = {kind.name: kind for kind in gguf.GGMLQuantizationType}


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with read_gguf(path) as file:
        return {name: file.array(name).copy() for name in file.tensors}


def assert_same_arrays(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


# Values


@pytest.mark.parametrize("setting", PAIRWISE, ids=str)
def test_every_tensor_is_transformers_tensor_under_the_mapping(setting: Setting, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, **setting.options())
    report = convert(tmp_path, to="f32")
    expected = gguf_tensors(model)
    assert_same_arrays(arrays_of(report.out), expected)
    assert report.tensors == len(expected)
    assert report.parameters == sum(values.size for values in expected.values())
    assert (report.family, report.format, report.notes) == ("gpt_bigcode", "F32", [])
    assert report.bytes == report.out.stat().st_size


@pytest.mark.parametrize("setting", PAIRWISE[:6], ids=str)
@pytest.mark.parametrize("to", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_every_format_is_gguf_pys_encoding_of_transformers_values(to: str, setting: Setting, tmp_path: Path) -> None:
    expected = gguf_tensors(make_checkpoint(tmp_path, **setting.options()))
    kind = QUANTS[to.upper()]
    with read_gguf(convert(tmp_path, to=to).out) as file:
        for name, values in expected.items():
            stays = values.ndim == 1 or name == "position_embd.weight"
            raw = values.view(np.uint8) if stays else reference_quantize(values, kind).view(np.uint8)
            assert file.tensors[name].type_name == ("F32" if stays else to.upper())
            np.testing.assert_array_equal(file.raw(name).ravel(), raw.ravel(), err_msg=name)


def test_the_size_of_a_chunk_does_not_show_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, multi_query=False, tied=False)
    whole = convert(tmp_path, tmp_path / "whole.gguf").out.read_bytes()
    for size in (1, 1000, 5000):
        monkeypatch.setattr(starscope.convert, "CHUNK_BYTES", size)
        assert convert(tmp_path, tmp_path / f"{size}.gguf", verify=True).out.read_bytes() == whole


def test_the_same_folder_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", shards=2)
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    first = convert(tmp_path / "one").out
    second = convert(tmp_path / "elsewhere" / "two").out
    assert first.name == second.name == "ggml-model-f16.gguf"
    assert first.read_bytes() == second.read_bytes()
    assert convert(tmp_path / "one", force=True).out.read_bytes() == second.read_bytes()
    assert str(tmp_path).encode() not in second.read_bytes()


def test_rows_that_are_not_whole_blocks_stay_f16_and_are_reported(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, hidden=48, n_inner=192)
    report = convert(tmp_path, to="q8_0", verify=True)
    with read_gguf(report.out) as file:
        types = {name: info.type_name for name, info in file.tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "Q8_0"  # its rows have 192 values
    assert types["token_embd.weight"] == types["blk.1.attn_qkv.weight"] == "F16"
    assert len(report.notes) == 1
    assert "rows that are not whole blocks of 32 are F16: token_embd.weight" in report.notes[0]
    expected = gguf_tensors(model)["token_embd.weight"].astype(np.float16)
    np.testing.assert_array_equal(arrays_of(report.out)["token_embd.weight"], expected)


def spoil(folder: Path, value: float) -> str:
    state = state_of(folder)
    state["transformer.h.1.mlp.c_fc.weight"][3, 5] = value
    store(folder, state)
    return "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("value", [70000.0, -70000.0])
def test_a_value_beyond_float16_is_refused_and_bf16_takes_it(value: float, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = spoil(tmp_path, value)
    with pytest.raises(UnsupportedError, match=rf"{name} holds values up to 70000, .* F16\. Convert to bf16 or f32"):
        convert(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
    arrays = arrays_of(convert(tmp_path, to="bf16", verify=True).out)
    assert arrays["blk.1.ffn_up.weight"][3, 5] == pytest.approx(value, rel=2**-8)
    arrays = arrays_of(convert(tmp_path, to="q8_0", verify=True).out)
    assert arrays["blk.1.ffn_up.weight"][3, 5] == pytest.approx(value, rel=2**-8)


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_a_value_beyond_bfloat16_is_refused_and_f32_takes_it(value: float, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = spoil(tmp_path, value)
    with pytest.raises(UnsupportedError, match=rf"{name} holds values up to 3\.4e\+38, .* BF16\. Convert to f32\."):
        convert(tmp_path, to="bf16")
    assert not list(tmp_path.glob("*.gguf"))
    largest = torch.finfo(torch.bfloat16).max
    spoil(tmp_path, largest)
    assert arrays_of(convert(tmp_path, to="bf16", verify=True).out)["blk.1.ffn_up.weight"][3, 5] == largest


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_kept_by_floats_and_refused_by_blocks(value: float, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = spoil(tmp_path, value)
    for to in ("f32", "f16", "bf16"):
        kept = arrays_of(convert(tmp_path, to=to, verify=True).out)["blk.1.ffn_up.weight"][3, 5]
        np.testing.assert_equal(float(kept), value)
    for to in ("q8_0", "q4_0"):
        with pytest.raises(UnsupportedError, match=f"{name} holds a value that is not finite"):
            convert(tmp_path, to=to)


# Keys


def test_gguf_py_reads_the_file_and_its_keys(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, multi_query=False, activation="gelu", n_inner=192, positions=96)
    reader = gguf.GGUFReader(convert(tmp_path).out)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "GGUF.version": 3,
        "general.architecture": "starcoder",
        "general.type": "model",
        "general.size_label": size_label(sum(int(np.prod(t.shape)) for t in reader.tensors)),
        "general.file_type": 1,
        "general.quantization_version": 2,
        "starcoder.context_length": 96,
        "starcoder.embedding_length": 64,
        "starcoder.block_count": 2,
        "starcoder.feed_forward_length": 192,
        "starcoder.attention.head_count": 4,
        "starcoder.attention.head_count_kv": 4,
        "starcoder.attention.layer_norm_epsilon": np.float32(1e-5),
        "starcoder.hidden_activation": "gelu",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "starcoder",
    }
    assert {key: fields[key] for key in expected} == expected
    assert "starcoder.max_position_embeddings" not in fields
    assert len(fields["tokenizer.ggml.tokens"]) == 320
    assert fields["tokenizer.ggml.tokens"][319] == "[PAD319]"
    shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors}
    assert shapes["blk.0.attn_qkv.weight"] == (64, 192)  # ggml's order
    assert shapes["token_embd.weight"] == (64, 320)


@pytest.mark.parametrize(
    ("stored", "written"),
    [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_pytorch_tanh"), ("gelu_new", "gelu_pytorch_tanh")],
)
def test_the_activation_is_written(stored: str, written: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, activation=stored)
    assert read_gguf(convert(tmp_path).out).get("starcoder.hidden_activation") == written


def test_the_folder_may_say_its_licence_and_where_it_comes_from(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = read_gguf(convert(tmp_path).out)
    assert file.get("general.name") == "gpt_bigcode 116K"
    assert "general.license" not in file.metadata
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: bigcode-openrail-m\n---\n# Model\n")
    edit_config(tmp_path, _name_or_path="bigcode/tiny_starcoder_py")
    file = read_gguf(convert(tmp_path, force=True).out)
    assert file.get("general.license") == "other"
    assert file.get("general.license.name") == "bigcode-openrail-m"
    assert file.get("general.name") == "tiny_starcoder_py"
    assert file.get("general.source.huggingface.repository") == "bigcode/tiny_starcoder_py"


def test_a_snapshot_of_the_hubs_cache_says_its_repository_and_commit(tmp_path: Path) -> None:
    commit = "3" * 40
    folder = tmp_path / "models--owner--some-name" / "snapshots" / commit
    folder.mkdir(parents=True)
    make_checkpoint(folder)
    edit_config(folder, _name_or_path="bigcode/the-one-it-was-tuned-from")
    (tmp_path / "link").symlink_to(folder)
    files = [
        read_gguf(convert(source, tmp_path / "out.gguf", force=True).out) for source in (folder, tmp_path / "link")
    ]
    for file in files:
        assert file.get("general.name") == "some-name"
        assert file.get("general.source.huggingface.repository") == "owner/some-name"
        assert file.get(gguf.Keys.General.SOURCE_REPO_URL) == "https://huggingface.co/owner/some-name"
        assert file.get(gguf.Keys.General.SOURCE_URL) == f"https://huggingface.co/owner/some-name/tree/{commit}"
    elsewhere = tmp_path / "models" / commit
    shutil.copytree(folder, elsewhere)
    assert gguf.Keys.General.SOURCE_URL not in read_gguf(convert(elsewhere).out).metadata


@pytest.mark.parametrize("path", ["/data/secret/model", "./out/model", "../model", "a/b/c", "C:\\models\\x"])
def test_a_local_path_in_the_config_stays_out_of_the_file(path: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, _name_or_path=path)
    assert path.encode() not in convert(tmp_path).out.read_bytes()


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 9_949, 116_288, 164_204_544, 1_137_207_296, 3_043e6, 15.5e9])
def test_the_size_label_is_gguf_pys(count: float) -> None:
    if count:
        assert size_label(int(count)) == reference_size_label(int(count), 0, 0, 0)
    else:
        assert size_label(0) == ""


# Forms


def test_the_vocabulary_alone_needs_no_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    whole = read_gguf(convert(tmp_path).out)
    (tmp_path / "model.safetensors").unlink()
    report = convert(tmp_path, vocab_only=True, verify=True)
    assert report.out.name == "ggml-vocab.gguf"
    assert (report.tensors, report.parameters) == (0, 0)
    file = read_gguf(report.out)
    assert not file.tensors
    for key in whole.metadata:
        if key.startswith(("tokenizer.", "starcoder.")):
            assert file.metadata[key] == whole.metadata[key]


def test_a_vocabulary_alone_without_vocab_size_has_the_tokenizers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, remove=("vocab_size",))
    tokens = read_gguf(convert(tmp_path, vocab_only=True).out).get("tokenizer.ggml.tokens")
    assert len(tokens) == len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])


@pytest.mark.parametrize("tied", [True, False])
def test_expanding_repeats_keys_and_values_as_the_first_converter_did(tied: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, tied=tied, positions=96)
    report = convert(tmp_path, to="f32", expand_mqa=True, verify=True)
    expected = gguf_tensors(model)
    for i in range(2):
        for part in ("weight", "bias"):
            q, k, v = np.split(expected[f"blk.{i}.attn_qkv.{part}"], (64, 80))
            tiles = (4, 1) if part == "weight" else (4,)
            expected[f"blk.{i}.attn_qkv.{part}"] = np.concatenate((q, np.tile(k, tiles), np.tile(v, tiles)))
    assert_same_arrays(arrays_of(report.out), expected)
    file = read_gguf(report.out)
    assert file.get("starcoder.attention.head_count_kv") == 4
    assert file.get("starcoder.max_position_embeddings") == file.get("starcoder.context_length") == 96


def test_expanding_many_heads_changes_no_tensor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, multi_query=False)
    file = read_gguf(convert(tmp_path, to="f32", expand_mqa=True).out)
    assert_same_arrays({name: file.array(name) for name in file.tensors}, gguf_tensors(model))
    assert file.get("starcoder.max_position_embeddings") == 128


# Ties


def test_a_head_stored_beside_an_equal_embedding_is_left_out(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    state = state_of(tmp_path)
    store(tmp_path, {**state, "lm_head.weight": state["transformer.wte.weight"].clone()})
    report = convert(tmp_path, to="f32")
    assert_same_arrays(arrays_of(report.out), gguf_tensors(model))
    assert report.notes == []
    edit_config(tmp_path, tie_word_embeddings=False)
    assert "lm_head.weight equals transformer.wte.weight" in convert(tmp_path, to="f32", force=True).notes[0]


@pytest.mark.parametrize("row", [0, 319])
@pytest.mark.parametrize("says", [True, None])
def test_a_config_that_says_tied_over_different_tensors_is_an_error(
    says: Any, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starscope.mapping.COMPARED_BYTES", 1000)
    make_checkpoint(tmp_path)
    state = state_of(tmp_path)
    head = state["transformer.wte.weight"].clone()
    head[row, 63] += 1e-6
    store(tmp_path, {**state, "lm_head.weight": head})
    if says is None:
        edit_config(tmp_path, remove=("tie_word_embeddings",))
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs from transformer\.wte\.weight"
    ):
        convert(tmp_path)


@pytest.mark.parametrize("missing", ["lm_head.weight", "transformer.wte.weight"])
def test_a_missing_tensor_that_the_config_says_is_not_tied_is_an_error(missing: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=False)
    state = state_of(tmp_path)
    del state[missing]
    store(tmp_path, state)
    with pytest.raises(CheckpointError, match=f"has no {missing}, and config.json has tie_word_embeddings = false"):
        convert(tmp_path)


def test_a_head_without_an_embedding_is_the_embedding(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    state = state_of(tmp_path)
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    store(tmp_path, state)
    edit_config(tmp_path, remove=("vocab_size",))
    report = convert(tmp_path, to="f32")
    assert_same_arrays(arrays_of(report.out), gguf_tensors(model))
    assert [note.split(";")[0] for note in report.notes] == [
        "config.json has no vocab_size",
        "transformer.wte.weight is not stored",
    ]


# What does not fit together


def change(name: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        state = state_of(folder)
        tensor = state.pop(name, torch.zeros(3))
        store(folder, state if make is None else {**state, name: make(tensor)})

    return changed


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "a missing bias": (
        change("transformer.h.1.attn.c_attn.bias", None),
        CheckpointError,
        r"has no transformer\.h\.1\.attn\.c_attn\.bias; gpt_bigcode needs it",
    ),
    "a left-over tensor": (
        change("transformer.h.2.ln_1.weight", lambda t: t),
        CheckpointError,
        r"gpt_bigcode of 2 layers does not know: transformer\.h\.2\.ln_1\.weight",
    ),
    "another shape": (
        change("transformer.h.0.attn.c_attn.weight", lambda t: t[:-1]),
        CheckpointError,
        r"c_attn\.weight is \[95 64\]; expected \[96 64\] from config\.json \(.*num_kv_heads 1",
    ),
    "a turned tensor": (
        change("transformer.h.0.mlp.c_fc.weight", lambda t: t.T),
        CheckpointError,
        r"c_fc\.weight is \[64 256\]; expected \[256 64\]",
    ),
    "integers": (
        change("transformer.h.0.ln_1.weight", lambda t: t.to(torch.int32)),
        UnsupportedError,
        r"h\.0\.ln_1\.weight is stored as I32; supported: F32, F16, BF16",
    ),
    "more rows than vocab_size": (
        lambda folder: edit_config(folder, vocab_size=319),
        CheckpointError,
        r"transformer\.wte\.weight is \[320 64\]; expected \[319 64\]",
    ),
    "the other multi_query": (
        lambda folder: edit_config(folder, remove=("num_key_value_heads",), multi_query=False),
        CheckpointError,
        r"is \[96 64\]; expected \[192 64\].*num_kv_heads 4",
    ),
    "an unknown key": (
        lambda folder: edit_config(folder, rotary_dim=4),
        UnsupportedError,
        r"keys that gpt_bigcode does not know: rotary_dim = 4",
    ),
    "another architecture": (
        lambda folder: edit_config(folder, architectures=["BertForTokenClassification"]),
        UnsupportedError,
        r"says BertForTokenClassification; supported: GPTBigCodeForCausalLM",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), InputError, "tokenizer"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_does_not_fit_together_is_refused_and_nothing_written(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    spoil_folder, error, message = BAD_FOLDERS[name]
    spoil_folder(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        convert(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_vocabulary_longer_than_the_embedding_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "small", vocab_size=280)
    make_checkpoint(tmp_path / "large", vocab_size=320)
    shutil.copy(tmp_path / "large" / "tokenizer.json", tmp_path / "small" / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"has 307 tokens.*the embedding has 280 rows"):
        convert(tmp_path / "small")


def test_an_unknown_key_can_be_allowed_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, rotary_dim=4)
    assert convert(tmp_path, allow_unknown=["rotary_dim"]).tensors


def test_causal_masks_kept_as_buffers_are_passed_over(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(8, 8, dtype=torch.bool) for i in range(2)}
    store(tmp_path, {**state_of(tmp_path), **masks, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})
    assert_same_arrays(arrays_of(convert(tmp_path, to="f32").out), gguf_tensors(model))


def test_a_merge_that_the_vocabulary_lacks_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["ret"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerError, match="has no 'ret'"):
        convert(tmp_path, to="f32")
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("to", ["q3_k", "f64", ""])
def test_a_type_that_cannot_be_written_is_refused_with_those_that_can(to: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="expected one of F32, F16, Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, BF16"):
        convert(tmp_path, to=to)


# Verification


@pytest.mark.parametrize("to", ["f32", "f16", "q4_0"])
def test_verification_finds_one_wrong_bit_and_keeps_nothing(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    written = starscope.convert.write_gguf

    def write_with_an_error(path: Path, metadata: Any, tensors: Any, *, check: Any, **options: Any) -> int:
        def spoil_and_check(temporary: Path) -> None:
            with read_gguf(temporary) as file:
                at = file.tensors["blk.1.ffn_up.weight"].offset + 40
            data = bytearray(temporary.read_bytes())
            data[at] ^= 8
            temporary.write_bytes(data)
            check(temporary)

        return written(path, metadata, tensors, check=spoil_and_check, **options)

    closed: list[WeightFile] = []

    class Watched(WeightFile):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(starscope.convert, "write_gguf", write_with_an_error)
    monkeypatch.setattr(starscope.convert, "WeightFile", Watched)
    message = (
        rf"blk\.1\.ffn_up\.weight differs from transformer\.h\.1\.mlp\.c_fc\.weight rounded to {to.upper()} in 1 value"
    )
    with pytest.raises(VerificationError, match=message + r" from row \d+ on, by up to \d") as caught:
        convert(tmp_path, out, to=to, verify=True, force=True)
    assert len(closed) == 1, caught  # while the error keeps the function's frame
    assert out.read_bytes() == b"before"
    assert not list(tmp_path.glob(".starscope*"))


def test_a_family_without_a_repeated_form_refuses_to_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from starscope import family

    make_checkpoint(tmp_path)
    plain = replace(family.find_family("gpt_bigcode"), expand=None)
    monkeypatch.setattr(family, "all_families", lambda: {"gpt_bigcode": plain})
    with pytest.raises(UsageError, match="gpt_bigcode has no form with repeated keys and values"):
        convert(tmp_path, expand_mqa=True)
