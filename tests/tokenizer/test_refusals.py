"""What a folder may not hold, and the words that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starscope.errors import InputError, StarscopeError, TokenizerError, UnsupportedError
from support.tokenizer_folders import BOS_TEMPLATE, read, refused, small_json, small_vocab, special
from support.vocabularies import BYTE_LEVEL, whole_json


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (special(5, "<|endoftext|>"), r"'ą' and '<\|endoftext\|>' both have the id 5"),
        (special(300, "def"), "'def' has the ids 260 and 300"),
        ([*special(261, "<a>"), *special(262, "<a>")], "'<a>' has the ids 261 and 262"),
        ([*special(261, "<a>"), *special(261, "<b>")], "'<a>' and '<b>' both have the id 261"),
        (special(-1, "<a>"), "the id of '<a>' is -1; expected a number from 0"),
        (special(900_000, "<a>"), "has 262 tokens with ids up to 900000"),
        ([{"id": 261}], "an added token is {'id': 261}; expected an object with its content"),
        (special(261, "!")[:1], "'!' has the ids 33 and 261"),
        (special(33, "!"), "token 33, '!', is a control token and also the symbol of byte 0x21"),
    ],
)
def test_ids_that_collide_are_an_error(tmp_path: Path, added: list[dict[str, Any]], words: str) -> None:
    refused(TokenizerError, words, tmp_path / "model", tokenizer_json=small_json(added))


def test_two_pieces_with_one_id_are_an_error(tmp_path: Path) -> None:
    data = small_json([])
    data["model"]["vocab"]["twin"] = 260
    refused(TokenizerError, "'def' and 'twin' both have the id 260", tmp_path / "model", tokenizer_json=data)


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        ("def", "merge 5 is 'def'; expected two pieces with a space between them"),
        ("d e f", "merge 5 is 'd e f'; expected two pieces"),
        (["d", "e f"], "merge 5 is 'd e f'; expected two pieces"),
        (["d", ""], "merge 5 is 'd '; expected two pieces"),
        (7, "merge 5 is 7; expected two pieces"),
        ("x y", "merge 5 joins 'x' and 'y'; the vocabulary has no 'xy'"),
        ("de nope", "merge 5 joins 'de' and 'nope'; the vocabulary has no 'nope'"),
    ],
)
def test_a_merge_that_is_none_is_an_error(tmp_path: Path, merge: Any, words: str) -> None:
    data = small_json()
    data["model"]["merges"].append(merge)
    refused(TokenizerError, words, tmp_path / "model", tokenizer_json=data)


SUFFIX = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pre_tokenizer": None}, r"the pre-tokenizer is absent; known: ByteLevel \(gpt-2, "),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the pre-tokenizer is Whitespace; known"),
        ({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, r"is ByteLevel\(add_prefix_space=true\); known"),
        ({"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}}, r"is ByteLevel\(use_regex=false\); known"),
        ({"pre_tokenizer": BYTE_LEVEL | {"new_option": 3}}, r"is ByteLevel\(new_option=3\); known"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, BYTE_LEVEL]}},
            r"is Digits \+ ByteLevel; known: .*Digits\(individual_digits=true\) \+ ByteLevel \(starcoder, refact",
        ),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}},
            r"is ByteLevel \+ ByteLevel; known",
        ),
        ({"normalizer": {"type": "NFC"}}, "the normalizer is NFC; supported: none"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}, "the normalizer is Lowercase"),
        ({"decoder": {"type": "Metaspace"}}, "the decoder is Metaspace; supported: ByteLevel"),
        ({"post_processor": {"type": "BertProcessing"}}, "the post-processor is BertProcessing; supported: ByteLevel"),
        (
            {"post_processor": BOS_TEMPLATE | {"single": [*BOS_TEMPLATE["single"], SUFFIX]}},
            "the post-processor's template is SpecialToken Sequence SpecialToken; supported: SpecialToken Sequence",
        ),
        (
            {"post_processor": {"type": "Sequence", "processors": [BOS_TEMPLATE, BOS_TEMPLATE]}},
            "the post-processor puts 2 tokens before a text; supported: at most one, bos",
        ),
        ({"surprise": 1}, "has the key 'surprise'; known: version"),
    ],
)
def test_parts_that_would_change_the_ids_are_refused_in_words(
    tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    refused(UnsupportedError, words, tmp_path / "model", tokenizer_json=small_json(**parts))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("type", "Unigram", "the model is Unigram; supported: BPE"),
        ("ignore_merges", True, r"is ignore_merges \+ Digits\(individual_digits=true\) \+ ByteLevel; known"),
        ("byte_fallback", True, r"pre-tokenizer \[\{'individual_digits': True, .*; known for byte fallback: Prepend"),
        ("dropout", 0.1, "the model's dropout is 0.1"),
        ("continuing_subword_prefix", "##", "the model's continuing_subword_prefix is '##'"),
        ("end_of_word_suffix", "</w>", "the model's end_of_word_suffix is '</w>'"),
        ("surprise", 1, "the model has the key 'surprise'"),
    ],
)
def test_options_of_the_model_are_refused_in_words(tmp_path: Path, key: str, value: Any, words: str) -> None:
    data = small_json()
    data["model"][key] = value
    refused(UnsupportedError, words, tmp_path / "model", tokenizer_json=data)


@pytest.mark.parametrize("key", ["add_prefix_space", "add_eos_token"])
def test_settings_that_change_every_text_are_refused_in_words(tmp_path: Path, key: str) -> None:
    files = {"tokenizer_json": small_json(), "tokenizer_config_json": {key: True}}
    refused(UnsupportedError, f"{key} is True; supported: false", tmp_path / "model", **files)


def test_bos_without_a_token_is_an_error(tmp_path: Path) -> None:
    files = {"tokenizer_json": small_json(), "tokenizer_config_json": {"add_bos_token": True}}
    refused(TokenizerError, "asks for a bos token before every text and names none", tmp_path / "model", **files)


def test_missing_files_are_named(tmp_path: Path) -> None:
    refused(InputError, "has no tokenizer; expected tokenizer.json, tokenizer.model, or vocab", tmp_path / "a")
    refused(InputError, "has vocab.json and no merges.txt", tmp_path / "b", vocab_json=small_vocab())
    refused(InputError, "has merges.txt and no vocab.json", tmp_path / "c", merges_txt="a b\n")
    refused(TokenizerError, "is not a SentencePiece model: it has no pieces", tmp_path / "d", tokenizer_model="")
    files = {
        "vocab_json": small_vocab(),
        "merges_txt": "i n\n",
        "tokenizer_config_json": {"tokenizer_class": "Qwen2Tokenizer"},
    }
    refused(UnsupportedError, "has vocab.json with merges.txt for Qwen2Tokenizer; supported", tmp_path / "e", **files)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_json": "{"}, "not valid JSON"),
        ({"tokenizer_json": "[]"}, "expected an object"),
        ({"tokenizer_json": {"added_tokens": []}}, "has no model"),
        ({"tokenizer_json": small_json() | {"added_tokens": 3}}, "added_tokens is int; expected a list"),
        ({"tokenizer_json": small_json(), "config_json": {"eos_token_id": "0"}}, "eos_token_id is '0'; expected an id"),
        ({"tokenizer_json": small_json(), "tokenizer_config_json": {"added_tokens_decoder": {"x": {}}}}, "not a table"),
        (
            {"tokenizer_json": small_json(), "tokenizer_config_json": {"chat_template": 3}},
            "chat_template is not a text",
        ),
        ({"tokenizer_json": small_json(pre_tokenizer={"type": 3})}, "expected an object with a type"),
        ({"tokenizer_json": small_json(post_processor=[])}, "expected an object with a type"),
        ({"tokenizer_json": whole_json({}, [])}, "has an empty vocabulary"),
        ({"tokenizer_json": whole_json({"a": "0"}, [])}, "the id of 'a' is '0'"),
        ({"tokenizer_json": whole_json([], [])}, "the vocabulary is list"),  # type: ignore[arg-type]
        ({"tokenizer_json": whole_json({"a": 0}, None)}, "merges is NoneType"),  # type: ignore[arg-type]
        ({"vocab_json": {"a": 0}, "merges_txt": "a\n"}, "merge 0 is 'a'; expected two pieces"),
    ],
)
def test_contradictions_are_errors_in_words(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    refused(StarscopeError, words, tmp_path / "model", **files)


def test_a_message_stays_short_whatever_it_quotes(tmp_path: Path) -> None:
    files = {"tokenizer_json": small_json(), "config_json": {"eos_token_id": ["x" * 10_000] * 1_000}}
    with pytest.raises(TokenizerError, match="expected an id, or a list of them") as caught:
        read(tmp_path / "model", **files)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
