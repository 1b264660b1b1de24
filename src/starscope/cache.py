"""Keys and values of one sequence, kept between steps, and the exact-prefix rule for keeping them.

A sequence's cache belongs to it alone; its positions start at 0 and nothing is ever shifted, so it can be kept for
another prompt only as far as the two begin with the same tokens:

    kept = cache.reuse(ids)          # the tokens whose keys and values are still right
    engine.forward([ids[kept:]], [cache])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

FIRST_CAPACITY = 64


class Cache:
    """What one sequence has in an engine's memory: its length and its ids. Engines add the keys and values.

    `row` is its place among the prompts of a call and `prompt_length` the tokens of its prompt (None: nobody said), by
    which edits are selected. `under` is what changed its values besides its tokens, None for nothing.
    """

    def __init__(self, context_length: int) -> None:
        self.length = 0
        self.context_length = context_length
        self.ids: list[int] = []
        self.row = 0
        self.prompt_length: int | None = None
        self.under: object = None

    def advance(self, ids: Sequence[int] | None, count: int) -> None:
        """End a step of `count` tokens. `ids` is None for a step that was fed embeddings."""
        self.length += count
        # A token that came in as an embedding has no id; -1 never equals one, so it is never reused.
        self.ids += [-1] * count if ids is None else [int(i) for i in ids]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length
        del self.ids[length:]

    def reuse(self, ids: Sequence[int], *, row: int = 0, under: object = None) -> int:
        """Begin a prompt. Keeps the longest prefix shared with `ids`, one token less than all of `ids` at the most (its
        logits are wanted), and forgets the rest; all of it when it was made under something else. Returns how many
        tokens are kept.
        """
        if under != self.under:
            self.truncate(0)
        self.row, self.prompt_length, self.under = row, len(ids), under
        limit = min(len(ids) - 1, self.length)
        same = next((n for n in range(limit) if self.ids[n] != ids[n]), max(limit, 0))
        self.truncate(same)
        return same


class ArrayCache(Cache):
    """K and V of every block in arrays, grown by doubling up to `context_length` positions.

    `allocate(shape)` makes an engine's own float32 array; `as_cached(rows)` rounds new rows to what the cache keeps
    (a float16 cache holds float32 numbers that float16 can hold). Values are read back as `[num_kv_heads key dim]`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        context_length: int,
        allocate: Callable[[tuple[int, ...]], Any],
        as_cached: Callable[[Any], Any],
    ) -> None:
        super().__init__(context_length)
        self._allocate, self._as_cached = allocate, as_cached
        self._stored: list[dict[str, Any]] = [{} for _ in range(num_layers)]

    def append(self, layer: int, part: str, rows: Any) -> Any:
        """Keep the step's new rows `[new num_kv_heads dim]` of `part` ("k" or "v") behind the old; returns all
        `[num_kv_heads length+new dim]`. The length itself moves on at `advance`, once the step is complete.
        """
        new, heads, dim = rows.shape
        end = self.length + new
        kept = self._stored[layer].get(part)
        if kept is None or kept.shape[1] < end:
            capacity = FIRST_CAPACITY
            while capacity < end:
                capacity *= 2
            larger = self._allocate((heads, min(capacity, max(self.context_length, end)), dim))
            if kept is not None:
                larger[:, : self.length] = kept[:, : self.length]
            self._stored[layer][part] = kept = larger
        kept[:, self.length : end] = self._as_cached(rows).swapaxes(0, 1)
        return kept[:, :end]

    def replace(self, layer: int, part: str, rows: Any) -> Any:
        """Put `[num_kv_heads n dim]` in the place of the first n positions of `part`; returns them as kept."""
        kept = self._stored[layer][part][:, : rows.shape[1]]
        kept[:] = self._as_cached(rows)
        return kept
