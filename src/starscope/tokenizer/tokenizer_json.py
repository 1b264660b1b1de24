"""tokenizer.json: the file of the `tokenizers` library, read as far as a BPE model needs it.

The model is byte-level, or, with `byte_fallback`, one of SentencePiece.

Every part that would change the ids of a text is read or refused in words. Truncation and padding are left: they are
about batches, and a caller's choice. So is the unknown token: it would stand for bytes without a symbol, and a text
with such bytes is refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starscope.checkpoint import read_json
from starscope.checkpoint.content import cut, short, switch
from starscope.errors import TokenizerError, UnsupportedError
from starscope.tokenizer.source import split_merges
from starscope.tokenizer.spaces import check_decoder, read_spaces
from starscope.tokenizer.structure import find_name, flatten
from starscope.tokenizer.vocabulary import BYTE_PIECES, Matching, Spaces, TokenType

TOP_KEYS = (
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
    "model",
)  # fmt: skip
# Keys of the model, with the values that change nothing; None: any value.
MODEL_KEYS: dict[str, tuple[Any, ...] | None] = {
    "type": None, "vocab": None, "merges": None, "unk_token": None, "fuse_unk": None, "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, ""), "byte_fallback": (None, False, True),
    "ignore_merges": (None, False, True),
}  # fmt: skip


@dataclass(frozen=True)
class Added:
    """A token beside the ordinary vocabulary."""

    token_id: int
    content: str
    special: bool
    flags: Matching


@dataclass(frozen=True)
class Files:
    """What the vocabulary files of a folder say, before roles are given out."""

    where: str
    vocab: Mapping[str, int]
    merges: list[tuple[str, str]]
    added: list[Added]
    pre_tokenizer: str
    bos: int | None = None  # the id that is put before every text
    names: Mapping[str, str] = field(default_factory=dict)  # special tokens that these files imply
    spaces: Spaces | None = None  # of a SentencePiece vocabulary
    scores: Sequence[float] | None = None  # of the ids of `vocab`
    types: Mapping[int, TokenType] = field(default_factory=dict)  # those that the files say


def read_tokenizer_json(path: Path) -> Files:
    """The contents of a tokenizer.json. UnsupportedError names the part that is not byte-level BPE."""
    data = read_json(path)
    unknown = sorted(data.keys() - set(TOP_KEYS))
    if unknown:
        raise UnsupportedError(f"{path} has the key {short(unknown[0])}; known: {', '.join(TOP_KEYS)}.")
    model = data.get("model")
    if not isinstance(model, dict):
        raise TokenizerError(f"{path} has no model; expected the vocabulary and merges of a BPE model.")
    _check_model(model, path)
    try:
        decoder = flatten(data.get("decoder"), "decoders", "decoder")
        normalizer = flatten(data.get("normalizer"), "normalizers", "normalizer")
        steps = flatten(data.get("pre_tokenizer"), "pretokenizers", "pre-tokenizer")
        bos = read_post_processor(data.get("post_processor"))
        if model.get("byte_fallback"):
            spaces, pre_tokenizer = read_spaces(normalizer, steps), "default"
            check_decoder(decoder)
        else:
            spaces, pre_tokenizer = None, find_name(data.get("pre_tokenizer"), bool(model.get("ignore_merges")))
            _check_byte_level(decoder, normalizer)
    except (TokenizerError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error.message}") from None
    unk = model.get("unk_token")
    vocab = checked_vocab(model.get("vocab"), path)
    return Files(
        where=str(path),
        vocab=vocab,
        merges=_read_merges(model.get("merges"), path),
        added=_read_added_tokens(data.get("added_tokens"), path),
        pre_tokenizer=pre_tokenizer,
        bos=bos,
        names={"unk_token": unk} if isinstance(unk, str) else {},
        spaces=spaces,
        types={} if spaces is None else {vocab[piece]: TokenType.BYTE for piece in BYTE_PIECES if piece in vocab},
    )


def _check_byte_level(decoder: list[dict[str, Any]], normalizer: list[dict[str, Any]]) -> None:
    if decoder and [step["type"] for step in decoder] != ["ByteLevel"]:
        raise UnsupportedError(f"the decoder is {_type_of(decoder[0])}; supported: ByteLevel.")
    if normalizer:
        raise UnsupportedError(f"the normalizer is {_type_of(normalizer[0])}; supported: none.")


def _check_model(model: Mapping[str, Any], path: Path) -> None:
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedError(f"{path}: the model is {_type_of(model)}; supported: BPE.")
    for key, value in model.items():
        if key not in MODEL_KEYS:
            raise UnsupportedError(f"{path}: the model has the key {short(key)}; known: {', '.join(MODEL_KEYS)}.")
        allowed = MODEL_KEYS[key]
        if allowed is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise UnsupportedError(f"{path}: the model's {key} is {short(value)}; supported: {expected}.")
    if model.get("byte_fallback") and model.get("ignore_merges"):
        raise UnsupportedError(f"{path}: the model has byte_fallback and ignore_merges; supported: one of them.")


def _type_of(part: Any) -> str:
    return cut(str(part.get("type", "without a type"))) if isinstance(part, dict) else short(part)


def checked_vocab(vocab: Any, path: Path) -> dict[str, int]:
    """`vocab`, if it is a table from pieces to ids."""
    if not isinstance(vocab, dict):
        raise TokenizerError(f"{path}: the vocabulary is {type(vocab).__name__}; expected pieces with their ids.")
    for piece, token_id in vocab.items():
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(f"{path}: the id of {short(piece)} is {short(token_id)}; expected a number from 0.")
    return vocab


def _read_merges(merges: Any, path: Path) -> list[tuple[str, str]]:
    """Merges as strings "a b" or as pairs of pieces (which hold no space, as byte-level pieces do not)."""
    if not isinstance(merges, list):
        raise TokenizerError(f"{path}: merges is {type(merges).__name__}; expected a list.")
    lines = []
    for number, merge in enumerate(merges):
        line = " ".join(merge) if isinstance(merge, list) and all(isinstance(piece, str) for piece in merge) else merge
        if not isinstance(line, str):
            raise TokenizerError(f"{path}: merge {number} is {short(merge)}; expected two pieces.")
        lines.append(line)
    return split_merges(lines, str(path))


def _read_added_tokens(entries: Any, path: Path) -> list[Added]:
    if not isinstance(entries, list | None):
        raise TokenizerError(f"{path}: added_tokens is {type(entries).__name__}; expected a list.")
    return [read_added(entry, entry.get("id") if isinstance(entry, dict) else None, path) for entry in entries or ()]


def read_added(entry: Any, token_id: Any, path: Path) -> Added:
    """An added token from its object; the flags have the library's defaults."""
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str):
        raise TokenizerError(f"{path}: an added token is {short(entry)}; expected an object with its content.")
    where = f"{path}: the added token {short(content)}"

    def flag(name: str, default: bool = False) -> bool:
        return switch(entry, name, default, where, TokenizerError)

    special = flag("special")
    flags = Matching(
        lstrip=flag("lstrip"),
        rstrip=flag("rstrip"),
        single_word=flag("single_word"),
        normalized=flag("normalized", not special),
    )
    checked_vocab({content: token_id}, path)
    return Added(token_id, content, special, flags)


def read_post_processor(processor: Any) -> int | None:
    """The id of the one token put before every text, None without one; anything else added is refused in words."""
    found = [
        token_id for step in flatten(processor, "processors", "post-processor") for token_id in _added_before(step)
    ]
    if len(found) > 1:
        raise UnsupportedError(
            f"the post-processor puts {len(found)} tokens before a text; supported: at most one, bos."
        )
    return found[0] if found else None


def _added_before(step: dict[str, Any]) -> list[int]:
    """The ids that one step puts before a text. ByteLevel moves offsets and adds nothing."""
    if step.get("type") == "ByteLevel":
        return []
    if step.get("type") != "TemplateProcessing":
        supported = "ByteLevel, TemplateProcessing with bos"
        raise UnsupportedError(f"the post-processor is {_type_of(step)}; supported: {supported}.")
    template = step.get("single")
    if not isinstance(template, list) or not all(isinstance(part, dict) and len(part) == 1 for part in template):
        raise TokenizerError("the post-processor's template for one text is not a list of parts.")
    kinds = [next(iter(part)) for part in template]
    if kinds not in (["Sequence"], ["SpecialToken", "Sequence"]):
        found = cut(" ".join(kinds)) or "empty"
        raise UnsupportedError(
            f"the post-processor's template is {found}; supported: SpecialToken Sequence, bos first."
        )
    if kinds == ["Sequence"]:
        return []
    try:
        ids = step["special_tokens"][template[0]["SpecialToken"]["id"]]["ids"]
    except (KeyError, TypeError):
        ids = None
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise TokenizerError("the post-processor names a special token and not its id.")
    return ids
