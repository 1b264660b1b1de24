"""Byte-level BPE writes each of the 256 bytes as one printable character, so that a vocabulary is plain text.

A byte that prints keeps its character; the other 68 (spaces, controls, ...) take the characters from U+0100 on, in
order. So b" the" is the piece "Ġthe", and the bytes of any text can be written without an unknown token:

    >>> bytes_to_piece(b" the")
    'Ġthe'
    >>> piece_to_bytes("Ġthe")
    b' the'
"""

from __future__ import annotations

from starscope.errors import TokenizerError

_PRINTING = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _make_alphabet() -> str:
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in _PRINTING else next(others)) for byte in range(256))


ALPHABET = _make_alphabet()  # ALPHABET[byte] is the symbol of that byte
UTF8_BYTES = bytes(byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5)  # the ones a text can hold

_TO_SYMBOL = dict(enumerate(ALPHABET))
# A character below U+0100 that is no symbol becomes one that Latin-1 cannot encode, so that it is seen as foreign.
_TO_BYTE = dict.fromkeys(range(256), 0xD800) | {ord(symbol): byte for byte, symbol in enumerate(ALPHABET)}


def bytes_to_piece(data: bytes) -> str:
    """The piece that stands for these bytes, a symbol a byte."""
    return data.decode("latin-1").translate(_TO_SYMBOL)


def piece_to_bytes(piece: str) -> bytes:
    """The bytes that a piece stands for. A piece with a character that is no symbol stands for itself, in UTF-8."""
    try:
        return piece.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """A text in UTF-8. TokenizerError for half a surrogate pair."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise TokenizerError(
            f"character {error.start} of the text is {found}, half of a surrogate pair, which is not text."
        ) from None


def nameless_byte(byte: int) -> str:
    """A byte as a message names it."""
    return f"the byte 0x{byte:02X}" + (f" ({chr(byte)!r})" if byte < 0x80 else "")
