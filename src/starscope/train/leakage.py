"""How much of the held-out text is also in the text that is trained on: then it measures memory, not prediction.

Two shares: of the held-out lines of at least 20 characters, and of the runs of 13 words (Brown et al. 2020, appendix
C), those that occur in the other text too. Both are compared by 64-bit hashes, of which at most 2^18 of a kind are
kept, chosen by their value; past 32 MiB of text one piece in several is compared. So memory is constant:

    found = measure_leakage(train, held_out)        # lists of Passage
    print(f"{found.line_share:.1%} of lines, {found.gram_share:.1%} of 13-grams")
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from starscope.train.data import MIX, Ids, mix
from starscope.train.documents import Passage

SHORTEST_LINE = 20  # characters; shorter lines are everybody's
LONGEST_LINE = 10_000
WORDS = 13
MOST_KEPT = 1 << 18
MOST_BYTES = 32 << 20
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Leakage:
    """Shares are of held-out lines and 13-grams; where not all text was compared, at least so much is there."""

    lines: int  # held-out ones that were looked for
    line_share: float
    grams: int
    gram_share: float
    compared: float  # of the text to train on


class Sketch:
    """A sample of hashes, each with how often it was added; which ones, their values alone decide."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most, self._mask = most, np.uint64(0)
        self._values, self._counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._found = np.zeros(0, bool)

    def add(self, hashes: Ids) -> None:
        hashes = hashes[hashes & self._mask == 0]
        values, inverse = np.unique(np.concatenate([self._values, hashes]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self._counts, np.ones(len(hashes), np.int64)]))
        while len(values) > self._most:
            self._mask = self._mask << np.uint64(1) | np.uint64(1)
            chosen = values & self._mask == 0
            values, counts = values[chosen], counts[chosen]
        self._values, self._counts, self._found = values, counts.astype(np.int64), np.zeros(len(values), bool)

    def look_for(self, hashes: Ids) -> None:
        """Note which of the sample are among these. Nothing is added after this."""
        if len(self._values):
            hashes = hashes[hashes & self._mask == 0]
            places = np.minimum(np.searchsorted(self._values, hashes), len(self._values) - 1)
            self._found[places[self._values[places] == hashes]] = True

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    @property
    def share(self) -> float:
        """Of all that was added, what was found."""
        return float(self._counts[self._found].sum() / self.count) if self.count else 0.0


def measure_leakage(train: Sequence[Passage], held_out: Sequence[Passage], most_bytes: int | None = None) -> Leakage:
    """Read both once (a part of what is longer than `most_bytes`, 32 MiB when not given) and compare."""
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes
    lines, grams = Sketch(), Sketch()
    for line_hashes, gram_hashes in _hashes(held_out, most_bytes)[1]:
        lines.add(line_hashes)
        grams.add(gram_hashes)
    every, hashes = _hashes(train, most_bytes)
    for line_hashes, gram_hashes in hashes:
        lines.look_for(line_hashes)
        grams.look_for(gram_hashes)
    return Leakage(lines.count, lines.share, grams.count, grams.share, 1 / every)


def _hashes(passages: Sequence[Passage], most_bytes: int) -> tuple[int, Iterator[tuple[Ids, Ids]]]:
    """One in how many pieces is read, and the hashes of the lines and of the 13-grams of each."""
    every = max(1, -(-sum(passage.bytes for passage in passages) // most_bytes))
    return every, (found for passage in passages for found in _of_passage(passage, every))


def _of_passage(passage: Passage, every: int) -> Iterator[tuple[Ids, Ids]]:
    start = 0 if every == 1 else crc32(os.fsencode(passage.name)) % every
    rest, words, is_first = "", np.zeros(0, np.uint64), True
    for number, piece in enumerate(passage.pieces()):
        if (number - start) % every:
            rest, words, is_first = "", words[:0], False
            continue
        lines = (rest + piece).split("\n")
        if every > 1 and not is_first:
            del lines[0]  # its beginning was left out
        rest = lines.pop() if lines else ""
        if len(rest) > LONGEST_LINE:
            rest = rest[: LONGEST_LINE + 1]  # so that it stays too long
        words = np.concatenate([words[len(words) - WORDS + 1 :] if len(words) >= WORDS else words, _words(piece)])
        yield _lines(lines), _grams(words)
    yield _lines([rest]), words[:0]


def _lines(lines: Sequence[str]) -> Ids:  # [n] uint64
    stripped = (line.strip() for line in lines)
    digests = [
        hashlib.blake2b(line.encode(), digest_size=8).digest()
        for line in stripped
        if SHORTEST_LINE <= len(line) <= LONGEST_LINE
    ]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _words(text: str) -> Ids:  # [n] uint64
    return np.array([crc32(word.encode()) for word in WORD.findall(text.lower())], np.uint64)


def _grams(words: Ids) -> Ids:
    """A hash of each run of 13 words."""
    count = len(words) - WORDS + 1
    if count <= 0:
        return words[:0]
    with np.errstate(over="ignore"):
        total = np.zeros(count, np.uint64)
        for place in range(WORDS):
            total = (total + mix(words[place : place + count] + MIX)) * MIX
        return mix(total)
