"""A tokenizer as the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

What `read_folder` reads from them is the tokenizer that they were written of: pieces, types, merges, roles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starscope.tokenizer.joining import merges_of
from starscope.tokenizer.source import Source
from starscope.tokenizer.spaces import Parts, write_spaces
from starscope.tokenizer.structure import ignores_merges, make_pre_tokenizer
from starscope.tokenizer.vocabulary import HIDDEN, Contents, Matching, TokenType

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ADDED = HIDDEN | {TokenType.USER_DEFINED}  # types that are found in a text before it is cut


def tokenizer_files(source: Source, contents: Contents, end: int | None) -> dict[str, dict[str, Any]]:
    """The JSON objects by file name; `end` is the token that ends a text."""
    roles = source.roles
    named = {"bos_token": roles.bos, "eos_token": end, "unk_token": roles.unk, "pad_token": roles.pad}
    names = {name: contents.pieces[token_id] for name, token_id in named.items() if token_id is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": source.add_bos,
        **({"add_prefix_space": False} if source.spaces is None else {}),
        "clean_up_tokenization_spaces": False,
        **_templates(source.chat_templates),
    }
    return {"tokenizer.json": _tokenizer_json(source, contents), "tokenizer_config.json": config}


def _tokenizer_json(source: Source, contents: Contents) -> dict[str, Any]:
    used = [(i, piece) for i, piece in enumerate(contents.pieces) if contents.types[i] != TokenType.UNUSED]
    added = [
        _added(token_id, piece, contents.types[token_id] in HIDDEN, contents.matching.get(token_id))
        for token_id, piece in used
        if contents.types[token_id] in ADDED
    ]
    unk = source.roles.unk
    if source.spaces is None:
        parts = Parts(None, _pre_tokenizer(source.pre_tokenizer), BYTE_LEVEL)
    else:
        parts = write_spaces(source.spaces)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": _post_processor(source, contents),
        "decoder": parts.decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": contents.pieces[unk] if contents.marked and unk is not None else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": contents.marked,
            "byte_fallback": contents.marked,
            "ignore_merges": ignores_merges(source.pre_tokenizer),
            "vocab": {piece: token_id for token_id, piece in used},
            "merges": [list(pair) for pair in merges_of(contents)],
        },
    }


def _added(token_id: int, piece: str, special: bool, flags: Matching | None) -> dict[str, Any]:
    flags = flags or Matching(normalized=not special)
    return {
        "id": token_id,
        "content": piece,
        "single_word": flags.single_word,
        "lstrip": flags.lstrip,
        "rstrip": flags.rstrip,
        "normalized": flags.normalized,
        "special": special,
    }


def _pre_tokenizer(name: str) -> dict[str, Any]:
    """The steps that a name stands for, as the library writes them."""
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = make_pre_tokenizer(name)
    steps: dict[str, Any] = json.loads(library.to_str())["pre_tokenizer"]
    return steps


def _post_processor(source: Source, contents: Contents) -> dict[str, Any] | None:
    """Bos before every text, where the model expects that."""
    bos = source.roles.bos
    if not source.add_bos or bos is None:
        return None
    piece = contents.pieces[bos]
    first, text = {"SpecialToken": {"id": piece, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {piece: {"id": piece, "ids": [bos], "tokens": [piece]}},
    }


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    if not templates:
        return {}
    if set(templates) == {"default"}:
        return {"chat_template": templates["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}
