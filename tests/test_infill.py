"""Fill-in-the-middle prompts: the order of the parts, what is cut, and what is never parsed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import ContextOverflowError, UnsupportedError
from starscope.infill import cut_to_fit, infill_budget, infill_prompt

PREFIX, SUFFIX, MIDDLE, BOS = 1001, 1002, 1003, 1004


def make_tokenizer(*, fim: bool = True, add_bos: bool = False) -> SimpleNamespace:
    """Bytes are tokens; `special=True` would turn "<fim_suffix>" into its id."""

    def encode(text: str, special: bool = False) -> list[int]:
        if special and "<fim_suffix>" in text:
            return [SUFFIX]
        return list(text.encode())

    markers = SimpleNamespace(prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE)
    return SimpleNamespace(encode=encode, fim=markers if fim else None, bos_id=BOS, add_bos=add_bos)


def test_the_prompt_is_prefix_suffix_middle() -> None:
    assert infill_prompt(make_tokenizer(), "ab", "c", budget=100).ids == [PREFIX, 97, 98, SUFFIX, 99, MIDDLE]


def test_empty_sides_keep_their_markers() -> None:
    assert infill_prompt(make_tokenizer(), "", "", budget=3).ids == [PREFIX, SUFFIX, MIDDLE]


def test_a_vocabulary_that_begins_with_bos_has_it_first() -> None:
    assert infill_prompt(make_tokenizer(add_bos=True), "a", "b", budget=6).ids == [BOS, PREFIX, 97, SUFFIX, 98, MIDDLE]


def test_text_that_looks_like_a_marker_stays_text() -> None:
    text = "x = '<fim_suffix>'"
    ids = infill_prompt(make_tokenizer(), text, text, budget=100).ids
    assert ids == [PREFIX, *text.encode(), SUFFIX, *text.encode(), MIDDLE]


def test_a_vocabulary_without_markers_says_so() -> None:
    with pytest.raises(UnsupportedError, match="fill-in-the-middle") as caught:
        infill_prompt(make_tokenizer(fim=False), "a", "b", budget=100)
    assert "suffix" in caught.value.hint


def test_a_budget_smaller_than_the_markers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextOverflowError, match="needs 3 tokens; 2 are free"):
        infill_prompt(make_tokenizer(), "a", "b", budget=2)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 100))
def test_the_prefix_keeps_its_end_and_the_suffix_its_start(num_before: int, num_after: int, room: int) -> None:
    prefix, suffix = list(range(num_before)), list(range(100, 100 + num_after))
    before, after = cut_to_fit(prefix, suffix, room)
    assert list(before) == prefix[num_before - len(before) :]
    assert list(after) == suffix[: len(after)]
    assert len(before) + len(after) == min(room, num_before + num_after)
    assert len(after) >= min(num_after, room // 4)
    assert len(before) >= min(num_before, room - room // 4)


@pytest.mark.parametrize(("max_new_tokens", "budget"), [(0, 100), (10, 90), (25, 75), (90, 75), (1000, 75)])
def test_the_answer_gets_its_tokens_up_to_a_quarter_of_the_context(max_new_tokens: int, budget: int) -> None:
    assert infill_budget(100, max_new_tokens) == budget
