"""Keys and values of one sequence at several places: each half of each block where the plan has it."""

from __future__ import annotations

from collections.abc import Mapping

from starscope.cache import Cache


class SplitCache(Cache):
    """What every place keeps of a sequence, under one length."""

    def __init__(self, context_length: int, parts: Mapping[str, Cache]) -> None:
        super().__init__(context_length)
        self.parts = parts

    def at(self, place: str, length: int) -> Cache:
        """A place's own cache, with so many positions behind it."""
        part = self.parts[place]
        part.length = length
        return part
