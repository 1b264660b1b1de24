"""A Hugging Face folder made of a model: transformers computes the same with it, and it converts back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.errors import OutputExistsError, UnsupportedError
from starscope.export import export_gguf, write_folder
from starscope.family import all_families, find_family, read_config, write_config
from starscope.formats import decode, encode, find_format
from starscope.tokenizer import Tokenizer
from starscope.train.optim import initial_weights
from starscope.train.output import write_model
from starscope.train.presets import family_sizes
from starscope.train.settings import resolve
from support.training import DOCUMENTS, tiny_bpe, tiny_graph, tiny_ids

IDS = tiny_ids()[:30].tolist()
ULP = 2.0**-23
HEADS = [{}, {"num_kv_heads": 4}, {"activation": "gelu"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_bpe().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer.from_folder(folder)


def transformers_logits(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits.float().numpy()


def write(path: Path, tokenizer: Tokenizer, to: str, **changes: object) -> None:
    graph = tiny_graph(**changes)
    write_model(path, graph, initial_weights(graph, 3), tokenizer, to=to, probe=IDS)


@pytest.mark.parametrize("changes", HEADS, ids=str)
@pytest.mark.parametrize("to", ["f32", "q8_0"])
def test_transformers_computes_the_logits_of_the_file(tmp_path, tokenizer, changes, to):
    path, folder = tmp_path / "a.gguf", tmp_path / "hf"
    write(path, tokenizer, to, **changes)
    export_gguf(path, folder)
    found, expected = transformers_logits(folder), np.asarray(starscope.load(folder, engine="numpy").forward(IDS))
    assert np.abs(found - expected).max() <= 32 * ULP * np.abs(expected).max()
    stored = starscope.load(path, engine="numpy")
    for name, array in starscope.load(folder, engine="numpy").weights.items():
        assert array.tobytes() == stored.weights[name].tobytes()


def test_transformers_reads_the_tokenizer_as_the_file_has_it(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    write(tmp_path / "a.gguf", tokenizer, "f32")
    export_gguf(tmp_path / "a.gguf", tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in DOCUMENTS:
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.convert_tokens_to_ids("<fim_middle>") == tokenizer.fim.middle
    ours = Tokenizer.from_folder(tmp_path / "hf")
    assert list(ours.vocabulary) == list(tokenizer.vocabulary)
    assert (ours.bos_id, ours.eos_id, ours.stop_ids, ours.fim) == (0, 0, tokenizer.stop_ids, tokenizer.fim)


def test_the_folder_converts_to_the_file_that_it_came_from(tmp_path, tokenizer):
    write(tmp_path / "a.gguf", tokenizer, "f32")
    export_gguf(tmp_path / "a.gguf", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "b.gguf", to="f32")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_half_precision_rounds_every_tensor_once(tmp_path, tokenizer, to):
    graph = tiny_graph()
    weights = initial_weights(graph, 0)
    write_folder(tmp_path / "hf", graph.family, graph.hp, weights, tokenizer, to=to)
    format_ = find_format(to)
    for name, array in starscope.load(tmp_path / "hf", engine="numpy").weights.items():
        wanted = weights.get(name, weights["embed_tokens.weight"])
        assert array.tobytes() == decode(format_, encode(format_, np.atleast_2d(wanted))).tobytes()


@pytest.mark.parametrize("family", all_families().values(), ids=lambda family: family.name)
def test_every_familys_config_is_read_as_it_was_written(family):
    hp = family_sizes(family, resolve({}).sizes, 300)
    assert read_config(family, write_config(family, hp)) == hp


@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_a_config_says_heads_and_activation(changes):
    hp = tiny_graph(**changes).hp
    assert read_config(find_family("gpt_bigcode"), write_config(find_family("gpt_bigcode"), hp)) == hp


def test_a_folder_that_is_there_is_replaced_only_when_asked_and_only_by_a_whole_one(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "a.gguf", tokenizer, "f32")
    folder = tmp_path / "hf"
    export_gguf(tmp_path / "a.gguf", folder)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(OutputExistsError, match="hf exists"):
        export_gguf(tmp_path / "a.gguf", folder)
    monkeypatch.setattr("starscope.export._write_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_gguf(tmp_path / "a.gguf", folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "hf", "tokenizer"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    with pytest.raises(OutputExistsError, match=r"mine has thesis\.txt, which is not part of an exported model"):
        export_gguf(tmp_path / "a.gguf", tmp_path / "mine", force=True)


def test_a_folder_is_never_replaced_with_what_else_is_in_it(tmp_path, tokenizer):
    """Its own source least of all."""
    folder = tmp_path / "hf"
    write(tmp_path / "a.gguf", tokenizer, "f32")
    export_gguf(tmp_path / "a.gguf", folder)
    (folder / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    for extra in ("a.gguf", "notes.txt"):
        (folder / extra).touch()
        with pytest.raises(OutputExistsError, match=f"hf has {extra}, which is not part of an exported model"):
            export_gguf(folder / "a.gguf" if extra == "a.gguf" else tmp_path / "a.gguf", folder, force=True)
        assert (folder / extra).exists()
        (folder / extra).unlink()
    export_gguf(tmp_path / "a.gguf", folder, force=True)


def test_a_link_to_a_folder_stays_one(tmp_path, tokenizer):
    write(tmp_path / "a.gguf", tokenizer, "f32")
    export_gguf(tmp_path / "a.gguf", tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "there" / "model.safetensors").write_bytes(b"old")
    export_gguf(tmp_path / "a.gguf", tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "model.safetensors").stat().st_size > 1000
    assert not list(tmp_path.glob(".starscope*"))


def test_a_type_that_such_a_folder_cannot_have_is_refused(tmp_path, tokenizer):
    write(tmp_path / "a.gguf", tokenizer, "f32")
    with pytest.raises(UnsupportedError, match="'q8_0'; supported: f32, f16, bf16"):
        export_gguf(tmp_path / "a.gguf", tmp_path / "hf", to="q8_0")
