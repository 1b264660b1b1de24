"""What every source of a tokenizer comes down to: pieces with types, merges or scores, and the roles of some ids.

A piece is spelled as a GGUF file spells it. Ordinary tokens are in byte-level symbols, or, in a vocabulary of
SentencePiece, text with `▁` for a space, beside a token `<0x0A>` for each byte. Control and user-defined tokens are
their text. An id that the source leaves empty is `[PAD{id}]`, unused: it stands for no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, overload

from starscope.checkpoint.content import short
from starscope.errors import TokenizerError
from starscope.tokenizer.bytelevel import piece_to_bytes


class TokenType(IntEnum):
    """The numbers of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never made from a text, unless asked
    USER_DEFINED = 4  # its text always becomes this token, before any merge
    UNUSED = 5
    BYTE = 6


HIDDEN = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))  # types whose text is parsed on request alone
VERBATIM = HIDDEN | {TokenType.USER_DEFINED}  # types whose piece is the text itself
SPACE = "▁"  # how SentencePiece writes a space inside a piece
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True)
class Token:
    """One entry of a vocabulary; `piece` in the spelling of a GGUF file."""

    piece: str
    score: float
    type: TokenType


@dataclass(frozen=True)
class FimTokens:
    """The ids that mark the parts of a fill-in-the-middle prompt."""

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repo: int | None = None
    separator: int | None = None


# How released vocabularies spell each role.
FIM_SPELLINGS = {
    "prefix":    ("<fim_prefix>", "<fim-prefix>", "<|fim_prefix|>", "▁<PRE>", "<｜fim▁begin｜>"),
    "suffix":    ("<fim_suffix>", "<fim-suffix>", "<|fim_suffix|>", "▁<SUF>", "<｜fim▁hole｜>"),
    "middle":    ("<fim_middle>", "<fim-middle>", "<|fim_middle|>", "▁<MID>", "<｜fim▁end｜>"),
    "pad":       ("<fim_pad>", "<fim-pad>", "<|fim_pad|>"),
    "repo":      ("<reponame>", "<repo_name>", "<|repo_name|>"),
    "separator": ("<filename>", "<file_sep>", "<|file_sep|>"),
}  # fmt: skip
END_SPELLINGS = (
    "<|endoftext|>", "<|end|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "▁<EOT>",
    "<｜end▁of▁sentence｜>", "<|EOT|>",
)  # fmt: skip
MARKERS = frozenset(spelling for spellings in FIM_SPELLINGS.values() for spelling in spellings) | set(END_SPELLINGS)


@dataclass(frozen=True)
class Roles:
    """Ids with a meaning, as the source names them; `ends` are the tokens beside eos that end a text."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    ends: tuple[int, ...] = ()
    fim: Mapping[str, int] = field(default_factory=dict)  # by the names of FimTokens


@dataclass(frozen=True)
class Matching:
    """How the text of an added token is found: the flags of a Hugging Face added token."""

    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Spaces:
    """What a SentencePiece tokenizer does with the spaces of a text, before `▁` stands for each."""

    prefix: Literal["never", "first", "always"] = "always"  # one more: at the beginning, or after special tokens too
    unless_there: bool = False  # not before a text that begins with a space
    remove_extra: bool = False  # no spaces at the ends, one between words


@dataclass(frozen=True)
class Contents:
    """A vocabulary with its merges. `types` has one byte an id; `matching` only what differs from the default.

    `marked`: pieces as SentencePiece writes them. Their merges are those listed; where none are, what two tokens
    join to by `scores`, the highest first.
    """

    where: str  # the file or folder, for messages
    pieces: Sequence[str]
    types: bytes
    merges: Sequence[tuple[str, str]]
    scores: Sequence[float] | None = None
    matching: Mapping[int, Matching] = field(default_factory=dict)
    marked: bool = False

    def __post_init__(self) -> None:
        if len(set(self.pieces)) != len(self.pieces):
            first: dict[str, int] = {}
            for token_id, piece in enumerate(self.pieces):
                if first.setdefault(piece, token_id) != token_id:
                    found = f"tokens {first[piece]} and {token_id} are both {short(piece)}"
                    raise TokenizerError(f"{self.where}: {found}; expected distinct pieces.")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for padding."""
        piece = self.pieces[token_id]
        if is_padding(token_id, piece):
            return b""
        if self.types[token_id] in VERBATIM:
            return piece.encode()
        if not self.marked:
            return piece_to_bytes(piece)
        if self.types[token_id] == TokenType.BYTE:
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()


def padding_piece(token_id: int) -> str:
    """The piece of an id that no token has."""
    return f"[PAD{token_id}]"


def is_padding(token_id: int, piece: str) -> bool:
    """Whether a piece is padding, whatever type a file gives it (older ones say normal or user-defined)."""
    return piece.startswith("[PAD") and piece == padding_piece(token_id)


class Vocabulary(Sequence[Token]):
    """The tokens of `contents` by id, each made when it is asked for."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def __len__(self) -> int:
        return len(self._contents.pieces)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        score = 0.0 if self._contents.scores is None else float(self._contents.scores[index])
        return Token(self._contents.pieces[index], score, TokenType(self._contents.types[index]))
