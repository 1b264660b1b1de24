"""Tokenizer folders of 261 tokens and a few added ones: written, read, refused, and sent through a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starscope.errors import StarscopeError
from starscope.gguf import read_gguf, write_gguf
from starscope.tokenizer import Tokenizer
from support.vocabularies import added_token, symbols, whole_json

MERGES = ["i n", "Ġ in", "# #", "d e", "de f"]
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")

BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [261], "tokens": ["<|endoftext|>"]}},
}


def small_vocab() -> dict[str, int]:
    """All 256 symbols, then what MERGES build: ids 256 to 260."""
    return {piece: token_id for token_id, piece in enumerate([*symbols(), *(m.replace(" ", "") for m in MERGES)])}


def special(first: int, *contents: str) -> list[dict[str, Any]]:
    return [added_token(first + number, content, special=True) for number, content in enumerate(contents)]


def small_json(added: list[dict[str, Any]] | None = None, **parts: Any) -> dict[str, Any]:
    return whole_json(small_vocab(), list(MERGES), special(261, "<|endoftext|>") if added is None else added, **parts)


def write(folder: Path, **files: Any) -> Path:
    """Files by name, with _ for the dot before the ending; objects as JSON."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{ending}").write_text(text, encoding="utf-8", newline="")
    return folder


def read(folder: Path, **files: Any) -> Tokenizer:
    return Tokenizer.from_folder(write(folder, **files))


def refused(kind: type[StarscopeError], words: str, folder: Path, **files: Any) -> None:
    """Reading says `words` and the folder's name, in one line."""
    with pytest.raises(kind, match=words) as caught:
        read(folder, **files).encode("text")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def reread(tokenizer: Tokenizer, path: Path, num_rows: int | None = None) -> Tokenizer:
    """The tokenizer after it went through a GGUF file."""
    write_gguf(path, tokenizer.to_metadata(num_rows), [], force=True)
    with read_gguf(path) as file:
        return Tokenizer.from_gguf(file)
