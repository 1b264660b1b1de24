"""Several prompts at once: they share the engine's steps, and each gives what it would have given alone.

A step runs one token of every text under way, and with what room is left the next tokens of prompts, laid one after
another without padding. A text that has ended leaves the batch, and a prompt that waits takes its place and its cache.
Every text has a sampler, a detokenizer and a stop scanner of its own; one seed begins the same numbers in each.

    first, second = generate_batch(engine, tokenizer, [ids, other_ids], max_new_tokens=64)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from starscope.errors import StarscopeError
from starscope.generate import PREFILL_CHUNK, Completion, Continuation, check_prompt, make_options
from starscope.sampling import SamplingOptions

if TYPE_CHECKING:
    from starscope.cache import Cache
    from starscope.engine import Engine
    from starscope.tokenizer import Tokenizer

MOST_ROWS = 16  # texts under way at a time; each holds the keys and values of its tokens


def generate_batch(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    options: SamplingOptions | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    logprobs: int = 0,
    load_s: float = 0.0,
    begins: Sequence[bytes] = (),
) -> list[Completion]:
    """Continue every prompt, with the arguments of `generate`; the completions are in the order of the prompts.

    `begins` has the `begin` of each, or nothing.

    Raises what `generate` raises, before anything has run, and then says which prompt it is: `prompts[1]: ...`.
    """
    asked = make_options(tokenizer, max_new_tokens, options, stop, stop_ids, logprobs)
    waiting: list[tuple[int, list[int]]] = []
    for i, ids in enumerate(prompts):
        try:
            waiting.append((i, check_prompt(tokenizer, ids, engine.context_length)))
        except StarscopeError as error:
            raise of_prompt(i, error) from None
    waiting.reverse()
    done: dict[int, Completion] = {}
    rows: dict[int, Continuation] = {}
    idle: list[Cache] = []
    while waiting or rows:
        while waiting and len(rows) < MOST_ROWS:
            i, ids = waiting.pop()
            cache, begin = idle.pop() if idle else engine.new_cache(), begins[i] if begins else b""
            rows[i] = Continuation(tokenizer, ids, cache, asked, begin, row=i, edits=engine.edits)
        _step(engine, list(rows.values()))
        for i in [i for i, text in rows.items() if text.ended]:
            text = rows.pop(i)
            idle.append(text.cache)
            completion = text.last_piece(load_s).completion
            assert completion is not None, "the last piece has the completion"
            done[i] = completion
    return [done[i] for i in range(len(prompts))]


def _step(engine: Engine, texts: Sequence[Continuation]) -> None:
    """One step of the engine, PREFILL_CHUNK tokens at most: prompts are run in order, so what decodes comes first."""
    began = time.perf_counter()
    room = PREFILL_CHUNK
    running: list[Continuation] = []
    sequences: list[list[int]] = []
    for text in texts:
        if ids := text.next_ids(room):
            running.append(text)
            sequences.append(ids)
            room -= len(ids)
    logits = engine.forward(sequences, [text.cache for text in running], "last")
    for text, rows in zip(running, logits, strict=True):
        text.take(rows[-1])
    seconds = time.perf_counter() - began
    for text in running:
        text.spend(seconds)


def of_prompt(index: int, error: StarscopeError) -> StarscopeError:
    """The same error, saying which of several prompts it is about."""
    return type(error)(f"prompts[{index}]: {error.message}", hint=error.hint)
