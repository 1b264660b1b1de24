"""Fill-in-the-middle as StarCoder was trained: documents are cut in three and the middle is moved to the end.

It happens inside a packed sample, to each document fragment in it (context-level), at character positions. With
probability `rate` a fragment becomes, half of the time each,

    PSM      <fim_prefix> P <fim_suffix> S <fim_middle> M <|endoftext|>
    SPM      <fim_prefix> <fim_suffix> S <fim_middle> P M <|endoftext|>          (variant 2 of Bavarian et al. 2022)

The draws depend on (seed, epoch, sample, fragment) alone. What no longer fits is cut from the start of P and the end
of S, never from M, and every moved middle is followed by the end of text: that is how a model learns to stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from starscope.errors import UsageError
from starscope.train.data import Codec, Ids, random_words

# StarCoder's spellings.
END_OF_TEXT, FIM_PREFIX, FIM_MIDDLE = "<|endoftext|>", "<fim_prefix>", "<fim_middle>"
FIM_SUFFIX, FIM_PAD = "<fim_suffix>", "<fim_pad>"
UNKNOWN_CHARACTER = "\ufffd"  # what decoding gives where a cut went through a character


class Named(Protocol):
    """A vocabulary whose tokens have spellings."""

    def token_id(self, token: str) -> int: ...


@dataclass(frozen=True)
class FimIds:
    """The ids of the tokens that fill-in-the-middle writes."""

    end_of_text: int
    prefix: int
    middle: int
    suffix: int
    pad: int

    @classmethod
    def of(cls, vocabulary: Named) -> FimIds:
        return cls(
            *(vocabulary.token_id(token) for token in (END_OF_TEXT, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, FIM_PAD))
        )


@dataclass(frozen=True)
class Draw:
    """What chance decides about one fragment of `length` characters: move its middle or not, the cuts, the form."""

    move: bool
    cuts: tuple[int, int]
    spm: bool


def draw(seed: int, epoch: int, sample: int, fragment: int, *, length: int, rate: float, spm_rate: float) -> Draw:
    """The draws for one fragment. Both cuts are uniform over 0..length, ends included, so any part may be empty."""
    words = random_words(seed, epoch, sample, fragment, count=4)
    a, b = (int(word % np.uint64(length + 1)) for word in words[1:3])
    return Draw(_uniform(words[0]) < rate, (min(a, b), max(a, b)), _uniform(words[3]) < spm_rate)


def _uniform(word: np.uint64) -> float:
    return int(word >> np.uint64(11)) / 2**53


def cut_to_fit(prefix: list[int], suffix: list[int], excess: int) -> tuple[list[int], list[int]]:
    """Drop `excess` tokens from the prefix's start and the suffix's end, in proportion to their lengths."""
    if excess <= 0:
        return prefix, suffix
    from_suffix = excess * len(suffix) // (len(prefix) + len(suffix))
    from_prefix = excess - from_suffix
    return prefix[from_prefix:], suffix[: len(suffix) - from_suffix]


class FillInTheMiddle:
    """A transform for `Batches`: `[context_length+1]` ids -> as many, padded with <fim_pad> where it got shorter."""

    def __init__(self, codec: Codec, ids: FimIds, *, seed: int, rate: float = 0.5, spm_rate: float = 0.5) -> None:
        if not (0 <= rate <= 1 and 0 <= spm_rate <= 1):
            raise UsageError(f"the rates are {rate} and {spm_rate}; expected probabilities between 0 and 1.")
        self._codec, self._ids = codec, ids
        self._seed, self._rate, self._spm_rate = seed, rate, spm_rate

    def __call__(self, sample: Ids, epoch: int, index: int) -> Ids:
        if self._rate == 0:
            return sample
        length = len(sample)
        ends = np.flatnonzero(sample == self._ids.end_of_text)
        made: list[int] = []
        start = 0
        for fragment, end in enumerate([*map(int, ends), length]):
            ended = end < length  # whether the document's own end of text follows
            if end > start:
                made += self._fragment(sample[start:end].tolist(), ended, (epoch, index, fragment))
            if ended:
                made.append(self._ids.end_of_text)
            start = end + 1
        return np.array(made + [self._ids.pad] * (length - len(made)), sample.dtype)

    def _fragment(self, ids: list[int], ended: bool, key: tuple[int, int, int]) -> list[int]:
        """One fragment, moved or not; never longer than it was."""
        text = self._codec.decode(ids)
        choice = draw(self._seed, *key, length=len(text), rate=self._rate, spm_rate=self._spm_rate)
        if not choice.move or UNKNOWN_CHARACTER in text:
            return ids
        first, second = choice.cuts
        parts = text[:first], text[first:second], text[second:]
        prefix, middle, suffix = map(self._codec.encode, parts)
        added = 3 if ended else 4
        excess = len(prefix) + len(middle) + len(suffix) + added - len(ids)
        if excess > len(prefix) + len(suffix):  # the middle alone does not fit: it stays where it is
            return ids
        prefix, suffix = cut_to_fit(prefix, suffix, excess)
        t = self._ids
        if choice.spm:
            moved = [t.prefix, t.suffix, *suffix, t.middle, *prefix, *middle]
        else:
            moved = [t.prefix, *prefix, t.suffix, *suffix, t.middle, *middle]
        return moved if ended else [*moved, t.end_of_text]
