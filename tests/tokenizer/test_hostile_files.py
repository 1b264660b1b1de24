"""Whatever stands in the files, reading them ends in a tokenizer or in one of starscope's own errors."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import InvalidContentError, UnsupportedError
from starscope.gguf import Value, ValueType, array, boolean, f32, read_gguf, string, strings, u32, write_gguf
from starscope.tokenizer import Tokenizer
from support.vocabularies import added_token, whole_json

WORDS = (
    "type", "content", "id", "Sequence", "normalizers", "pretokenizers", "processors", "single", "TemplateProcessing",
    "ByteLevel", "BPE", "x",
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 300)
    | st.just(10**30)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=4,
)
VOCAB = {"a": 0, "b": 1, "ab": 2, "Ġ": 3}
PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
}
FILES: dict[str, Any] = {
    "tokenizer.json": whole_json(VOCAB, ["a b"], [added_token(4, "<s>", special=True)], post_processor=PROCESSOR),
    "tokenizer_config.json": {
        "eos_token": {"content": "<s>"}, "pad_token": "<pad>", "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "x"}],
        "added_tokens_decoder": {"4": {"content": "<s>", "special": True}}, "additional_special_tokens": ["<s>"],
    },
    "special_tokens_map.json": {"bos_token": "<s>", "extra_special_tokens": {"image": "<i>"}},
    "config.json": {"eos_token_id": 4, "bos_token_id": 50_256},
    "generation_config.json": {"eos_token_id": [4, 1]},
    "added_tokens.json": {"<t>": 5},
    "vocab.json": VOCAB,
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value inside a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def use(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        tokenizer.decode(tokenizer.encode("ab a<s>", special=special))
    tokenizer.to_metadata(tokenizer.vocab_size + 1)
    assert tokenizer.stop_ids <= set(range(len(tokenizer.vocabulary)))


@pytest.mark.parametrize("value", [5, None, "x", [5], [None], {"type": "Sequence"}, [[{}]]])
@pytest.mark.parametrize(
    ("part", "key"),
    [("pre_tokenizer", "pretokenizers"), ("normalizer", "normalizers"), ("post_processor", "processors")],
)
def test_sequences_of_steps_that_are_none_are_errors(tmp_path: Path, part: str, key: str, value: Any) -> None:
    data = whole_json(VOCAB, ["a b"], **{part: {"type": "Sequence", key: value}})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with contextlib.suppress(InvalidContentError, UnsupportedError):
        use(Tokenizer.from_folder(tmp_path))


@given(data=st.data(), name=st.sampled_from(sorted(FILES)), other=JSON, plain=st.booleans())
@settings(max_examples=400)
def test_no_folder_ends_in_a_traceback(data: st.DataObject, name: str, other: Any, plain: bool) -> None:
    files = copy.deepcopy(FILES)
    place = data.draw(st.sampled_from(places(files[name], (name,))))
    inner: Any = files
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    if plain:
        del files["tokenizer.json"]
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (Path(folder) / file).write_text(json.dumps(content))
        (Path(folder) / "merges.txt").write_text("a b\n")
        with contextlib.suppress(InvalidContentError, UnsupportedError):
            use(Tokenizer.from_folder(folder))


VALUES = (
    u32(3), u32(99), f32(1.0), boolean(True), string("x"), string("gpt2"), strings([]), strings(["a", "\udcff"]),
    strings(["a b"]), strings(["", ""]), array(ValueType.INT32, [1, 7]), array(ValueType.FLOAT32, [float("nan")] * 5),
    array(ValueType.INT32, [-1] * 5), array(ValueType.UINT8, [1] * 5),
)  # fmt: skip
KEYS: dict[str, Value] = {
    "model": string("gpt2"), "pre": string("starcoder"), "tokens": strings(["a", "b", "ab", "Ġ", "<s>"]),
    "token_type": array(ValueType.INT32, [1, 1, 1, 1, 3]), "merges": strings(["a b"]), "eos_token_id": u32(4),
    "scores": array(ValueType.FLOAT32, [0.0] * 5), "bos_token_id": u32(4), "add_bos_token": boolean(True),
    "eot_token_id": u32(1), "fim_pre_token_id": u32(1), "prefix_token_id": u32(1), "add_space_prefix": boolean(False),
}  # fmt: skip


@pytest.mark.parametrize("key", [*KEYS, "chat_template", "chat_template.x"])
def test_no_vocabulary_file_ends_in_a_traceback(tmp_path: Path, key: str) -> None:
    for value in (*VALUES, None):
        name = f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}"
        changed = {f"tokenizer.ggml.{other}": known for other, known in KEYS.items()} | {name: value}
        metadata = {name: value for name, value in changed.items() if value is not None}
        write_gguf(tmp_path / "model.gguf", metadata, [], force=True)
        with read_gguf(tmp_path / "model.gguf") as file, contextlib.suppress(InvalidContentError, UnsupportedError):
            use(Tokenizer.from_gguf(file))
