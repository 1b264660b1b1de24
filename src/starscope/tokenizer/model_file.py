"""tokenizer.model: SentencePiece's own file, a protocol buffer, read without that library.

A message is a row of fields: a number that holds the field's id and its wire type, then a number, four or eight bytes,
or a length with that many bytes. Of the whole file these are read (sentencepiece_model.proto):

    ModelProto      1 pieces (SentencePiece)  2 trainer  3 normalizer
    SentencePiece   1 piece  2 score  3 type, with the numbers of `TokenType`
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starscope.checkpoint.files import read_bytes
from starscope.errors import TokenizerError, UnsupportedError
from starscope.tokenizer.vocabulary import Spaces, TokenType

BPE = 2
KINDS = {1: "a unigram model", 2: "BPE", 3: "a word model", 4: "a character model"}
# Fields of the trainer and of the normalizer, and their values where the file leaves them out.
MODEL_TYPE, SPACES_BEHIND = 3, 24
ROLE_FIELDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
CHARSMAP, ADD_PREFIX, REMOVE_EXTRA, ESCAPE = 2, 3, 4, 5

Field = int | bytes


@dataclass(frozen=True)
class ModelFile:
    """A vocabulary by id, the ids of its roles, and what it does with spaces."""

    pieces: list[str]
    scores: list[float]
    types: list[TokenType]
    roles: dict[str, int]
    spaces: Spaces


def read_model_file(path: Path) -> ModelFile:
    """The contents of a tokenizer.model. UnsupportedError when it is no BPE, TokenizerError when it is no such file."""
    data = memoryview(read_bytes(path))
    pieces: list[str] = []
    scores: list[float] = []
    types: list[TokenType] = []
    trainer: dict[int, Field] = {}
    normalizer: dict[int, Field] = {}
    try:
        for number, value in _fields(data):
            if number in (1, 2, 3) and not isinstance(value, memoryview):
                raise TypeError(f"field {number} is no message")
            if number == 1:
                piece = _message(value)
                pieces.append(_bytes(piece, 1).decode("utf-8"))
                scores.append(struct.unpack("<f", _bytes(piece, 2, b"\0\0\0\0"))[0])
                types.append(TokenType(_number(piece, 3, TokenType.NORMAL)))
            elif number == 2:
                trainer |= _message(value)
            elif number == 3:
                normalizer |= _message(value)
        kind = _number(trainer, MODEL_TYPE, 1)
        behind = _number(trainer, SPACES_BEHIND, 0)
        roles = {role: _signed(_number(trainer, number, usual)) for role, (number, usual) in ROLE_FIELDS.items()}
        spaces = Spaces(
            "always" if _number(normalizer, ADD_PREFIX, 1) else "never",
            remove_extra=bool(_number(normalizer, REMOVE_EXTRA, 1)),
        )
        charsmap, escape = _bytes(normalizer, CHARSMAP, b""), _number(normalizer, ESCAPE, 1)
    except (ValueError, TypeError, struct.error) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}.") from None
    if not pieces:
        raise TokenizerError(f"{path} is not a SentencePiece model: it has no pieces.")
    if kind != BPE:
        raise UnsupportedError(f"{path} is {KINDS.get(kind, f'of model type {kind}')}; supported: BPE.")
    if charsmap or behind or not escape:
        found = (
            "changes characters" if charsmap else "puts spaces behind words" if behind else "keeps spaces as they are"
        )
        raise UnsupportedError(f"{path}: its normalizer {found}; supported: the identity, with {'▁'} for a space.")
    return ModelFile(pieces, scores, types, {role: i for role, i in roles.items() if i >= 0}, spaces)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message in order; ValueError where it is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value: int | memoryview
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at}, where {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number of more than ten bytes at byte {at}")


def _message(data: int | memoryview) -> dict[int, Field]:
    """The fields of a message by number, the last of each."""
    assert isinstance(data, memoryview)
    return {number: value if isinstance(value, int) else bytes(value) for number, value in _fields(data)}


def _bytes(message: dict[int, Field], number: int, usual: bytes | None = None) -> bytes:
    value = message.get(number, usual)
    if not isinstance(value, bytes):
        raise TypeError(f"field {number} is {'absent' if value is None else 'a number'}")
    return value


def _number(message: dict[int, Field], number: int, usual: int) -> int:
    value = message.get(number, usual)
    if not isinstance(value, int):
        raise TypeError(f"field {number} is no number")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
