"""Where the native engine's values lie: slots of one buffer, given on from one value to a later one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a value is: `cols` columns of a slot, from `column` on."""

    slot: int
    column: int
    cols: int


@dataclass
class Slot:
    """`width` columns; used from instruction `begin` to `end`. `array`: the caller's own, not a place in the buffer."""

    width: int
    begin: int
    end: int
    array: bool = False


@dataclass(frozen=True)
class Input:
    """A value that comes in: rows of a table by the indices of an input, unless the caller has the value itself."""

    edge: int
    table: str
    source: int  # edge of the indices


@dataclass
class Compiled:
    """A program's instructions, the widths of its slots (those of its arrays first), and what its arrays are."""

    instructions: list[Any]
    widths: list[int]
    inputs: list[Input]  # the first arrays, in order; then come those of the kept values; at last the logits
    kept: dict[int, tuple[int, int, int]]  # edge -> the number of its array, its first column and its columns
    views: dict[int, tuple[Any, int]]  # edge -> where it is while it lives, and its columns
    ends: list[int]  # by number of operations: the instructions that have run when those have
    beside: dict[int, int]  # block -> the first of the instructions that compute its attention openly, behind `ends`

    @property
    def arrays(self) -> int:
        return len(self.inputs) + len({number for number, _, _ in self.kept.values()}) + 1


def share(slots: Sequence[Slot]) -> tuple[list[int], list[int]]:
    """One slot for those that are not in use at the same time: the number of each, and the widths by number.

    The caller's arrays come first, in their order; they share nothing.
    """
    arrays = [i for i, slot in enumerate(slots) if slot.array]
    number = [-1] * len(slots)
    for n, i in enumerate(arrays):
        number[i] = n
    widths = [slots[i].width for i in arrays]
    free_from: list[int] = [-1] * len(widths)  # the instruction from which each slot may be used again
    for i, slot in enumerate(slots):
        if slot.array:
            continue
        found = next(
            (n for n in range(len(arrays), len(widths)) if widths[n] == slot.width and free_from[n] < slot.begin),
            None,
        )
        if found is None:
            found = len(widths)
            widths.append(slot.width)
            free_from.append(-1)
        number[i], free_from[found] = found, slot.end
    return number, widths
