"""What a conversion tells a person: ids that are no tokens, values that are not finite, what had no effect, counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import starscope.convert
from starscope.checkpoint import open_checkpoint
from starscope.convert import convert
from starscope.errors import CheckpointError, UnsupportedError
from starscope.family import find_family_for_config
from starscope.gguf import read_gguf
from starscope.mapping import checkpoint_hparams, count_parameters
from support.checkpoints import edit_config, make_checkpoint, make_santacoder, store_as_torch

NORM = "transformer.h.1.ln_1.weight"
MATRIX = "transformer.h.0.mlp.c_fc.weight"


def spoil(folder: Path, values: dict[str, list[float]]) -> None:
    """Put values at the beginning of tensors."""
    state = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, begin in values.items():
        state[name].view(-1)[: len(begin)] = torch.tensor(begin, dtype=state[name].dtype)
    save_file(state, folder / "model.safetensors")


# Values that are not finite


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to", ["f32", "f16", "bf16"])
def test_values_that_are_not_finite_are_counted_and_the_first_tensor_named(
    to: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, dtype=dtype)
    nan, inf = float("nan"), float("inf")
    spoil(tmp_path, {NORM: [nan], MATRIX: [1.0, nan, -inf, inf, -0.0]})
    monkeypatch.setattr(starscope.convert, "CHUNK_BYTES", 5000)
    [note] = convert(tmp_path, to=to, verify=True).notes
    assert note.startswith(f"4 values are not finite (NaN or infinite), the first in {MATRIX};")


@pytest.mark.parametrize("to", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_value_of_a_norm_is_seen_in_every_format(value: float, to: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    spoil(tmp_path, {NORM: [value]})
    assert any(
        f"1 value is not finite (NaN or infinite), the first in {NORM}" in n for n in convert(tmp_path, to=to).notes
    )


@pytest.mark.parametrize("to", ["q8_0", "q4_0"])
def test_blocks_refuse_what_is_not_finite(to: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    spoil(tmp_path, {MATRIX: [float("nan")]})
    with pytest.raises(UnsupportedError, match=r"c_fc\.weight holds a value that is not finite"):
        convert(tmp_path, to=to)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_and_smallest_numbers_are_finite(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=dtype)
    info = torch.finfo(getattr(torch, dtype))
    spoil(tmp_path, {MATRIX: [info.max, info.min, info.tiny, -0.0, 0.0]})
    assert convert(tmp_path, to="f32").notes == []


# Ids


@pytest.mark.parametrize("value", [-5, 9999, [0, 50256]])
def test_an_end_token_outside_the_vocabulary_is_noted(value: object, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, eos_token_id=value)
    for vocab_only in (False, True):
        notes = convert(tmp_path, vocab_only=vocab_only).notes
        assert [note for note in notes if f"config.json: eos_token_id is {value}" in note and "tokens" in note] == notes
        assert len(notes) == 1


def test_an_id_that_is_a_text_is_an_error_about_config_json(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, eos_token_id="0")
    with pytest.raises(Exception, match=r"/config\.json: eos_token_id is '0'"):
        convert(tmp_path)


def test_a_model_type_of_another_family_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(CheckpointError, match=r"model_type is 'llama'; expected gpt_bigcode or gpt2"):
        convert(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_model_type_that_is_also_of_other_models_names_none(model_type: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, architectures=None, model_type=model_type)
    with pytest.raises(UnsupportedError, match=f"no architecture .model_type '{model_type}'.; supported: GPTBigCode"):
        convert(tmp_path)


# Options and counts


def test_options_that_a_vocabulary_alone_leaves_without_effect_are_noted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    plain = convert(tmp_path, tmp_path / "plain.gguf", vocab_only=True)
    asked = convert(tmp_path, tmp_path / "asked.gguf", vocab_only=True, expand_mqa=True, to="q8_0")
    assert plain.notes == []
    assert asked.notes == ["a vocabulary-only file has no weights; without effect: the type q8_0, repeated key heads."]
    assert asked.out.read_bytes() == plain.out.read_bytes()


@pytest.mark.parametrize("expand_mqa", [False, True])
def test_parameters_are_the_values_that_the_file_holds(expand_mqa: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    report = convert(tmp_path, expand_mqa=expand_mqa)
    with read_gguf(report.out) as file:
        assert report.parameters == sum(int(np.prod(info.shape)) for info in file.tensors.values())


@pytest.mark.parametrize("form", ["tied", "untied", "first SantaCoder"])
def test_a_folder_of_pytorch_files_is_counted_as_it_is_converted(form: str, tmp_path: Path) -> None:
    if form == "first SantaCoder":
        make_santacoder(tmp_path)
    else:
        state = make_checkpoint(tmp_path, tied=form == "tied").state_dict()
        masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool) for i in range(2)}
        store_as_torch(tmp_path, {**state, **masks}, shards=2)
    with open_checkpoint(tmp_path) as checkpoint:
        family = find_family_for_config(checkpoint.config)
        found = count_parameters(family, checkpoint, checkpoint_hparams(family, checkpoint))
    assert found == convert(tmp_path).parameters
