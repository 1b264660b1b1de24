"""load() and Model: what users call, and what a file that does not fit together is answered with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.errors import (
    CheckpointError,
    ContextOverflowError,
    GGUFError,
    InputError,
    InvalidContentError,
    UnsupportedError,
    UsageError,
)
from starscope.formats import find_format
from starscope.gguf.format import Value, string, u32
from starscope.gguf.reader import read_gguf
from starscope.gguf.writer import OutputTensor, write_gguf
from support.checkpoints import make_checkpoint
from support.numbers import ulps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return convert(folder, folder / "model.gguf", to="f32").out


@pytest.fixture(scope="module")
def model(path: Path) -> starscope.Model:
    return starscope.load(path)


def edited(path: Path, out: Path, change: Callable[[dict[str, Value], list[OutputTensor]], None]) -> Path:
    """A copy of a GGUF file with its metadata and tensors changed."""
    with read_gguf(path) as file:
        metadata = dict(file.metadata)
        tensors = [
            OutputTensor(i.name, i.shape, i.format, partial(list, [np.array(file.raw(i.name))]))  # type: ignore[arg-type]
            for i in file.tensors.values()
        ]
    change(metadata, tensors)
    write_gguf(out, metadata, tensors)
    return out


def test_sizes_are_the_models(model: starscope.Model) -> None:
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim)
    assert sizes == (2, 64, 4, 1, 16)
    assert (model.qk_head_dim, model.intermediate_size, model.vocab_size, model.context_length) == (16, 256, 320, 128)


def test_forward_gives_float32_logits_batch_first(model: starscope.Model) -> None:
    logits = model.forward([1, 2, 3])
    assert isinstance(logits, torch.Tensor)
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 3, 320)
    for same in (torch.tensor([1, 2, 3]), np.array([[1, 2, 3]]), [[1, 2, 3]], torch.tensor([[1, 2, 3]]), (1, 2, 3)):
        torch.testing.assert_close(model.forward(same), logits, rtol=0, atol=0)


def test_without_torch_forward_gives_numpy(model: starscope.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(model.forward([1, 2, 3]), np.ndarray)


def test_sequences_of_different_lengths_end_at_the_same_column(model: starscope.Model) -> None:
    logits = model.forward([[5, 6, 7, 8], [9]])
    assert logits.shape == (2, 4, 320)
    assert ulps(logits[1, -1], model.forward([9])[0, 0]) <= 32
    assert not logits[1, :3].any()


def test_a_batch_of_embeddings_runs(model: starscope.Model) -> None:
    table = model.weights["embed_tokens.weight"]
    batch = np.stack([table[[1, 2]], table[[3, 4]]])
    assert ulps(model.forward(batch), model.forward([[1, 2], [3, 4]])) <= 32


def test_the_pieces_of_a_stream_are_the_completion(model: starscope.Model) -> None:
    whole = model.generate("def f(", max_new_tokens=30)
    pieces = list(model.generate("def f(", max_new_tokens=30, stream=True))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].completion is not None
    assert pieces[-1].completion.token_ids == whole.token_ids
    assert len(whole.token_ids) == 30
    assert whole.finish_reason == "length"


def test_two_streams_at_once_do_not_disturb_each_other(model: starscope.Model) -> None:
    alone = [model.generate(p, max_new_tokens=12).text for p in ("def a", "x = 1")]
    one, two = (model.generate(p, max_new_tokens=12, stream=True) for p in ("def a", "x = 1"))
    first, second = [next(one).text], [next(two).text]
    for a in one:
        first.append(a.text)
        second.append(next(two).text)
    second += [b.text for b in two]
    assert ["".join(first), "".join(second)] == alone


def test_a_reused_prefix_changes_no_token(model: starscope.Model, path: Path) -> None:
    for prompt in ("def add(a, b):", "def add(a, c):", "def add(a", "def add(a, b): return"):
        assert (
            model.generate(prompt, max_new_tokens=8).token_ids
            == starscope.load(path).generate(prompt, max_new_tokens=8).token_ids
        )


def test_a_suffix_asks_for_what_is_between(model: starscope.Model) -> None:
    fim = model.tokenizer.fim
    assert fim is not None
    ids = [fim.prefix, *model.tokenizer.encode("a = "), fim.suffix, *model.tokenizer.encode("\nb"), fim.middle]
    assert (
        model.generate("a = ", suffix="\nb", max_new_tokens=6).token_ids
        == model.generate(ids, max_new_tokens=6).token_ids
    )


def test_what_is_left_out_around_a_hole_is_counted(model: starscope.Model) -> None:
    assert model.generate("a = 1\n" * 8, suffix="b", max_new_tokens=3).dropped_tokens == 0
    long = "a = 1\n" * 80
    done = model.generate(long, suffix="b", max_new_tokens=3)
    assert done.dropped_tokens == len(model.tokenizer.encode(long)) + 1 + 3 - done.prompt_tokens > 0
    assert done.prompt_tokens == model.context_length - 3


def test_text_that_spells_a_special_token_stays_text(model: starscope.Model) -> None:
    ids = model.tokenizer.encode("<fim_suffix>")
    assert len(ids) > 1
    special = model.generate(model.tokenizer.encode("<fim_suffix>", special=True), max_new_tokens=1)
    assert special.prompt_tokens == 1
    assert model.generate("<fim_suffix>", max_new_tokens=1).prompt_tokens == len(ids)


def test_a_prompt_over_the_context_is_an_error_with_both_numbers(model: starscope.Model) -> None:
    with pytest.raises(ContextOverflowError, match=r"129 tokens.*128"):
        model.generate([1] * 129)
    with pytest.raises(ContextOverflowError, match=r"129 tokens.*128"):
        model.forward([1] * 129)


def test_generation_that_reaches_the_end_of_the_context_ends_by_length(model: starscope.Model) -> None:
    done = model.generate([1] * 120, max_new_tokens=50)
    assert done.finish_reason in {"length", "stop"}
    assert len(done.token_ids) <= 9


def test_a_shorter_context_is_honoured(path: Path) -> None:
    model = starscope.load(path, context_length=10)
    assert model.context_length == 10
    with pytest.raises(ContextOverflowError, match=r"11 tokens.*10"):
        model.generate([1] * 11)


def test_the_vocabulary_is_pieces_scores_and_types(model: starscope.Model) -> None:
    vocab = model.vocab()
    assert len(vocab) == 320
    assert vocab[0] == ("<|endoftext|>", 0.0, 3)
    assert vocab[319] == ("[PAD319]", 0.0, 5)
    assert all(isinstance(p, str) and isinstance(s, float) and type(t) is int for p, s, t in vocab)


def test_wrong_options_are_refused(model: starscope.Model, path: Path) -> None:
    for count in (-1, 2.5, "3", None, True):
        with pytest.raises(UsageError, match="max_new_tokens"):
            model.generate("x", max_new_tokens=count)  # type: ignore[call-overload]
    with pytest.raises(UsageError):
        model.generate("x", temperature=-1)
    with pytest.raises(UsageError, match="numpy, torch"):
        starscope.load(path, engine="quick")


@pytest.mark.parametrize(
    "options",
    [
        {"suffix": ["a"]},
        {"suffix": 5},
        {"stop": None},
        {"stop": [5]},
        {"logprobs": 2.5},
        {"logprobs": None},
        {"prompt": []},
    ],
    ids=str,
)
def test_options_of_the_wrong_type_are_refused_in_words(model: starscope.Model, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        model.generate(**{"prompt": "x", "max_new_tokens": 2, **options})


@pytest.mark.parametrize("prompt", [b"def", 3, [1.5], [None], [b"a"], None], ids=repr)
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(model: starscope.Model, prompt: Any) -> None:
    with pytest.raises(InvalidContentError, match="expected text or token ids"):
        model.generate(prompt)


def test_embeddings_in_bfloat16_run_as_float32(model: starscope.Model) -> None:
    table = torch.tensor(model.weights["embed_tokens.weight"][[1, 2]]).bfloat16()
    torch.testing.assert_close(model.forward(table), model.forward(table.float()), rtol=0, atol=0)


def test_a_name_that_is_empty_or_a_link_in_a_circle_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        starscope.load("")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    with pytest.raises(InputError, match="leads back to itself"):
        starscope.load(tmp_path / "loop.gguf")


@pytest.mark.parametrize(
    "ids",
    [np.array(3), iter([1]), "def", b"def", 3, None, [], [[]], [["a"]], [[[1]]]],
    ids=lambda value: repr(value).partition(" at ")[0],
)
def test_what_forward_cannot_run_is_refused(model: starscope.Model, ids: Any) -> None:
    with pytest.raises(InvalidContentError):
        model.forward(ids)


def test_what_is_not_there_or_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        starscope.load(tmp_path / "none.gguf")
    with pytest.raises(InputError, match=r"config\.json"):
        starscope.load(tmp_path)
    (tmp_path / "text.gguf").write_text("hello there, this is no model at all")
    with pytest.raises(GGUFError):
        starscope.load(tmp_path / "text.gguf")


def test_a_missing_activation_is_assumed_with_a_note(path: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        del metadata["starcoder.hidden_activation"]

    model = starscope.load(edited(path, tmp_path / "m.gguf", change))
    assert model.hparams.activation == "gelu_pytorch_tanh"
    assert any("hidden_activation" in note for note in model.notes)
    assert starscope.load(path).notes == []


def test_an_unsupported_architecture_is_named_with_the_supported_ones(path: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        metadata["general.architecture"] = string("mamba")

    with pytest.raises(UnsupportedError, match=r"'mamba'.*starcoder"):
        starscope.load(edited(path, tmp_path / "m.gguf", change))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_qkv.bias", "output_norm.weight"])
def test_a_missing_tensor_is_named(path: Path, tmp_path: Path, name: str) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        tensors[:] = [t for t in tensors if t.name != name]

    with pytest.raises(GGUFError, match=name):
        starscope.load(edited(path, tmp_path / "m.gguf", change))


def test_a_tensor_too_many_is_named(path: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        tensors.append(
            OutputTensor("blk.0.ffn_gate.weight", (2, 2), find_format("F32"), lambda: [np.zeros(16, np.uint8)])
        )

    with pytest.raises(GGUFError, match=r"blk\.0\.ffn_gate\.weight"):
        starscope.load(edited(path, tmp_path / "m.gguf", change))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("starcoder.embedding_length", 60, r"\[320 64\]; expected \[320 60\]"),
        ("starcoder.context_length", 2**20, r"position_embd\.weight is \[128 64\]"),
        ("starcoder.block_count", 3, r"blk\.2\.attn_norm"),
        ("starcoder.block_count", 1, r"blk\.1\."),
        ("starcoder.attention.head_count_kv", 4, r"attn_qkv\.weight is \[96 64\]; expected \[192 64\]"),
        ("starcoder.attention.head_count_kv", 3, "num_kv_heads"),
        ("starcoder.attention.head_count", 0, r"head_count is 0; expected 1 to .* for num_heads"),
        ("starcoder.attention.head_count", 5, "divide"),
        ("starcoder.feed_forward_length", 128, r"ffn_up"),
    ],
)
def test_sizes_that_do_not_fit_the_tensors_are_refused(
    path: Path, tmp_path: Path, key: str, value: int, match: str
) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        metadata[key] = u32(value)

    with pytest.raises(GGUFError, match=match):
        starscope.load(edited(path, tmp_path / "m.gguf", change))


@pytest.mark.parametrize("key", ["starcoder.block_count", "starcoder.embedding_length", "starcoder.context_length"])
def test_a_missing_or_mistyped_key_is_named(path: Path, tmp_path: Path, key: str) -> None:
    def remove(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        del metadata[key]

    def mistype(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        metadata[key] = string("many")

    for name, change in (("a", remove), ("b", mistype)):
        with pytest.raises(GGUFError, match=key):
            starscope.load(edited(path, tmp_path / f"{name}.gguf", change))


@pytest.mark.parametrize("version", [u32(1), u32(3), string("2"), None], ids=repr)
def test_quant_blocks_of_another_version_are_refused(folder: Path, tmp_path: Path, version: Value | None) -> None:
    def change(metadata: dict[str, Value], tensors: list[OutputTensor]) -> None:
        if version is None:
            del metadata["general.quantization_version"]
        else:
            metadata["general.quantization_version"] = version

    plain, blocks = (
        edited(convert(folder, tmp_path / f"{to}.gguf", to=to).out, tmp_path / f"{to}-edited.gguf", change)
        for to in ("f16", "q8_0")
    )
    starscope.load(plain)  # it has none
    if version is None:
        starscope.load(blocks)  # nor does it say so: not every writer does
        return
    with pytest.raises(UnsupportedError, match=r"general\.quantization_version is .*; starscope reads quant blocks of"):
        starscope.load(blocks)


def test_a_vocabulary_without_tensors_is_no_model(folder: Path, tmp_path: Path) -> None:
    out = convert(folder, tmp_path / "vocab.gguf", vocab_only=True).out
    with pytest.raises(GGUFError, match="no tensors"):
        starscope.load(out)


def test_a_quantized_file_runs_close_to_its_source(folder: Path, model: starscope.Model, tmp_path: Path) -> None:
    expected = model.forward([1, 2, 3, 4]).numpy()
    # The native engine attends with numbers rounded to bfloat16, by half a unit of 2^-7, unless the file is F32.
    for to, bound in (("f16", 2**-8), ("bf16", 2e-2), ("q8_0", 3e-2), ("q4_0", 0.3)):
        found = starscope.load(convert(folder, tmp_path / f"{to}.gguf", to=to).out).forward([1, 2, 3, 4]).numpy()
        assert 0 < np.abs(found - expected).max() / np.abs(expected).max() < bound


def test_a_folder_whose_vocabulary_is_longer_than_its_embedding_is_refused(tmp_path: Path) -> None:
    from support.checkpoints import make_tokenizer

    make_checkpoint(tmp_path, vocab_size=290)
    make_tokenizer(tmp_path, 320)
    with pytest.raises(CheckpointError, match=r"\d+ tokens for 290 embeddings"):
        starscope.load(tmp_path)
