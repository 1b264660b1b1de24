"""Adapters as GGUF files: those of llama.cpp's converter are read, and what is written is read again as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import starscope
from starscope.errors import CheckpointError, StarscopeError, UnsupportedError
from starscope.formats import encode, find_format
from starscope.gguf import OutputTensor, f32, read_gguf, string, write_gguf
from starscope.lora import Pair, read_adapter
from starscope.lora.gguf_file import write_gguf_adapter
from support.adapters import halves, make_adapter, write_folder

IDS = [1, 5, 9, 30, 77, 200, 31, 4]


def write(path: Path, tensors: dict[str, np.ndarray], alpha: float | None = 4.0, **texts: str) -> Path:
    """A file by hand, as llama.cpp's converter lays it out."""
    keys = {"general.type": "adapter", "general.architecture": "starcoder", "adapter.type": "lora"}
    keys |= {name.replace("_", "."): text for name, text in texts.items()}
    metadata = {key: string(text) for key, text in keys.items() if text}
    if alpha is not None:
        metadata["adapter.lora.alpha"] = f32(alpha)
    write_gguf(path, metadata, [stored(name, values) for name, values in tensors.items()], force=True)
    return path


def stored(name: str, values: np.ndarray, form: str = "F32") -> OutputTensor:
    raw = encode(find_format(form), np.ascontiguousarray(values))
    return OutputTensor(name, values.shape, find_format(form), lambda: [raw])


def logits(model, **options):
    return starscope.load(model, engine="numpy", **options).engine.forward([IDS], None, "all")[0]


def test_a_file_by_hand_is_what_the_folder_by_hand_is(checkpoint, tmp_path):
    a, b = halves((96, 64), 2)
    folder = write_folder(tmp_path / "peft", {"r": 2, "lora_alpha": 4}, {"transformer.h.1.attn.c_attn": (a, b)})
    file = write(tmp_path / "a.gguf", {"blk.1.attn_qkv.weight.lora_a": a, "blk.1.attn_qkv.weight.lora_b": b})
    assert np.array_equal(logits(checkpoint, lora=file), logits(checkpoint, lora=folder))


@pytest.mark.parametrize("alpha", [0.0, None])
def test_without_alpha_the_halves_count_as_they_are(checkpoint, alpha, tmp_path):
    a, b = halves((96, 64), 2)
    tensors = {"blk.1.attn_qkv.weight.lora_a": a, "blk.1.attn_qkv.weight.lora_b": b}
    found = logits(checkpoint, lora=write(tmp_path / "a.gguf", tensors, alpha))
    assert np.array_equal(found, logits(checkpoint, lora=write(tmp_path / "b.gguf", tensors, 2.0)))


def test_the_halves_of_the_token_embedding_are_turned_over(checkpoint, tmp_path):
    """llama.cpp takes rows of A by token and multiplies them by B."""
    rng = np.random.default_rng(0)
    rows, b = (rng.standard_normal(size).astype(np.float32) * 0.05 for size in ((320, 3), (64, 3)))
    file = write(tmp_path / "a.gguf", {"token_embd.weight.lora_a": rows, "token_embd.weight.lora_b": b}, 6.0)
    model = starscope.load(checkpoint, engine="numpy", lora=file)
    wanted = starscope.load(checkpoint, engine="numpy").weights["embed_tokens.weight"] + 2 * rows @ b.T
    assert np.allclose(model.weights["embed_tokens.weight"], wanted, atol=1e-6)
    folder = tmp_path / "peft"
    write_folder(
        folder,
        {"r": 3, "lora_alpha": 6},
        {},
        {
            "base_model.model.transformer.wte.lora_embedding_A": np.ascontiguousarray(rows.T),
            "base_model.model.transformer.wte.lora_embedding_B": b,
        },
    )
    assert np.array_equal(logits(checkpoint, lora=file), logits(checkpoint, lora=folder))


@pytest.mark.parametrize("base", ["checkpoint", "multi_head"])
def test_what_is_written_is_read_again_as_it_was(base, request, tmp_path):
    folder = request.getfixturevalue(base)
    make_adapter(
        folder,
        tmp_path / "peft",
        targets=["c_attn", "c_fc", "c_proj", "wte"],
        rank_pattern={"c_fc": 7},
        alpha_pattern={"c_attn": 3},
    )
    model = starscope.load(folder, engine="numpy")
    before = read_adapter(tmp_path / "peft", model.family, model.hparams)
    write_gguf_adapter(tmp_path / "a.gguf", model.family, model.hparams, before.pairs)
    after = read_adapter(tmp_path / "a.gguf", model.family, model.hparams)
    assert before.pairs.keys() == after.pairs.keys()
    for name, pair in before.pairs.items():
        assert np.array_equal(after.pairs[name].a, pair.a)
        change, wanted = (p.scale * p.b @ p.a for p in (after.pairs[name], pair))
        assert np.allclose(change, wanted, rtol=1e-5, atol=1e-8)


def test_the_gguf_library_reads_what_is_written(checkpoint, tmp_path):
    from gguf import GGUFReader

    model = starscope.load(checkpoint, engine="numpy")
    a, b = halves((96, 64), 2)
    pairs = {"layers.0.self_attn.qkv_proj.weight": Pair(a, b, 2.0)}
    write_gguf_adapter(tmp_path / "a.gguf", model.family, model.hparams, pairs, name="mine")
    reader = GGUFReader(tmp_path / "a.gguf")
    assert {t.name: t.data.shape for t in reader.tensors} == {
        "blk.0.attn_qkv.weight.lora_a": (2, 64),
        "blk.0.attn_qkv.weight.lora_b": (96, 2),
    }
    assert reader.get_field("general.type").contents() == "adapter"
    assert reader.get_field("adapter.type").contents() == "lora"
    assert reader.get_field("adapter.lora.alpha").contents() == 4.0


def test_the_same_pairs_give_the_same_bytes(checkpoint, tmp_path):
    model = starscope.load(checkpoint, engine="numpy")
    pairs = {"layers.0.self_attn.qkv_proj.weight": Pair(*halves((96, 64), 2), 2.0)}
    for name in ("a", "b"):
        write_gguf_adapter(tmp_path / name, model.family, model.hparams, pairs)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


PAIR = dict(zip(("blk.0.attn_qkv.weight.lora_a", "blk.0.attn_qkv.weight.lora_b"), halves((96, 64), 2), strict=True))

WRONG = {
    "a model": (
        PAIR,
        {"general_type": "model"},
        CheckpointError,
        "expected 'adapter'",
    ),
    "no kind": (PAIR, {"general_type": ""}, CheckpointError, "general.type is None"),
    "another kind": (PAIR, {"adapter_type": "dora"}, CheckpointError, "adapter.type is 'dora'"),
    "another architecture": (PAIR, {"general_architecture": "llama"}, CheckpointError, "for 'llama'.*'starcoder'"),
    "no tensor": ({}, {}, CheckpointError, "no tensor"),
    "half": (dict(list(PAIR.items())[:1]), {}, CheckpointError, "without its other half"),
    "other half": (dict(list(PAIR.items())[1:]), {}, CheckpointError, "without its other half"),
    "no half": ({"blk.0.attn_qkv.weight": PAIR["blk.0.attn_qkv.weight.lora_a"]}, {}, CheckpointError, "not halves"),
    "another block": (
        {name.replace("blk.0", "blk.7"): values for name, values in PAIR.items()},
        {},
        CheckpointError,
        "2 layers: blk.7",
    ),
    "a norm": ({"blk.0.attn_norm.weight": np.ones(64, np.float32)}, {}, CheckpointError, "not halves"),
    "a vector": (
        {f"blk.0.attn_norm.weight.lora_{h}": np.ones((2, 2), np.float32) for h in "ab"},
        {},
        CheckpointError,
        "not a matrix",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_no_adapter_of_this_model_is_refused(checkpoint, what, tmp_path):
    tensors, texts, error, message = WRONG[what]
    file = write(tmp_path / "a.gguf", tensors, **texts)
    with pytest.raises(error, match=message):
        starscope.load(checkpoint, engine="numpy", lora=file)


def test_the_form_of_2023_is_named(checkpoint, tmp_path):
    (tmp_path / "ggml-adapter-model.bin.gguf").write_bytes(b"algg" + bytes(64))
    with pytest.raises(UnsupportedError, match="2023"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path / "ggml-adapter-model.bin.gguf")


def test_a_cut_file_is_an_error_wherever_it_is_cut(checkpoint, tmp_path):
    whole = write(tmp_path / "a.gguf", PAIR).read_bytes()
    for length in range(0, len(whole) - 1, 97):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(StarscopeError):
            starscope.load(checkpoint, engine="numpy", lora=tmp_path / "cut.gguf")


def test_quantized_halves_are_decoded(checkpoint, tmp_path):
    a, b = halves((96, 64), 32)
    outputs = [stored(f"blk.0.attn_qkv.weight.lora_{h}", x, "Q8_0") for h, x in (("a", a), ("b", b))]
    keys = {"general.type": "adapter", "general.architecture": "starcoder", "adapter.type": "lora"}
    metadata = {key: string(text) for key, text in keys.items()}
    write_gguf(tmp_path / "a.gguf", metadata, outputs)
    model = starscope.load(checkpoint, engine="numpy")
    found = read_adapter(tmp_path / "a.gguf", model.family, model.hparams).pairs["layers.0.self_attn.qkv_proj.weight"]
    assert np.abs(found.a - a).max() < 0.002
    with read_gguf(tmp_path / "a.gguf") as file:
        assert np.array_equal(found.b, file.array("blk.0.attn_qkv.weight.lora_b"))
