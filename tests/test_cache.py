"""Keys and values between steps: growing, forgetting, the exact prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.cache import ArrayCache, Cache


def make(half: bool = False, context_length: int = 500) -> Cache:
    return ArrayCache(
        num_layers=2,
        context_length=context_length,
        allocate=lambda shape: np.empty(shape, np.float32),
        as_cached=(lambda rows: rows.astype(np.float16)) if half else (lambda rows: rows),
    )


def rows(start: int, count: int) -> np.ndarray:  # [count 1 3]
    return (
        np.arange(start, start + count, dtype=np.float32)[:, None, None] + np.array([0.1, 0.2, 0.3], np.float32)
    ).astype(np.float32)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_what_comes_back_is_everything_appended_in_order_whatever_the_steps(counts: list[int]) -> None:
    cache, start = make(), 0
    for count in counts:
        for layer in range(2):
            for part in "kv":
                kept = cache.append(layer, part, rows(start, count) + layer)
                np.testing.assert_array_equal(kept[0], rows(0, start + count)[:, 0] + layer)
        cache.advance(range(start, start + count), count)
        start += count
    assert cache.length == start


def test_a_step_that_fails_halfway_leaves_the_length_as_it_was() -> None:
    cache = make()
    cache.append(0, "k", rows(0, 5))
    assert cache.length == 0
    np.testing.assert_array_equal(cache.append(0, "k", rows(7, 2))[0], rows(7, 2)[:, 0])


def test_a_half_cache_gives_back_what_float16_holds() -> None:
    new = rows(0, 3) / 3
    kept = make(half=True).append(0, "k", new)
    assert kept.dtype == np.float32
    np.testing.assert_array_equal(kept[0], new[:, 0].astype(np.float16).astype(np.float32))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_reuse_keeps_exactly_the_common_prefix_and_leaves_one_token_to_run(old: list[int], new: list[int]) -> None:
    cache = make()
    cache.append(0, "k", rows(0, len(old)))
    cache.advance(old, len(old))
    kept = cache.reuse(new)
    assert kept < len(new)
    assert old[:kept] == new[:kept] == cache.ids
    assert kept == len(new) - 1 or kept == len(old) or old[kept] != new[kept]


def test_tokens_that_came_in_as_embeddings_are_never_reused() -> None:
    cache = make()
    cache.append(0, "k", rows(0, 2))
    cache.advance(None, 2)
    assert cache.reuse([3, 4, 5]) == 0


def test_truncating_past_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="truncate"):
        make().truncate(1)
