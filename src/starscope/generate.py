"""Generating text: the prompt is evaluated in chunks, then one token a step, until something ends it.

Pieces come as soon as their text is certain: a character's last byte is there, and the text cannot be the beginning
of a stop string. Joined together they are the completion's text, whatever the tokens were. The last piece carries
the whole `Completion`:

    for piece in generate(engine, tokenizer, ids, max_new_tokens=64, stop=["def "]):
        print(piece.text, end="", flush=True)
    print(piece.completion.finish_reason)  # "stop" | "length"
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from starscope.errors import ContextOverflowError, UsageError
from starscope.sampling import Choice, Logits, SamplingOptions, every_token, make_sampler, top_log_probabilities

if TYPE_CHECKING:
    from starscope.cache import Cache
    from starscope.engine import Engine
    from starscope.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]

PREFILL_CHUNK = 256  # tokens evaluated between two chances to interrupt
MAX_LOGPROBS = 100


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a generated token and of the most likely ones at its place, before and after the chain.

    Before: the model's own. After: what the token was drawn from, with bias, penalties, temperature and filters done;
    at temperature 0 that is the token alone, at 0.0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), the most likely first
    filtered_logprob: float
    filtered_top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens per second. 0.0 where nothing was evaluated: one token needs no decoding step."""

    load_s: float
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True)
class Completion:
    """What was generated. `token_ids` are the tokens sampled, without the stop token that ended them, if one did.

    `dropped_tokens` of the text around a hole were left out of the prompt, because it would not have fitted.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """One step: the text it made certain (often "", never part of a stop string) and its token.

    The last piece has no token: it carries the text that was still held back, and the `completion`.
    """

    text: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    completion: Completion | None = None

    def __str__(self) -> str:
        return self.text


class StopScanner:
    """Finds stop strings in text that arrives in pieces, wherever the pieces are cut.

    Text is released once it cannot be part of a stop string. The match that ends first counts; of two that end
    together, the longer.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain now. Once a stop string is found: the text before it, and nothing from then on."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    options: SamplingOptions | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    cache: Cache | None = None,
    logprobs: int = 0,
    load_s: float = 0.0,
) -> Iterator[Piece]:
    """Continue a prompt. Arguments are checked at once; the work is done as the pieces are taken.

    `stop_ids` are the tokens that end it (default: the tokenizer's). A `cache` from an earlier call is used as far
    as it holds the same tokens, and left with those evaluated here. The end of the context ends the text with
    "length". `logprobs=n` adds the n most likely tokens of each step. `load_s` is passed on to the timings.

    Raises UsageError for arguments out of range and for an empty prompt where the vocabulary has no token to begin
    with; ContextOverflowError for a prompt longer than the context.
    """
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    check_limits(max_new_tokens, stop, logprobs)
    cache = engine.new_cache() if cache is None else cache
    ids = list(prompt_ids) or [first_id(tokenizer)]
    if len(ids) > cache.context_length:
        raise ContextOverflowError(
            f"the prompt has {len(ids)} tokens; the context has {cache.context_length}.",
            hint="Shorten the prompt: nothing is cut off without being asked.",
        )
    ends = frozenset(tokenizer.stop_ids if stop_ids is None else stop_ids)
    options = options or SamplingOptions()
    return _pieces(engine, tokenizer, ids, cache, max_new_tokens, options, stop, ends, logprobs, load_s)


def check_limits(max_new_tokens: int, stop: Iterable[str] = (), logprobs: int = 0) -> None:
    """UsageError for what `generate` would refuse without looking at the prompt."""
    if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens!r}; expected a whole number, 0 or more.")
    if not 0 <= logprobs <= MAX_LOGPROBS:
        raise UsageError(f"logprobs is {logprobs}; expected from 0 to {MAX_LOGPROBS}.")
    if "" in stop:
        raise UsageError("a stop text is empty; expected at least one character.")


def first_id(tokenizer: Tokenizer) -> int:
    """The token that stands for an empty prompt: beginning of text, or else its end, which separates documents."""
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return token
    raise UsageError(
        "the prompt is empty and the vocabulary has no bos or eos token to begin with; expected some text."
    )


def last_piece(pieces: Iterable[Piece]) -> Completion:
    """Run to the end and give the completion."""
    completion = None
    for piece in pieces:
        completion = piece.completion
    assert completion is not None, "the last piece has the completion"
    return completion


def _pieces(
    engine: Engine,
    tokenizer: Tokenizer,
    ids: list[int],
    cache: Cache,
    max_new_tokens: int,
    options: SamplingOptions,
    stop: tuple[str, ...],
    stop_ids: frozenset[int],
    logprobs: int,
    load_s: float,
) -> Iterator[Piece]:
    sampler, detokenizer, scanner = make_sampler(options, ids), tokenizer.stream(), StopScanner(stop)
    tokens: list[int] = []
    text: list[str] = []
    scores: list[TokenLogprobs] = []
    finish: FinishReason = "length"
    steps: list[float] = []  # seconds of each step, the time between pieces left out; the first is the prompt's

    began = time.perf_counter()
    kept = cache.reuse(ids)
    for start in range(kept, len(ids), PREFILL_CHUNK):
        logits = _logits(engine, cache, ids[start : start + PREFILL_CHUNK])
    while len(tokens) < max_new_tokens:
        choice = sampler.choose(logits)
        token = choice.token_id
        if token in stop_ids:
            finish = "stop"
            break
        tokens.append(token)
        if logprobs:
            scores.append(_token_logprobs(logits, choice, logprobs))
        text.append(scanner.push(detokenizer.push(token)))
        steps.append(time.perf_counter() - began)
        yield Piece(text[-1], token, scores[-1] if logprobs else None)
        began = time.perf_counter()
        if scanner.stopped or cache.length >= cache.context_length or len(tokens) == max_new_tokens:
            break
        logits = _logits(engine, cache, [token])
    if finish == "stop" or not tokens:  # the last step gave no token
        steps.append(time.perf_counter() - began)

    text.append(scanner.push(detokenizer.finish()) + scanner.finish())
    if scanner.stopped:
        finish = "stop"
    timings = Timings(load_s, _rate(len(ids) - kept, steps[0]), _rate(len(steps) - 1, sum(steps[1:])))
    completion = Completion("".join(text), tokens, finish, len(ids), timings, scores if logprobs else None)
    yield Piece(text[-1], completion=completion)


def _logits(engine: Engine, cache: Cache, ids: list[int]) -> Logits:
    """The logits after one step over `ids`."""
    logits: Logits = engine.forward([ids], [cache], "last")[0][-1]
    return logits


def _token_logprobs(logits: Logits, choice: Choice, count: int) -> TokenLogprobs:
    token = choice.token_id
    before = top_log_probabilities(every_token(logits), token, count)
    return TokenLogprobs(token, *before, *top_log_probabilities(choice.candidates, token, count))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens and seconds > 0 else 0.0
