"""Text to ids, by the `tokenizers` library: added tokens are found first, the rest is cut and merged.

One BPE model serves two readings of a text. *Plain*: control tokens do not exist, whatever the text spells.
*Special*: their spelling becomes their id. User-defined tokens are found in both.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from starscope.checkpoint.content import cut, short
from starscope.errors import TokenizerError
from starscope.tokenizer.bytelevel import ALPHABET, UTF8_BYTES
from starscope.tokenizer.structure import make_pre_tokenizer
from starscope.tokenizer.vocabulary import HIDDEN, Contents, Matching, TokenType, is_padding

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import BPE


class Encoder:
    """The two readings, each built when first used."""

    def __init__(self, contents: Contents, pre_tokenizer: str) -> None:
        self._contents = contents
        self._pre_tokenizer = pre_tokenizer
        pieces = enumerate(contents.pieces)
        self._ids = {piece: token_id for token_id, piece in pieces if piece and not is_padding(token_id, piece)}
        self._missing = [byte for byte in UTF8_BYTES if ALPHABET[byte] not in self._ids]

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`. TokenizerError for half a surrogate pair, or a byte that the vocabulary cannot write."""
        data = _as_bytes(text)
        library = self._special if special else self._plain
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        if any(byte in data for byte in self._missing):
            self._check_nothing_is_lost(data, ids)
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, read plainly, on all cores; errors as for `encode`."""
        data = list(map(_as_bytes, texts))
        found: list[list[int]] = [
            encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)
        ]
        for one, ids in zip(data, found, strict=True):
            if any(byte in one for byte in self._missing):
                self._check_nothing_is_lost(one, ids)
        return found

    def _check_nothing_is_lost(self, data: bytes, ids: list[int]) -> None:
        """A byte without a symbol may be in the text only inside tokens; the library would drop any other."""
        written = b"".join(map(self._contents.token_bytes, ids))
        for byte in self._missing:
            if data.count(byte) != written.count(byte):
                found = f"the byte 0x{byte:02X}" + (f" ({chr(byte)!r})" if byte < 0x80 else "")
                raise TokenizerError(f"the text holds {found}, for which the vocabulary has no token.")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return self._make_library(frozenset((TokenType.USER_DEFINED,)))

    @cached_property
    def _special(self) -> tokenizers.Tokenizer:
        return self._make_library(HIDDEN | {TokenType.USER_DEFINED})

    def _make_library(self, added: frozenset[TokenType]) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, Tokenizer

        library = Tokenizer(self._model)
        library.pre_tokenizer = make_pre_tokenizer(self._pre_tokenizer)
        tokens = []
        for piece, token_id in self._ids.items():
            kind = self._contents.types[token_id]
            if kind in added:
                flags = self._contents.matching.get(token_id, Matching(normalized=kind == TokenType.USER_DEFINED))
                tokens.append(
                    AddedToken(
                        piece, single_word=flags.single_word, lstrip=flags.lstrip, rstrip=flags.rstrip,
                        normalized=flags.normalized, special=kind in HIDDEN,
                    )
                )  # fmt: skip
        library.add_tokens(tokens)
        return library

    @cached_property
    def _model(self) -> BPE:
        from tokenizers.models import BPE

        where, types = self._contents.where, self._contents.types
        hidden = {piece for piece, token_id in self._ids.items() if types[token_id] in HIDDEN}
        for symbol in hidden.intersection(ALPHABET):
            found = f"token {self._ids[symbol]}, {short(symbol)}, is a control token"
            raise TokenizerError(f"{where}: {found} and also the symbol of byte 0x{ALPHABET.index(symbol):02X}.")
        # A control token that merges could build would come out of plain text.
        merges = [pair for pair in self._contents.merges if pair[0] + pair[1] not in hidden]
        try:
            return BPE(vocab=self._ids, merges=merges)
        except Exception as error:  # the library raises no class of its own
            for number, (left, right) in enumerate(self._contents.merges):
                for piece in (left, right, left + right):
                    if piece not in self._ids:
                        found = f"merge {number} joins {short(left)} and {short(right)}"
                        raise TokenizerError(f"{where}: {found}; the vocabulary has no {short(piece)}.") from error
            raise TokenizerError(f"{where}: the vocabulary cannot be used: {cut(str(error))}.") from error


def _as_bytes(text: str) -> bytes:
    """The text in UTF-8."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise TokenizerError(
            f"character {error.start} of the text is {found}, half of a surrogate pair, which is no text."
        ) from None
