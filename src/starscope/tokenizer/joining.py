"""Merges and scores of one SentencePiece vocabulary, each made from the other.

A tokenizer.json lists merges, a GGUF file has scores. Merges that were made from scores list every way to join two
pieces to one, the best pieces first. Then scores say the same: a piece's is how early its first merge comes, and
pieces whose merges stand among one another share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starscope.errors import UnsupportedError
from starscope.tokenizer.vocabulary import Contents, TokenType, is_padding


def _joinable(contents: Contents) -> dict[str, int]:
    """The ordinary pieces with their ids: those that a text is joined to."""
    return {
        piece: token_id
        for token_id, (piece, kind) in enumerate(zip(contents.pieces, contents.types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.UNUSED) and not is_padding(token_id, piece)
    }


def make_merges(contents: Contents) -> list[tuple[str, str]]:
    """The merges of a vocabulary with scores: all pairs that are a piece, by score, the longest left part first."""
    assert contents.scores is not None
    ids = _joinable(contents)
    found = [
        (-contents.scores[token_id], -at, at - len(piece), token_id, piece[:at], piece[at:])
        for piece, token_id in ids.items()
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def make_scores(contents: Contents) -> list[float]:
    """The scores that join pieces as the merges do, 0 for tokens that are not joined.

    UnsupportedError when no scores do: where a way to make a piece is not among the merges.
    """
    ids = _joinable(contents)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    ways: dict[str, int] = {}
    for rank, (left, right) in enumerate(contents.merges):
        piece = left + right
        if piece not in ids:
            continue
        first.setdefault(piece, rank)
        last[piece] = rank
        ways[piece] = ways.get(piece, 0) + 1
    for piece in ids:
        possible = sum(piece[:at] in ids and piece[at:] in ids for at in range(1, len(piece)))
        if possible != ways.get(piece, 0):
            found = f"{ways.get(piece, 0)} of the {possible} ways to join {piece!r:.60}"
            raise UnsupportedError(
                f"{contents.where}: the merges have {found}; a GGUF file holds scores, which allow all of them."
            )
    scores = [0.0] * len(contents.pieces)
    group, end = 0, -1
    for piece in sorted(first, key=first.__getitem__):
        if first[piece] > end:
            group += 1
        end = max(end, last[piece])
        scores[ids[piece]] = -float(group)
    for piece, token_id in ids.items():
        if piece not in first:
            scores[token_id] = -float(group + 1)
    return scores


def scores_of(contents: Contents) -> Sequence[float]:
    """The scores of a vocabulary, as it has them or as its merges imply them."""
    return make_scores(contents) if contents.scores is None else contents.scores


def merges_of(contents: Contents) -> Sequence[tuple[str, str]]:
    """The merges of a vocabulary, as it has them or as its scores imply them."""
    return contents.merges or (make_merges(contents) if contents.marked and contents.scores is not None else ())
