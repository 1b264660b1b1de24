"""Text to ids by scores, as SentencePiece's BPE does it: join the two neighbours that make the best piece, again.

The pieces of a text are its characters at first, with `▁` for each space. Of all neighbours that together are a piece,
those whose piece has the highest score become one, the leftmost first where scores are equal. A character that is no
piece becomes the tokens of its bytes.

    "▁the"  ->  ▁ t h e  ->  ▁t h e  ->  ▁t he  ->  ▁the

Equal scores are why this is not left to the `tokenizers` library, whose merges all have ranks of their own: LLaMA's
runs of spaces share one score.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from starscope.checkpoint.content import short
from starscope.errors import TokenizerError
from starscope.tokenizer.bytelevel import as_bytes, nameless_byte
from starscope.tokenizer.vocabulary import (
    BYTE_PIECES,
    HIDDEN,
    MARKERS,
    SPACE,
    Contents,
    Matching,
    Spaces,
    TokenType,
    is_padding,
)

LONGEST_KEPT = 64  # characters of a word whose ids are remembered
MOST_KEPT = 200_000  # words


class ScoreEncoder:
    """The ids of texts. Tokens in `hidden` come from a text on request alone, as control tokens do."""

    def __init__(self, contents: Contents, spaces: Spaces, hidden: Collection[int] = ()) -> None:
        self._spaces = spaces
        self._ids: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._bytes: list[int | None] = [None] * 256
        added: list[tuple[str, int]] = []
        for token_id, (piece, kind) in enumerate(zip(contents.pieces, contents.types, strict=True)):
            if kind == TokenType.BYTE:
                self._bytes[int(piece[3:5], 16)] = token_id
            elif kind in HIDDEN or kind == TokenType.USER_DEFINED:
                added.append((piece, token_id))
            elif piece and not is_padding(token_id, piece):
                self._ids[piece] = token_id
                self._scores[piece] = contents.scores[token_id] if contents.scores is not None else 0.0
        self._special = _Finder(added, contents)
        self._plain = _Finder(
            [(piece, i) for piece, i in added if contents.types[i] not in HIDDEN and i not in hidden], contents
        )
        self._words = _make_cutter(self._ids)
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str, special: bool, begins: bool = True) -> list[int]:
        """The ids of a text; `begins`: it is the beginning of a text, and gets the space before it if any does.

        TokenizerError for half a surrogate pair, or a byte that the vocabulary cannot write.
        """
        as_bytes(text)
        ids: list[int] = []
        at, gets_space = 0, begins and self._spaces.prefix != "never"
        for start, end, token_id in (self._special if special else self._plain).find(text):
            if start > at:
                self._add(text[at:start], gets_space, ids)
            ids.append(token_id)
            at, gets_space = end, self._spaces.prefix == "always"
        self._add(text[at:], gets_space, ids)
        return ids

    def encode_batch(self, texts: list[str], begins: Sequence[bool]) -> list[list[int]]:
        """The ids of each text, read plainly; errors as for `encode`."""
        return [self.encode(text, False, first) for text, first in zip(texts, begins, strict=True)]

    def _add(self, text: str, gets_space: bool, ids: list[int]) -> None:
        """The ids of a text without special tokens."""
        if self._spaces.remove_extra:
            text = re.sub(" {2,}", " ", text.strip(" "))
        if not text:
            return
        text = text.replace(" ", SPACE)
        if gets_space and not (self._spaces.unless_there and text[0] == SPACE):
            text = SPACE + text
        kept = self._kept
        for word in self._words.findall(text):
            found = kept.get(word)
            if found is None:
                found = self._word_ids(word)
                if len(word) <= LONGEST_KEPT:
                    if len(kept) >= MOST_KEPT:
                        kept.clear()
                    kept[word] = found
            ids += found

    def _word_ids(self, word: str) -> list[int]:
        ids: list[int] = []
        for piece in self._merged(word):
            token_id = self._ids.get(piece)
            if token_id is not None:
                ids.append(token_id)
            else:
                ids += map(self._byte_id, piece.encode())
        return ids

    def _byte_id(self, byte: int) -> int:
        token_id = self._bytes[byte]
        if token_id is None:
            raise TokenizerError(f"the text holds {nameless_byte(byte)}, for which the vocabulary has no token.")
        return token_id

    def _merged(self, word: str) -> list[str]:
        """The pieces that a word is joined to."""
        scores = self._scores
        pieces = list(word)
        size = len(pieces)
        before, after = list(range(-1, size - 1)), list(range(1, size + 1))
        # The best pair first: by falling score, then from the left. The length tells whether it is still that pair.
        waiting = [
            (-score, left, 2)
            for left in range(size - 1)
            if (score := scores.get(pieces[left] + pieces[left + 1])) is not None
        ]
        heapq.heapify(waiting)
        while waiting:
            _, left, length = heapq.heappop(waiting)
            right = after[left]
            if right >= size or not pieces[left] or len(pieces[left]) + len(pieces[right]) != length:
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = following = after[right]
            if following < size:
                before[following] = left
            for first, second in ((before[left], left), (left, following)):
                if first >= 0 and second < size:
                    joined = pieces[first] + pieces[second]
                    if (score := scores.get(joined)) is not None:
                        heapq.heappush(waiting, (-score, first, len(joined)))
        return [piece for piece in pieces if piece]


class _Finder:
    """Finds tokens in a text, the longest of those that begin at a place."""

    def __init__(self, tokens: Sequence[tuple[str, int]], contents: Contents) -> None:
        longest_first = sorted((token for token in tokens if token[0]), key=lambda token: -len(token[0]))
        self._ids = [token_id for _, token_id in longest_first]
        patterns = [_pattern(piece, contents.matching.get(token_id)) for piece, token_id in longest_first]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, end and id of each."""
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            assert found.lastindex is not None
            yield found.start(), found.end(), self._ids[found.lastindex - 1]


def _pattern(piece: str, flags: Matching | None) -> str:
    """One group for the token, and around it the spaces that it swallows."""
    found = f"({re.escape(piece)})"
    if flags is None:
        return found
    if flags.single_word:
        found = rf"(?<!\w){found}(?!\w)"
    return (r"\s*" if flags.lstrip else "") + found + (r"\s*" if flags.rstrip else "")


def _make_cutter(pieces: Collection[str]) -> re.Pattern[str]:
    """What cuts a text into words that no piece reaches over, so that each is joined alone, and once.

    Pieces have `▁` at their beginning alone, and no line feed: where both holds, as nearly everywhere, a word is what
    stands between spaces.
    """
    lines = any("\n" in piece and len(piece) > 1 for piece in pieces)
    spaces = any(SPACE in piece.lstrip(SPACE) for piece in pieces)
    if spaces:
        return re.compile(r".+" if lines else r"[^\n]+|\n+", re.DOTALL)
    return re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+" if lines else f"{SPACE}*[^{SPACE}\n]+|{SPACE}+|\n+")


def finish_marked(contents: Contents, named: Collection[int] = ()) -> Contents:
    """The vocabulary, if it can be used as one of SentencePiece; TokenizerError says what is wrong with it.

    Markers of infilling and of an end that the file calls ordinary, and the ids in `named`, become control tokens:
    SentencePiece's own trainer leaves them among the pieces that a text is joined to.
    """
    where, pieces, types = contents.where, contents.pieces, bytearray(contents.types)
    known = set(BYTE_PIECES)
    for token_id, (piece, kind) in enumerate(zip(pieces, contents.types, strict=True)):
        if not piece:
            raise TokenizerError(f"{where}: token {token_id} is empty; expected some text.")
        if kind == TokenType.BYTE and piece not in known:
            found = f"token {token_id} is a byte and spelled {short(piece)}"
            raise TokenizerError(f"{where}: {found}; expected <0x00> to <0xFF>.")
        if kind == TokenType.NORMAL and (piece in MARKERS or token_id in named):
            types[token_id] = TokenType.CONTROL
    if contents.scores is not None and not all(map(math.isfinite, contents.scores)):
        token_id = next(i for i, score in enumerate(contents.scores) if not math.isfinite(score))
        raise TokenizerError(
            f"{where}: the score of token {token_id} is {contents.scores[token_id]}; expected a number."
        )
    if SPACE not in pieces or types[pieces.index(SPACE)] != TokenType.NORMAL:
        raise TokenizerError(f"{where} has no ordinary token {SPACE}, which stands for a space.")
    return replace(contents, types=bytes(types))
