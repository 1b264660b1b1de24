"""Which tokens a part of a text is, and which part of a text a token is; in characters, whatever bytes they take.

spans = token_spans(tokenizer.token_bytes, ids, "a = é")     # [(0, 1), (1, 3), (3, 5)]
overlapping(spans, 4, 5)                                     # [2]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from starscope.errors import UnsupportedError, UsageError


def token_spans(token_bytes: Callable[[int], bytes], ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Of each token of a text the characters [start, stop) that it has bytes of: a character may be of several tokens.

    `ids` are what the text was encoded to. UnsupportedError when their bytes are not the text's.
    """
    pieces = [token_bytes(one) for one in ids]
    if b"".join(pieces) != text.encode():
        raise UnsupportedError(
            "the tokens do not spell the text; expected the tokens of that text by a tokenizer that loses nothing."
        )
    begins = [0, *accumulate(len(character.encode()) for character in text)]  # bytes before each character
    ends = list(accumulate(map(len, pieces)))
    spans = []
    for end, piece in zip(ends, pieces, strict=True):
        first = bisect_right(begins, end - len(piece)) - 1
        spans.append((first, bisect_right(begins, end - 1) if piece else first))
    return spans


def overlapping(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """The tokens that have a part of the characters [start, stop)."""
    return [i for i, (first, end) in enumerate(spans) if first < stop and start < end]


def check_span(text: str, start: int, stop: int) -> None:
    """UsageError unless [start, stop) are characters of a text, one at least."""
    if not all(isinstance(one, int) for one in (start, stop)) or not 0 <= start < stop <= len(text):
        raise UsageError(
            f"characters {start} to {stop} are not part of the text; expected 0 <= start < stop <= {len(text)}."
        )
