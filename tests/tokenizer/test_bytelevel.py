"""Bytes as symbols, and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starscope.tokenizer.bytelevel import ALPHABET, UTF8_BYTES, bytes_to_piece, piece_to_bytes
from support.vocabularies import symbols


def test_the_alphabet_is_gpt_2s() -> None:
    assert list(ALPHABET) == symbols()
    assert bytes_to_piece(b" the\n\xad") == "ĠtheĊŃ"


@given(data=st.binary())
def test_any_bytes_come_back(data: bytes) -> None:
    assert piece_to_bytes(bytes_to_piece(data)) == data


@given(text=st.text())
def test_a_piece_with_a_foreign_character_is_its_own_text(text: str) -> None:
    expected = text.encode()
    if set(text) <= set(symbols()):
        expected = bytes(symbols().index(character) for character in text)
    assert piece_to_bytes(text) == expected


def test_foreign_characters_below_256_are_text_too() -> None:
    foreign = [chr(code) for code in range(256) if chr(code) not in symbols()]
    assert len(foreign) == 68
    assert [piece_to_bytes(character) for character in foreign] == [character.encode() for character in foreign]


def test_the_bytes_of_texts_are_those_that_utf_8_uses() -> None:
    assert set(UTF8_BYTES) == set().union(*(chr(code).encode() for code in [*range(0xD800), *range(0xE000, 0x110000)]))
