"""Which layers, heads, positions, steps or rows: an int, some of them, a stretch, or all.

    3              [0, 2, -1]             range(4, 8)
    slice(2, 5)    "2:5"                  "-3:"          as Python cuts; negative numbers count from the end
    "new"          None: all              (positions: those of tokens that were generated)

What is kept of it is a tuple of numbers, a text, or None, and can be written as JSON.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from starscope.errors import UsageError

Selection = int | Sequence[int] | range | slice | str | None
Kept = tuple[int, ...] | str | None

NEW = "new"
ENDLESS = 1 << 62
_SPAN = re.compile(r"\s*(-?\d{1,18})?\s*:\s*(-?\d{1,18})?\s*")


class Stretch(NamedTuple):
    """Numbers from `start` to before `stop`; the first of them is the `number`-th that was selected."""

    start: int
    stop: int
    number: int


def read_selection(given: Any, name: str, *, negative: bool = True, new: bool = False) -> Kept:
    """What was given, as it is kept. UsageError when it is none of these."""
    if given is None:
        return None
    if new and isinstance(given, str) and given == NEW:
        return NEW
    if isinstance(given, slice):
        if given.step not in (None, 1):
            raise UsageError(f"{name} is a slice in steps of {given.step}; expected every one, or a list.")
        given = ":".join("" if end is None else str(_number(end, name)) for end in (given.start, given.stop))
    if isinstance(given, str):
        return _read_span(given, name, negative, new)
    whole = isinstance(given, (list, tuple, range)) or (
        hasattr(given, "__getitem__") and getattr(given, "ndim", 1) != 0
    )
    numbers = tuple(_number(one, name) for one in given) if whole else (_number(given, name),)
    if not numbers:
        raise UsageError(f"{name} selects nothing; expected a number at least, or None for all.")
    if len(set(numbers)) != len(numbers):
        twice = next(one for one in numbers if numbers.count(one) > 1)
        raise UsageError(f"{name} has {twice} twice; expected every number once.")
    if not negative and min(numbers) < 0:
        raise UsageError(f"{name} has {min(numbers)}; expected 0 or more.")
    return numbers


def _read_span(given: str, name: str, negative: bool, new: bool) -> str:
    match = _SPAN.fullmatch(given)
    if match is None:
        others = ' or "new"' if new else ""
        raise UsageError(f'{name} is {given!r}; expected a number, a list of them, a span as "2:5"{others}.')
    start, stop = (None if end is None else int(end) for end in match.groups())
    if not negative and min(start or 0, stop or 0) < 0:
        raise UsageError(f"{name} is {given!r}; expected 0 or more.")
    if start is not None and stop is not None and (start < 0) == (stop < 0) and start >= stop:
        raise UsageError(f"{name} is {given!r}, which selects nothing; expected a start before the stop.")
    return ":".join("" if end is None else str(end) for end in (start, stop))


def _number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{name} has {value!r}; expected a whole number.")
    number = operator.index(value)
    if abs(number) >= ENDLESS:
        raise UsageError(f"{name} has a number of {len(str(abs(number)))} digits; expected a smaller one.")
    return number


def span_of(kept: str) -> tuple[int | None, int | None]:
    """The ends of a span."""
    start, _, stop = kept.partition(":")
    return (int(start) if start else None), (int(stop) if stop else None)


def is_relative(kept: Kept) -> bool:
    """Whether it depends on where the end is."""
    if kept is None or isinstance(kept, tuple):
        return kept is not None and min(kept) < 0
    if kept == NEW:
        return True
    start, stop = span_of(kept)
    return stop is None or stop < 0 or (start is not None and start < 0)


def count_of(kept: Kept) -> int | None:
    """How many are selected; None when that depends on the end, or has none."""
    if isinstance(kept, tuple):
        return len(kept)
    if kept is None or kept == NEW:
        return None
    start, stop = span_of(kept)
    start = start or 0
    if stop is None:
        return -start if start < 0 else None
    return stop - start if (start < 0) == (stop < 0) else None


def stretches(kept: Kept, end: int, name: str, *, last: int = ENDLESS) -> list[Stretch]:
    """The numbers selected, where negative ones count from `end` and spans without a stop go as far; all are 0 to
    `last`. A span is cut at 0, a number before it is a UsageError.
    """
    if kept is None:
        return [Stretch(0, last, 0)]
    if kept == NEW:
        return [Stretch(end, last, 0)]
    if isinstance(kept, str):
        first, final = span_of(kept)
        start = 0 if first is None else first + end if first < 0 else first
        stop = end if final is None else final + end if final < 0 else final
        return [Stretch(max(start, 0), stop, max(-start, 0))] if max(start, 0) < stop else []
    places: dict[int, int] = {}  # where -1 and 5 are one place, the first counts
    for i, one in enumerate(kept):
        places.setdefault(_from_end(one, end, name), i)
    return list(_runs(list(places.items())))


def _from_end(number: int, end: int, name: str) -> int:
    if number + end < 0:
        raise UsageError(f"{name} has {number}; expected at least {-end}, the first of {end}.")
    return number + end if number < 0 else number


def _runs(places: list[tuple[int, int]]) -> Iterator[Stretch]:
    """Numbers that follow one another, in their own order too, together."""
    start = 0
    for i in range(1, len(places) + 1):
        before = places[i - 1]
        if i == len(places) or places[i] != (before[0] + 1, before[1] + 1):
            yield Stretch(places[start][0], before[0] + 1, places[start][1])
            start = i


def indices(kept: Kept, size: int, name: str) -> list[int]:
    """The numbers selected of 0 to `size - 1`; UsageError for one that is out of range."""
    found: list[int] = []
    if isinstance(kept, str):
        for one in span_of(kept):
            if one is not None and not -size <= one <= size:
                raise UsageError(f"{name} is {kept!r}; there are 0 to {size - 1}.")
    for start, stop, _ in stretches(kept, size, name, last=size):
        found += range(start, stop)
    wrong = next((one for one in found if one >= size), None)
    if wrong is not None:
        raise UsageError(f"{name} has {wrong}; there are 0 to {size - 1}.")
    if isinstance(kept, tuple) and len(found) != len(kept):
        raise UsageError(f"{name} has one of them twice, from the beginning and from the end; expected it once.")
    return found


def shown(kept: Kept) -> Any:
    """As JSON has it."""
    if isinstance(kept, tuple):
        return kept[0] if len(kept) == 1 else list(kept)
    return kept
