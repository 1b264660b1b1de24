"""What training ends with: a GGUF file that is checked before it takes its name."""

from __future__ import annotations

import json

import numpy as np
import pytest

import starscope
from starscope.errors import OutputExistsError, VerificationError
from starscope.tokenizer import Tokenizer
from starscope.train import output
from starscope.train.optim import initial_weights
from starscope.train.output import write_model
from support.training import tiny_bpe, tiny_graph, tiny_ids

PROBE = tiny_ids()[:20].tolist()


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_bpe().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer.from_folder(folder)


def write(path, tokenizer, **options):
    graph = tiny_graph()
    values = {"to": "q8_0", "name": "tiny", "license_name": "apache-2.0", "probe": PROBE, **options}
    return write_model(path, graph, initial_weights(graph, 0), tokenizer, **values)


@pytest.mark.parametrize("to", ["f32", "q8_0"])
def test_the_file_loads_and_runs(tmp_path, tokenizer, to):
    path = tmp_path / "a.gguf"
    assert write(path, tokenizer, to=to) == path.stat().st_size
    model = starscope.load(path, engine="numpy")
    assert model.tokenizer.encode("def add(") == tiny_bpe().encode("def add(")
    assert model.tokenizer.fim.prefix == 1
    assert 0 in model.tokenizer.stop_ids
    logits = np.asarray(model.forward(PROBE))
    assert logits.shape[-1] == 300
    assert np.isfinite(logits).all()


def test_the_same_weights_give_the_same_bytes_and_no_path(tmp_path, tokenizer):
    write(tmp_path / "a.gguf", tokenizer)
    write(tmp_path / "b.gguf", tokenizer)
    raw = (tmp_path / "a.gguf").read_bytes()
    assert raw == (tmp_path / "b.gguf").read_bytes()
    assert str(tmp_path).encode() not in raw
    with pytest.raises(OutputExistsError):
        write(tmp_path / "a.gguf", tokenizer)


def test_a_file_that_differs_from_the_weights_never_appears(tmp_path, tokenizer, monkeypatch):
    real = output.encode_checked
    monkeypatch.setattr(output, "encode_checked", lambda name, to, rows: real(name, to, rows))
    monkeypatch.setattr(output, "decode", lambda to, raw: starscope.formats.decode(to, raw) * np.float32(1.001))
    with pytest.raises(VerificationError, match=r"logits are \d+ ulp from the weights"):
        write(tmp_path / "a.gguf", tokenizer)
    assert not (tmp_path / "a.gguf").exists()
