"""Generating with an engine that plays a script: pieces, stop strings, ends, limits, the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from starscope.cache import ArrayCache, Cache
from starscope.errors import ContextOverflowError, UsageError
from starscope.generate import PREFILL_CHUNK, Completion, Piece, StopScanner, generate, last_piece
from starscope.sampling import SamplingOptions

EOS, VOCAB = 256, 260


class ScriptedEngine:
    """Always continues with the next token of the script, whatever the prompt; bytes are tokens."""

    name = "scripted"
    device = "cpu"

    edits = None

    def __init__(self, script: Sequence[int], context_length: int = 4096) -> None:
        self.script, self.context_length = list(script), context_length
        self.steps: list[list[int]] = []
        self.prompt_tokens: int | None = None

    def new_cache(self) -> Cache:
        return ArrayCache(
            num_layers=0, context_length=self.context_length, allocate=np.empty, as_cached=lambda rows: rows
        )

    def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
        [ids], [cache] = sequences, caches
        assert cache.length + len(ids) <= self.context_length
        self.steps.append(list(ids))
        cache.advance(ids, len(ids))
        logits = np.zeros((1, VOCAB), np.float32)
        position = cache.length - (self.prompt_tokens or 0)
        if 0 <= position < len(self.script):
            logits[0, self.script[position]] = 5.0
        return [logits]


class ByteDetokenizer:
    def __init__(self, after: Sequence[int]) -> None:
        self.held = b""

    def push(self, token_id: int) -> str:
        self.held += bytes([token_id])
        for end in range(len(self.held), -1, -1):  # what is complete
            try:
                text = self.held[:end].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[end:]
            return text
        return ""

    def finish(self) -> str:
        return self.held.decode(errors="replace")


TOKENIZER = SimpleNamespace(bos_id=None, eos_id=EOS, stop_ids=frozenset({EOS}), stream=ByteDetokenizer)
PROMPT = [1, 2, 3]


def play(
    script: Sequence[int], prompt: Sequence[int] = PROMPT, context_length: int = 4096, **options: Any
) -> tuple[ScriptedEngine, list[Piece], Completion]:
    engine = ScriptedEngine(script, context_length)
    engine.prompt_tokens = len(prompt) or 1
    pieces = list(generate(engine, TOKENIZER, prompt, **options))
    assert pieces[-1].completion is not None
    assert all(piece.completion is None for piece in pieces[:-1])
    return engine, pieces, pieces[-1].completion


# Few letters, so that stop strings meet each other and themselves; é and 😀 are several tokens each.
TEXT = st.text("abé😀", max_size=30)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=5), max_size=3)


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that ends first, read letter by letter."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(TEXT, STOPS)
def test_streamed_pieces_are_the_text_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    _, pieces, completion = play([*text.encode(), EOS], stop=stops)
    expected = first_stop(text, stops)
    assert completion.text == "".join(map(str, pieces)) == (text if expected is None else expected)
    assert completion.finish_reason == "stop"


@example("xabbb", ["abbb", "b"], [])  # the second ends first, the first begins first
@example("xabbb", ["bbb", "abbb"], [3])  # both end together
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_a_stop_string_is_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    scanner = StopScanner(stops)
    released = "".join(scanner.push(part) for part in parts) + scanner.finish()
    expected = first_stop(text, stops)
    assert released == (text if expected is None else expected)
    assert scanner.stopped == (expected is not None)


@given(TEXT, STOPS)
def test_no_more_text_is_held_back_than_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    scanner, released = StopScanner(stops), ""
    for end, letter in enumerate(text, start=1):
        released += scanner.push(letter)
        if scanner.stopped:
            break
        held = text[len(released) : end]
        assert held == "" or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)


def test_text_is_released_as_soon_as_it_cannot_begin_a_stop_string() -> None:
    _, pieces, completion = play(b"abXabcd", stop=["abc"], max_new_tokens=50)
    assert [piece.text for piece in pieces] == ["", "", "abX", "", "", "", ""]
    assert (completion.text, completion.finish_reason) == ("abX", "stop")
    assert completion.token_ids == list(b"abXabc")


def test_a_character_of_several_tokens_is_never_broken() -> None:
    _, pieces, completion = play([*"é😀".encode(), EOS])
    assert [piece.text for piece in pieces] == ["", "é", "", "", "", "😀", ""]
    assert completion.text == "é😀"


def test_bytes_left_over_at_the_end_are_not_lost() -> None:
    _, pieces, completion = play([97, 0xC3], max_new_tokens=2)
    assert completion.text == "".join(map(str, pieces)) == "a\ufffd"


def test_the_stop_token_ends_it_and_is_no_part_of_it() -> None:
    engine, pieces, completion = play([97, 98, EOS, 99])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("ab", [97, 98], "stop")
    assert [piece.token_id for piece in pieces] == [97, 98, None]
    assert engine.steps == [PROMPT, [97], [98]]


def test_the_callers_stop_tokens_replace_the_tokenizers() -> None:
    _, _, completion = play([97, EOS - 1, 98], stop_ids={98})
    assert completion.token_ids == [97, 255]


def test_as_many_tokens_as_asked_for_and_no_step_for_nothing() -> None:
    engine, _, completion = play(b"abcdef", max_new_tokens=3)
    assert (completion.text, completion.finish_reason, completion.prompt_tokens) == ("abc", "length", 3)
    assert engine.steps == [PROMPT, [97], [98]]


def test_zero_tokens_evaluate_the_prompt_alone() -> None:
    engine, pieces, completion = play(b"abc", max_new_tokens=0)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "length")
    assert len(pieces) == 1
    assert engine.steps == [PROMPT]
    assert completion.timings.prefill_tok_s > 0
    assert completion.timings.decode_tok_s == 0.0


def test_the_end_of_the_context_ends_the_text_with_length() -> None:
    engine, _, completion = play(b"abcdefgh", context_length=5)
    assert (completion.text, completion.finish_reason) == ("abc", "length")
    assert sum(map(len, engine.steps)) == 5


def test_a_prompt_that_fills_the_context_still_gives_its_next_token() -> None:
    _, _, completion = play(b"abc", prompt=[1] * 5, context_length=5)
    assert (completion.text, completion.finish_reason) == ("a", "length")


def test_a_prompt_over_the_context_is_an_error_with_both_numbers_before_any_work() -> None:
    engine = ScriptedEngine(b"abc", context_length=5)
    with pytest.raises(ContextOverflowError, match="6 tokens; the context has 5"):
        generate(engine, TOKENIZER, [1] * 6)
    assert engine.steps == []


@pytest.mark.parametrize(("bos", "eos", "first"), [(7, 8, 7), (None, 8, 8)])
def test_an_empty_prompt_begins_with_bos_or_else_eos(bos: int | None, eos: int, first: int) -> None:
    engine = ScriptedEngine([])
    tokenizer = SimpleNamespace(bos_id=bos, eos_id=eos, stop_ids=frozenset(), stream=ByteDetokenizer)
    completion = last_piece(generate(engine, tokenizer, [], max_new_tokens=0))
    assert engine.steps == [[first]]
    assert completion.prompt_tokens == 1


def test_an_empty_prompt_without_either_is_refused() -> None:
    tokenizer = SimpleNamespace(bos_id=None, eos_id=None, stop_ids=frozenset(), stream=ByteDetokenizer)
    with pytest.raises(UsageError, match="prompt is empty"):
        generate(ScriptedEngine([]), tokenizer, [])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 101}, "logprobs is 101"),
        ({"stop": ["a", ""]}, "stop text is empty"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        generate(ScriptedEngine([]), TOKENIZER, PROMPT, **wrong)


def test_one_stop_string_need_not_be_in_a_list() -> None:
    assert play(b"abcd", stop="cd", max_new_tokens=4)[2].text == "ab"


def test_a_long_prompt_is_evaluated_in_chunks() -> None:
    prompt = [i % 250 for i in range(2 * PREFILL_CHUNK + 10)]
    engine, _, completion = play(b"a", prompt=prompt, max_new_tokens=1)
    assert [len(step) for step in engine.steps] == [PREFILL_CHUNK, PREFILL_CHUNK, 10]
    assert [token for step in engine.steps for token in step] == prompt
    assert completion.prompt_tokens == len(prompt)


def test_a_cache_is_used_as_far_as_it_holds_the_same_tokens() -> None:
    engine = ScriptedEngine([])
    cache = engine.new_cache()

    def evaluated(prompt: list[int]) -> list[list[int]]:
        engine.steps.clear()
        last_piece(generate(engine, TOKENIZER, prompt, max_new_tokens=0, cache=cache))
        assert cache.ids == prompt
        return engine.steps[:]

    assert evaluated([1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert evaluated([1, 2, 9, 4, 5]) == [[9, 4, 5]]
    assert evaluated([1, 2, 9, 4, 5]) == [[5]]  # the last one again: its logits are wanted
    assert evaluated([1]) == [[1]]


def test_logprobs_are_those_of_the_model_before_temperature_and_filters() -> None:
    options = SamplingOptions(temperature=0.1, top_k=1, seed=0)
    _, pieces, completion = play(b"ab", max_new_tokens=2, options=options, logprobs=3)
    assert completion.logprobs is not None
    norm = math.log(math.exp(5) + VOCAB - 1)
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids == [97, 98]
    first = completion.logprobs[0]
    assert first.logprob == pytest.approx(5 - norm, rel=1e-6)
    assert [token for token, _ in first.top] == [97, 0, 1]
    assert [score for _, score in first.top] == pytest.approx([5 - norm, -norm, -norm], rel=1e-6)
    assert [piece.logprobs for piece in pieces[:-1]] == completion.logprobs


def test_no_logprobs_unless_asked_for() -> None:
    assert play(b"a", max_new_tokens=1)[2].logprobs is None


def test_timings_leave_out_the_time_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("starscope.generate.time.perf_counter", lambda: now)

    class SlowEngine(ScriptedEngine):
        def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
            nonlocal now
            now += 3.0 if len(sequences[0]) > 1 else 0.5
            return super().forward(sequences, caches, wanted)

    def reader(pieces: Iterator[Piece]) -> Completion:
        nonlocal now
        completion = None
        for piece in pieces:
            now += 100.0
            completion = piece.completion
        assert completion is not None
        return completion

    engine = SlowEngine(b"abcd")
    engine.prompt_tokens = 3
    timings = reader(generate(engine, TOKENIZER, PROMPT, max_new_tokens=4, load_s=2.5)).timings
    assert (timings.load_s, timings.prefill_tok_s, timings.decode_tok_s) == (2.5, 1.0, 2.0)


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    def text(seed: int) -> list[int]:
        options = SamplingOptions(temperature=1.0, seed=seed)
        return play([], max_new_tokens=20, options=options, stop_ids=set(range(128, VOCAB)) - {255})[2].token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)
