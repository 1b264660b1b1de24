"""What a tokenizer assumes or leaves out is said in its notes; a value of another type is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starscope.errors import InputError, InvalidContentError, TokenizerError
from starscope.gguf import Value, read_gguf, string, strings, write_gguf
from starscope.tokenizer import Tokenizer
from support.vocabularies import added_token, symbols, whole_json

PIECES = [*symbols(), "<|endoftext|>"]
LAST = len(PIECES) - 1


def write(folder: Path, **files: Any) -> Path:
    added = [added_token(LAST, PIECES[-1], special=True)]
    vocabulary = whole_json({piece: token for token, piece in enumerate(PIECES)}, [], added)
    for name, content in {"tokenizer": vocabulary, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("role", ["bos", "eos", "pad"])
@pytest.mark.parametrize("value", [-5, 9999, LAST + 1, [3, 50256]])
def test_an_id_outside_the_vocabulary_is_noted_with_its_key(name: str, role: str, value: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, **{name: {f"{role}_token_id": value}}))
    [note] = tokenizer.notes
    assert f"{name}.json: {role}_token_id is {value}, " in note
    assert f"{len(PIECES)} tokens" in note
    assert getattr(tokenizer, f"{role}_id") == (3 if isinstance(value, list) else None)


def test_ids_inside_the_vocabulary_need_no_note(tmp_path: Path) -> None:
    config = {"bos_token_id": 0, "eos_token_id": [LAST, 1], "pad_token_id": None}
    assert Tokenizer.from_folder(write(tmp_path, config=config)).notes == []


def test_an_id_of_another_type_names_the_file_it_is_in(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"/config\.json: eos_token_id is '0'; expected an id"):
        Tokenizer.from_folder(write(tmp_path, config={"eos_token_id": "0"}))
    with pytest.raises(TokenizerError, match=r"/generation_config\.json: pad_token_id is \[True\]; expected an id"):
        Tokenizer.from_folder(write(tmp_path, config={}, generation_config={"pad_token_id": [True]}))


@pytest.mark.parametrize("value", ["false", 0, [1], {}])
@pytest.mark.parametrize("key", ["add_bos_token", "add_prefix_space", "add_eos_token"])
def test_a_switch_is_true_or_false(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {key} is .*; expected true or false"):
        Tokenizer.from_folder(write(tmp_path, tokenizer_config={key: value}))


@pytest.mark.parametrize("key", ["special", "lstrip", "rstrip", "single_word", "normalized"])
def test_the_flags_of_an_added_token_are_true_or_false(key: str, tmp_path: Path) -> None:
    entry = {**added_token(LAST, PIECES[-1], special=True), key: "false"}
    data = whole_json({piece: token for token, piece in enumerate(PIECES)}, [], [entry])
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*endoftext.*: {key} is 'false'; expected true"):
        Tokenizer.from_folder(write(tmp_path, tokenizer=data))


@pytest.mark.parametrize("value", [5, True, [5], {"content": 5}, [["a"]], {"image": 5}])
@pytest.mark.parametrize("key", ["eos_token", "additional_special_tokens"])
def test_a_special_token_is_a_text(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"{key} is .*; expected a text"):
        Tokenizer.from_folder(write(tmp_path, special_tokens_map={key: value}))


def test_an_id_with_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="added_tokens_decoder is not a table"):
        Tokenizer.from_folder(
            write(tmp_path, tokenizer_config={"added_tokens_decoder": {"9" * 5000: {"content": "x"}}})
        )


def test_messages_show_little_of_a_file(tmp_path: Path) -> None:
    for model in ({"type": "y" * 100_000}, {"vocab": {"z" * 100_000: -1}}, {"merges": ["m" * 100_000]}):
        data = whole_json({piece: token for token, piece in enumerate(PIECES)}, [])
        data["model"] |= model
        with pytest.raises(Exception, match=r"tokenizer\.json") as caught:
            Tokenizer.from_folder(write(tmp_path, tokenizer=data))
        assert len(str(caught.value)) < len(str(tmp_path)) + 300


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_to_nowhere_is_not_an_absent_file(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=name):
        Tokenizer.from_folder(tmp_path)


def gguf(path: Path, **changes: Value | None) -> Path:
    keys: dict[str, Value | None] = {
        "model": string("gpt2"), "pre": string("starcoder"), "tokens": strings(PIECES), "merges": strings([]),
        **changes,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    write_gguf(path / "m.gguf", metadata, [], force=True)
    return path / "m.gguf"


@pytest.mark.parametrize(
    ("pre", "said"), [(None, "is not in the file"), (string("default"), "is 'default'"), (string("gpt-2"), None)]
)
def test_a_pre_tokenizer_that_is_assumed_is_noted(pre: Value | None, said: str | None, tmp_path: Path) -> None:
    with read_gguf(gguf(tmp_path, pre=pre)) as file:
        tokenizer = Tokenizer.from_gguf(file, "starcoder")
    assert tokenizer.notes == ([f"tokenizer.ggml.pre {said}; starcoder is assumed."] if said else [])
    assert tokenizer.pre_tokenizer == ("starcoder" if said else "gpt-2")


@pytest.mark.parametrize("key", ["model", "pre", "eos_token_id", "add_bos_token"])
def test_a_long_value_in_a_file_is_cut(key: str, tmp_path: Path) -> None:
    with read_gguf(gguf(tmp_path, **{key: string("x" * 60_000)})) as file:
        with pytest.raises(Exception, match=key) as caught:
            Tokenizer.from_gguf(file)
        assert len(str(caught.value)) < len(str(tmp_path)) + 300
    with read_gguf(gguf(tmp_path, **{key: strings(["a"])})) as file, pytest.raises(InvalidContentError, match=key):
        Tokenizer.from_gguf(file)
