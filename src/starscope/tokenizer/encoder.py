"""Text to ids by merges, with the `tokenizers` library: added tokens are found first, the rest is cut and merged.

A text has two readings. *Plain*: control tokens do not exist, whatever the text spells. *Special*: their spelling
becomes their id. User-defined tokens are found in both. In a SentencePiece vocabulary with merges a text also begins,
or goes on: a text that goes on gets no space before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

from starscope.checkpoint.content import cut, short
from starscope.errors import TokenizerError
from starscope.tokenizer.bytelevel import ALPHABET, UTF8_BYTES, as_bytes, nameless_byte
from starscope.tokenizer.spaces import set_spaces
from starscope.tokenizer.structure import ignores_merges, make_pre_tokenizer
from starscope.tokenizer.vocabulary import (
    BYTE_PIECES,
    HIDDEN,
    Contents,
    Matching,
    Spaces,
    TokenType,
    is_padding,
)

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import BPE


class Encoder:
    """The ids of texts. Tokens in `hidden` come from a text on request alone, as control tokens do."""

    def __init__(
        self, contents: Contents, pre_tokenizer: str, spaces: Spaces | None = None, hidden: Collection[int] = ()
    ) -> None:
        self._contents, self._pre_tokenizer, self._spaces = contents, pre_tokenizer, spaces
        pieces = enumerate(contents.pieces)
        self._ids = {piece: token_id for token_id, piece in pieces if piece and not is_padding(token_id, piece)}
        self._secret = {
            piece for piece, token_id in self._ids.items() if contents.types[token_id] in HIDDEN or token_id in hidden
        }
        symbols = ALPHABET if spaces is None else BYTE_PIECES
        self._missing = [
            byte for byte in UTF8_BYTES if symbols[byte] not in self._ids and not (spaces and byte == 0x20)
        ]
        self._library = cache(self._make_library)

    def encode(self, text: str, special: bool, begins: bool = True) -> list[int]:
        """The ids of `text`. TokenizerError for half a surrogate pair, or a byte that the vocabulary cannot write."""
        data = as_bytes(text)
        library = self._library(special, begins or self._spaces is None)
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        if any(byte in data for byte in self._missing):
            self._check_nothing_is_lost(data, ids)
        return ids

    def encode_batch(self, texts: list[str], _begins: Sequence[bool]) -> list[list[int]]:
        """The ids of each text, read plainly, on all cores; errors as for `encode`."""
        data = list(map(as_bytes, texts))
        library = self._library(False, True)
        found: list[list[int]] = [
            encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)
        ]
        for one, ids in zip(data, found, strict=True):
            if any(byte in one for byte in self._missing):
                self._check_nothing_is_lost(one, ids)
        return found

    def _check_nothing_is_lost(self, data: bytes, ids: list[int]) -> None:
        """A byte without a token may be in the text only inside others; the library would drop any other."""
        written = b"".join(map(self._contents.token_bytes, ids))
        for byte in self._missing:
            if data.count(byte) != written.count(byte):
                raise TokenizerError(f"the text holds {nameless_byte(byte)}, for which the vocabulary has no token.")

    def _make_library(self, special: bool, begins: bool) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, Tokenizer

        library = Tokenizer(self._make_model(special))
        if self._spaces is None:
            library.pre_tokenizer = make_pre_tokenizer(self._pre_tokenizer)
        else:
            set_spaces(library, self._spaces, begins)
        tokens = []
        for piece, token_id in self._ids.items():
            kind = self._contents.types[token_id]
            if kind == TokenType.USER_DEFINED or kind in HIDDEN:
                if not special and piece in self._secret:
                    continue
                flags = self._contents.matching.get(token_id, Matching(normalized=kind == TokenType.USER_DEFINED))
                tokens.append(
                    AddedToken(
                        piece, single_word=flags.single_word, lstrip=flags.lstrip, rstrip=flags.rstrip,
                        normalized=flags.normalized, special=kind in HIDDEN,
                    )
                )  # fmt: skip
        library.add_tokens(tokens)
        return library

    def _make_model(self, special: bool) -> BPE:
        from tokenizers.models import BPE

        where, types = self._contents.where, self._contents.types
        apart = {
            piece for piece, token_id in self._ids.items() if piece in self._secret or types[token_id] == TokenType.BYTE
        }
        if self._spaces is None:
            for symbol in apart.intersection(ALPHABET):
                found = f"token {self._ids[symbol]}, {short(symbol)}, is a control token"
                raise TokenizerError(f"{where}: {found} and also the symbol of byte 0x{ALPHABET.index(symbol):02X}.")
        # A control token that merges could build would come out of plain text, and so would one that is a whole word.
        merges = [pair for pair in self._contents.merges if pair[0] + pair[1] not in apart]
        renamed = frozenset() if special else self._secret
        vocab = {f"\0{piece}" if piece in renamed else piece: token_id for piece, token_id in self._ids.items()}
        options = {} if self._spaces is None else {"byte_fallback": True}
        try:
            return BPE(vocab=vocab, merges=merges, ignore_merges=ignores_merges(self._pre_tokenizer), **options)
        except Exception as error:  # the library raises no class of its own
            for number, (left, right) in enumerate(self._contents.merges):
                for piece in (left, right, left + right):
                    if piece not in self._ids:
                        found = f"merge {number} joins {short(left)} and {short(right)}"
                        raise TokenizerError(f"{where}: {found}; the vocabulary has no {short(piece)}.") from error
            raise TokenizerError(f"{where}: the vocabulary cannot be used: {cut(str(error))}.") from error
