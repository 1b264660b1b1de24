"""What a tokenizer is made from, whichever file it was read from, and the rules that every source keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from starscope.checkpoint.content import short
from starscope.errors import TokenizerError
from starscope.tokenizer.vocabulary import Contents, Roles, Spaces, TokenType, padding_piece


@dataclass(frozen=True)
class Source:
    """A tokenizer before its vocabulary is needed: `load` reads that, once."""

    where: str  # the file or folder, for messages
    size: int  # tokens
    load: Callable[[], Contents]
    pre_tokenizer: str  # the GGUF name
    roles: Roles
    add_bos: bool
    spaces: Spaces | None = None  # of a SentencePiece vocabulary; None: byte-level BPE
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" and others by name
    notes: tuple[str, ...] = ()  # what was assumed or left out, for a person
    pre_is_assumed: bool = False

    def __post_init__(self) -> None:
        roles = self.roles
        named = {"bos": roles.bos, "eos": roles.eos, "unk": roles.unk, "pad": roles.pad}
        named |= {f"fim {role}": token_id for role, token_id in roles.fim.items()}
        named |= {f"end {number}": token_id for number, token_id in enumerate(roles.ends)}
        for role, token_id in named.items():
            if token_id is not None and not 0 <= token_id < self.size:
                raise TokenizerError(
                    f"{self.where}: the {role} token is {short(token_id)}; the vocabulary has {self.size} tokens."
                )
        if self.add_bos and roles.bos is None:
            raise TokenizerError(f"{self.where} asks for a bos token before every text and names none.")


def padded(contents: Contents, num_rows: int) -> Contents:
    """A vocabulary with unused tokens up to `num_rows`, the rows of the embedding.

    TokenizerError when there are more tokens than rows, or one that is spelled like the padding.
    """
    size = len(contents.pieces)
    if size > num_rows:
        raise TokenizerError(
            f"{contents.where} has {size} tokens, added ones included; the embedding has {num_rows} rows."
        )
    padding = [padding_piece(token_id) for token_id in range(size, num_rows)]
    if not set(padding).isdisjoint(contents.pieces):
        raise TokenizerError(
            f"{contents.where} has a token that is spelled like the padding from {padding_piece(size)} on."
        )
    return replace(
        contents,
        pieces=[*contents.pieces, *padding],
        types=contents.types + bytes([TokenType.UNUSED]) * len(padding),
        scores=None if contents.scores is None else [*contents.scores, *[0.0] * len(padding)],
    )


def split_merges(lines: Iterable[str], where: str) -> list[tuple[str, str]]:
    """The two pieces of each merge, written as one string with a space between them."""
    merges = []
    for number, line in enumerate(lines):
        pieces = line.split(" ")
        if len(pieces) != 2 or "" in pieces:
            raise TokenizerError(
                f"{where}: merge {number} is {short(line)}; expected two pieces with a space between them."
            )
        merges.append((pieces[0], pieces[1]))
    return merges
