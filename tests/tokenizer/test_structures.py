"""Pre-tokenizers beside StarCoder's: LLaMA 3's and DeepSeek's, by the steps of a tokenizer.json and by name."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from starscope.errors import UnsupportedError
from starscope.gguf import ValueType, array, read_gguf, string, strings, u32, write_gguf
from starscope.tokenizer import Tokenizer
from support.vocabularies import added_token, gguf_metadata, read_packed, whole_json

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
STEPS = {
    "llama-bpe": [split(LLAMA_3), BYTES],
    "smaug-bpe": [split(LLAMA_3), BYTES],
    "deepseek-coder": [
        split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"), DIGITS, BYTES,
    ],
}  # fmt: skip
TEXTS = st.text() | st.text(st.sampled_from(" \n\r\t0123456789½²'sSdDabĲé中文가.,!_<>|$+\xa0"), max_size=60)


def model_json(name: str) -> dict[str, Any]:
    """GPT-2's tokens cut by other steps, and a token more that no merges make."""
    packed = read_packed("gpt-2")
    vocab = {token: token_id for token_id, token in enumerate([*packed.tokens[:50_256], "Ġqxqx"])}
    steps = {"type": "Sequence", "pretokenizers": STEPS[name]}
    data = whole_json(vocab, packed.merges, [added_token(50_257, "zqz", special=True)], pre_tokenizer=steps)
    data["model"]["ignore_merges"] = name == "llama-bpe"
    data["normalizer"] = {"type": "Sequence", "normalizers": []}  # as DeepSeek's has it
    return data


@cache
def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(model_json(name)))


@cache
def ours(name: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(model_json(name)), encoding="utf-8")
        return Tokenizer.from_folder(folder)


@cache
def from_gguf(name: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "model.gguf", ours(name).to_metadata(), [])
        with read_gguf(Path(folder) / "model.gguf") as file:
            return Tokenizer.from_gguf(file)


@cache
def exported(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(from_gguf(name).to_files()["tokenizer.json"]))


@pytest.mark.parametrize("name", STEPS)
@given(text=TEXTS)
@example(" qxqx 123 1234 zqz <|x|>\r\n\r\n  don'T")
@settings(max_examples=150, deadline=None)
def test_ids_are_those_of_the_library_that_reads_the_tokenizer_json(name: str, text: str) -> None:
    assert ours(name).pre_tokenizer == name
    expected = library(name).encode(text, add_special_tokens=False).ids
    assert ours(name).encode(text, special=True) == from_gguf(name).encode(text, special=True) == expected
    assert exported(name).encode(text, add_special_tokens=False).ids == expected
    assert ours(name).decode(ours(name).encode(text)) == text


def test_a_word_that_is_a_token_needs_no_merges_only_where_merges_are_ignored() -> None:
    assert ours("llama-bpe").encode(" qxqx") == [50_256]
    assert 50_256 not in ours("smaug-bpe").encode(" qxqx")


def test_a_word_that_spells_a_control_token_is_no_control_token() -> None:
    """With merges ignored a whole word would become it without any merge."""
    assert ours("llama-bpe").encode("zqz") == ours("smaug-bpe").encode("zqz")
    assert ours("llama-bpe").encode("zqz", special=True) == [50_257]


def test_numbers_are_cut_as_each_model_cuts_them() -> None:
    def cut(name: str) -> list[str]:
        return [ours(name).piece(token_id) for token_id in ours(name).encode("12345")]

    assert cut("llama-bpe") == ["123", "45"]
    assert cut("deepseek-coder") == ["1", "2", "3", "4", "5"]


def test_bos_comes_before_a_text_in_files_of_llama_3_that_do_not_say_so() -> None:
    for pre, expected in (("llama-bpe", True), ("llama3", True), ("smaug-bpe", False), ("gpt-2", False)):
        keys = gguf_metadata(read_packed("gpt-2")) | {"tokenizer.ggml.pre": string(pre)}
        with tempfile.TemporaryDirectory() as folder:
            write_gguf(Path(folder) / "model.gguf", keys, [])
            with read_gguf(Path(folder) / "model.gguf") as file:
                assert Tokenizer.from_gguf(file).add_bos is expected, pre


def test_every_end_token_of_llama_3_ends_a_text(tmp_path: Path) -> None:
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
    packed = read_packed("gpt-2")
    keys = gguf_metadata(packed)
    tokens = [*packed.tokens[:50_256], *names]
    keys |= {
        "tokenizer.ggml.pre": string("llama-bpe"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": array(ValueType.INT32, [1] * 50_256 + [3] * 4),
        "tokenizer.ggml.bos_token_id": u32(50_256),
        "tokenizer.ggml.eos_token_id": u32(50_257),
    }
    del keys["tokenizer.ggml.unknown_token_id"]
    write_gguf(tmp_path / "model.gguf", keys, [])
    with read_gguf(tmp_path / "model.gguf") as file:
        assert Tokenizer.from_gguf(file).stop_ids == {50_257, 50_258, 50_259}


def test_unknown_patterns_are_refused_in_one_line(tmp_path: Path) -> None:
    data = model_json("deepseek-coder")
    data["pre_tokenizer"]["pretokenizers"][1]["pattern"] = {"Regex": r"\s?\p{Lu}+"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"the pre-tokenizer is Split\(\[\\r\\n\]\)") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    data["pre_tokenizer"]["pretokenizers"][1] |= {"behavior": "Removed"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="the pre-tokenizer is"):
        Tokenizer.from_folder(tmp_path)
