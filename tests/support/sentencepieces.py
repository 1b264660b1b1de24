"""SentencePiece vocabularies for tests: tokenizer.model files, written field by field, and small vocabularies."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from starscope.gguf import ValueType, array, boolean, string, strings, u32

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
HEAD = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
HEAD_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]

Pieces = Sequence[tuple[str, float, int]]


def head() -> list[tuple[str, float, int]]:
    """Unknown, bos, eos and the 256 bytes, as every vocabulary of this kind begins."""
    return [(piece, 0.0, kind) for piece, kind in zip(HEAD, HEAD_TYPES, strict=True)]


def small_pieces() -> list[tuple[str, float, int]]:
    """The head, and 16 pieces from id 259 on, the best first."""
    joined = ["▁▁", "in", "▁in", "▁d", "▁de", "▁def", "ab", "▁ab"]
    single = ["▁", "i", "n", "d", "e", "f", "a", "b"]
    return [*head(), *((piece, -float(rank), NORMAL) for rank, piece in enumerate([*joined, *single]))]


def metadata(pieces: Pieces, **changes: Any) -> dict[str, Any]:
    """The keys of a GGUF file; `changes` by the end of the key, None to leave one out."""
    found = {
        "model": string("llama"),
        "tokens": strings([piece for piece, _, _ in pieces]),
        "scores": array(ValueType.FLOAT32, [score for _, score, _ in pieces]),
        "token_type": array(ValueType.INT32, [kind for _, _, kind in pieces]),
        "bos_token_id": u32(1),
        "eos_token_id": u32(2),
        "unknown_token_id": u32(0),
        "add_bos_token": boolean(True),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def model_file(pieces: Pieces, *, kind: int = 2, trainer: bytes = b"", normalizer: bytes | None = None) -> bytes:
    """A tokenizer.model: the pieces, a trainer of that kind and a normalizer, LLaMA's unless another is given."""
    if normalizer is None:
        normalizer = text(1, "identity") + number(3, 1) + number(4, 0) + number(5, 1)
    written = [message(1, text(1, piece) + floating(2, score) + number(3, type_)) for piece, score, type_ in pieces]
    spec = number(3, kind) + number(35, 1) + number(40, 0) + number(41, 1) + number(42, 2) + number(43, -1) + trainer
    return b"".join(written) + message(2, spec) + message(3, normalizer)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def floating(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", value)


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def text(field: int, value: str) -> bytes:
    return message(field, value.encode())
