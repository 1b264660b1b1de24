"""Several prompts in one call: each gives what it gives alone, and they share the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope.batching import MOST_ROWS, generate_batch
from starscope.cache import ArrayCache, Cache
from starscope.convert import convert
from starscope.engine import ENGINES
from starscope.errors import ContextOverflowError, InvalidContentError, UsageError
from starscope.generate import PREFILL_CHUNK, Completion, generate, last_piece
from support.checkpoints import make_checkpoint

EOS, VOCAB = 256, 260


class CountingEngine:
    """Tokens are bytes. A prompt is followed by its first token, as many times as that token says, and the end."""

    name = "counting"
    device = "cpu"

    edits = None

    def __init__(self, context_length: int = 4096) -> None:
        self.context_length = context_length
        self.steps: list[list[list[int]]] = []
        self.prompt_lengths: dict[int, int] = {}  # by the first token
        self.caches: list[Cache] = []

    def new_cache(self) -> Cache:
        cache = ArrayCache(
            num_layers=0, context_length=self.context_length, allocate=np.empty, as_cached=lambda rows: rows
        )
        self.caches.append(cache)
        return cache

    def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
        assert len({id(cache) for cache in caches}) == len(caches) == len(sequences)
        assert all(len(ids) for ids in sequences)
        self.steps.append([list(ids) for ids in sequences])
        made = []
        for ids, cache in zip(sequences, caches, strict=True):
            cache.advance(ids, len(ids))
            first = cache.ids[0]
            said = cache.length - self.prompt_lengths[first]
            logits = np.zeros((1, VOCAB), np.float32)
            logits[0, first if said < first else EOS] = 5.0
            made.append(logits)
        return made


class Detokenizer:
    def __init__(self, after: Sequence[int]) -> None:
        self.after = after

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


TOKENIZER = SimpleNamespace(bos_id=None, eos_id=EOS, stop_ids=frozenset({EOS}), stream=Detokenizer)


def play(
    prompts: Sequence[Sequence[int]], context_length: int = 4096, **options: Any
) -> tuple[CountingEngine, list[Completion]]:
    engine = CountingEngine(context_length)
    engine.prompt_lengths = {prompt[0]: len(prompt) for prompt in prompts if prompt}
    return engine, generate_batch(engine, TOKENIZER, prompts, **options)


def alone(prompt: Sequence[int], context_length: int = 4096, **options: Any) -> Completion:
    engine = CountingEngine(context_length)
    engine.prompt_lengths = {prompt[0]: len(prompt)}
    return last_piece(generate(engine, TOKENIZER, prompt, **options))


def without_timings(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.prompt_tokens,
        completion.logprobs,
        completion.dropped_tokens,
    )


# First tokens differ: the engine tells prompts apart by them. Long and short prompts, few and many of them.
PROMPTS = st.lists(
    st.tuples(st.integers(0, 60), st.one_of(st.integers(0, 9), st.integers(200, 600))),
    min_size=1,
    max_size=2 * MOST_ROWS + 3,
    unique_by=lambda drawn: drawn[0],
).map(lambda drawn: [[first, *range(n)] for first, n in drawn])


@given(PROMPTS, st.integers(0, 40), st.lists(st.sampled_from(["\x05\x05", "\x20" * 3, "\x21"]), max_size=2))
def test_every_prompt_gives_what_it_gives_alone_in_the_order_of_the_prompts(
    prompts: list[list[int]], count: int, stop: list[str]
) -> None:
    engine, completions = play(prompts, max_new_tokens=count, stop=stop, logprobs=2, context_length=640)
    expected = [alone(p, max_new_tokens=count, stop=stop, logprobs=2, context_length=640) for p in prompts]
    assert [without_timings(c) for c in completions] == [without_timings(c) for c in expected]
    assert all(len(step) <= MOST_ROWS for step in engine.steps)
    assert all(sum(map(len, step)) <= PREFILL_CHUNK for step in engine.steps)
    assert len(engine.caches) <= MOST_ROWS


def test_the_prompts_share_steps_and_a_text_that_has_ended_leaves_the_batch() -> None:
    engine, completions = play([[1, 7], [3], [2, 8, 9]])
    assert [completion.token_ids for completion in completions] == [[1], [3, 3, 3], [2, 2]]
    assert engine.steps == [[[1, 7], [3], [2, 8, 9]], [[1], [3], [2]], [[3], [2]], [[3]]]


def test_a_long_prompt_keeps_no_text_waiting_that_is_under_way() -> None:
    long = [9] * (2 * PREFILL_CHUNK)
    engine, _ = play([[5], long, [4]], max_new_tokens=3)
    # A token of the first in every step, and as much of the prompts as there is room for.
    assert [list(map(len, step)) for step in engine.steps[:3]] == [
        [1, PREFILL_CHUNK - 1],
        [1, PREFILL_CHUNK - 1],
        [1, 2, 1],
    ]


def test_a_prompt_that_waits_takes_the_place_and_the_cache_of_a_text_that_has_ended() -> None:
    prompts = [[1]] + [[n] for n in range(20, 20 + MOST_ROWS)]
    engine, _ = play(prompts)
    last = prompts[-1]
    assert [last in step for step in engine.steps[:3]] == [False, False, True]
    assert len(engine.caches) == MOST_ROWS


def test_each_text_ends_for_its_own_reason() -> None:
    _, completions = play([[1], [30], [40] * 36, [33]], context_length=40, max_new_tokens=20, stop="!!!")
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [
        ("stop", 1),  # the end token
        ("length", 20),  # as many as asked for
        ("length", 5),  # the context
        ("stop", 3),  # the stop text
    ]
    assert completions[3].text == ""


def test_an_error_names_its_prompt_before_anything_runs() -> None:
    engine = CountingEngine(5)
    with pytest.raises(ContextOverflowError, match=r"^prompts\[1\]: the prompt has 6 tokens; the context has 5\."):
        generate_batch(engine, TOKENIZER, [[1], [1] * 6, [2]])
    tokenizer = SimpleNamespace(bos_id=None, eos_id=None, stop_ids=frozenset(), stream=Detokenizer)
    with pytest.raises(UsageError, match=r"^prompts\[2\]: the prompt is empty"):
        generate_batch(engine, tokenizer, [[1], [2], []])
    with pytest.raises(UsageError, match=r"^max_new_tokens is -1"):
        generate_batch(engine, TOKENIZER, [[1], [2]], max_new_tokens=-1)
    assert engine.steps == []


def test_no_prompts_give_no_completions() -> None:
    assert play([])[1] == []


def test_speeds_count_the_texts_own_tokens_over_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("starscope.batching.time.perf_counter", lambda: now)

    class SlowEngine(CountingEngine):
        def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
            nonlocal now
            now += 2.0
            return super().forward(sequences, caches, wanted)

    engine = SlowEngine()
    engine.prompt_lengths = {1: 4, 3: 1}
    first, second = generate_batch(engine, TOKENIZER, [[1] * 4, [3]], load_s=0.5)
    assert (first.timings.load_s, first.timings.prefill_tok_s, first.timings.decode_tok_s) == (0.5, 2.0, 0.5)
    assert (second.timings.prefill_tok_s, second.timings.decode_tok_s) == (0.5, 0.5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return convert(folder, to="f32").out


@pytest.fixture(scope="module")
def model(path: Path) -> starscope.Model:
    return starscope.load(path)


TEXTS = ["def add(a, b):", "x", "for i in range(10):\n    print(i)\n" * 2, "é😀", "", "return self"]


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 1},
        {"mirostat": 2, "seed": 3},
        {"stop": ["a", "re"], "temperature": 1.0, "seed": 5},
        {"suffix": "\n\nprint(1)", "temperature": 0.5, "seed": 2},
        {"heal": True, "temperature": 0.7, "seed": 4},
        {"suffix": "x", "heal": True, "fim_order": "spm", "filename": "a.py", "files": [("b.py", "y = 2\n")]},
    ],
    ids=str,
)
def test_a_list_of_texts_gives_what_each_gives_alone(path: Path, engine: str, options: dict[str, Any]) -> None:
    model = starscope.load(path, engine=engine)
    together = model.generate(TEXTS, max_new_tokens=16, **options)
    expected = [model.generate(text, max_new_tokens=16, **options) for text in TEXTS]
    assert [without_timings(c) for c in together] == [without_timings(c) for c in expected]


def test_token_ids_and_texts_are_told_apart(model: starscope.Model) -> None:
    ids = [model.tokenizer.encode("x = 1"), model.tokenizer.encode("y")]
    expected = [model.generate(text, max_new_tokens=4).token_ids for text in ("x = 1", "y")]
    batches: list[Any] = [ids, tuple(map(tuple, ids)), [np.array(i) for i in ids], ["x = 1", ids[1]]]
    for batch in batches:
        assert [done.token_ids for done in model.generate(batch, max_new_tokens=4)] == expected
    assert isinstance(model.generate(ids[0], max_new_tokens=1), Completion)
    assert isinstance(model.generate("", max_new_tokens=1), Completion)
    with pytest.raises(UsageError, match="empty list"):
        model.generate([], max_new_tokens=1)
    assert len(model.generate(["x"], max_new_tokens=1)) == 1


def test_one_seed_begins_the_same_numbers_in_each_and_none_draws_afresh(model: starscope.Model) -> None:
    def texts(seed: int | None) -> list[list[int]]:
        return [done.token_ids for done in model.generate(["x"] * 3, max_new_tokens=24, temperature=1.0, seed=seed)]

    first, second, third = texts(7)
    assert first == second == third
    assert len({tuple(tokens) for tokens in texts(None)}) == 3


def test_text_left_out_around_a_hole_is_counted_for_each(model: starscope.Model) -> None:
    long = "a = 1\n" * 80
    short, cut = model.generate(["a = 1\n", long], suffix="b", max_new_tokens=3)
    assert short.dropped_tokens == 0
    assert cut.dropped_tokens == len(model.tokenizer.encode(long)) + 1 + 3 - cut.prompt_tokens > 0


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["x", [1] * 129], ContextOverflowError, r"^prompts\[1\]: the prompt has 129 tokens; the context has 128\."),
        ([[1], [2], [1, 320]], InvalidContentError, r"^prompts\[2\]: token id 320 is out of range; expected 0 to 319"),
        (["x", 3], InvalidContentError, r"^prompts\[1\]: a prompt is int; expected text or token ids"),
        (["x", b"x"], InvalidContentError, r"^prompts\[1\]: a prompt is bytes"),
        (["x", "\ud800"], InvalidContentError, r"^prompts\[1\]: "),
    ],
)
def test_what_cannot_be_run_names_its_prompt_before_anything_runs(
    model: starscope.Model, monkeypatch: pytest.MonkeyPatch, prompts: Any, error: type[Exception], message: str
) -> None:
    def forward(*_: Any) -> Any:
        raise AssertionError("nothing runs")

    monkeypatch.setattr(model.engine, "forward", forward)
    with pytest.raises(error, match=message):
        model.generate(prompts)


def test_a_stream_of_several_prompts_is_refused_in_words(model: starscope.Model) -> None:
    stream: Callable[..., Any] = model.generate
    with pytest.raises(UsageError, match=r"stream=True gives the pieces of one prompt; 2 were given"):
        stream(["a", "b"], stream=True)
