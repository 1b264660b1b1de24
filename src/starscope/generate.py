"""Generating text: the prompt is evaluated in chunks, then one token a step, until something ends it.

Pieces come as soon as their text is certain: a character's last byte is there, and the text cannot be the beginning
of a stop string. Joined together they are the completion's text, whatever the tokens were. The last piece carries
the whole `Completion`:

    for piece in generate(engine, tokenizer, ids, max_new_tokens=64, stop=["def "]):
        print(piece.text, end="", flush=True)
    print(piece.completion.finish_reason)  # "stop" | "length"
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from starscope.checkpoint.content import short
from starscope.errors import ContextOverflowError, UsageError
from starscope.sampling import (
    Choice,
    Logits,
    SamplingOptions,
    every_token,
    is_number,
    make_sampler,
    top_log_probabilities,
)

if TYPE_CHECKING:
    from starscope.cache import Cache
    from starscope.engine import Engine
    from starscope.engine.base import StepEdits
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
    """Seconds and tokens per second. 0.0 where nothing was evaluated: one token needs no decoding step.

    In a batch: the tokens of this text alone, over the steps that it took part in.
    """

    load_s: float
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True)
class Completion:
    """What was generated. `token_ids` are the tokens sampled, without the stop token that ended them, if one did.

    `dropped_tokens` of the text around a hole were left out of the prompt, because it would not have fitted. With
    token healing the first tokens repeat the bytes that were taken back from the prompt; `text` does not.
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


@dataclass(frozen=True)
class GenerationOptions:
    """What `generate` is asked for besides the prompt.

    Raises UsageError for a number out of range and for an empty stop text.
    """

    max_new_tokens: int = 128
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int = 0

    def __post_init__(self) -> None:
        check_limits(self.max_new_tokens, self.stop, self.logprobs)


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
    begin: bytes = b"",
) -> Iterator[Piece]:
    """Continue a prompt. Arguments are checked at once; the work is done as the pieces are taken.

    `stop_ids` are the tokens that end it (default: the tokenizer's). A `cache` from an earlier call is used as far
    as it holds the same tokens, and left with those evaluated here. The end of the context ends the text with
    "length". `logprobs=n` adds the n most likely tokens of each step. `load_s` is passed on to the timings. `begin`
    are bytes of the prompt that its ids do not hold: the text goes on from behind them (see `infill.take_back`).

    Raises UsageError for arguments out of range and for an empty prompt where the vocabulary has no token to begin
    with; ContextOverflowError for a prompt longer than the context.
    """
    asked = make_options(tokenizer, max_new_tokens, options, stop, stop_ids, logprobs)
    cache = engine.new_cache() if cache is None else cache
    ids = check_prompt(tokenizer, prompt_ids, cache.context_length)
    return _pieces(engine, Continuation(tokenizer, ids, cache, asked, begin, edits=engine.edits), load_s)


def make_options(
    tokenizer: Tokenizer,
    max_new_tokens: int,
    options: SamplingOptions | None,
    stop: str | Sequence[str],
    stop_ids: Collection[int] | None,
    logprobs: int,
) -> GenerationOptions:
    """The arguments of `generate` in one, checked, with what the tokenizer says where nothing was said."""
    return GenerationOptions(
        max_new_tokens,
        options or SamplingOptions(),
        (stop,) if isinstance(stop, str) else tuple(stop),
        frozenset(tokenizer.stop_ids if stop_ids is None else stop_ids),
        logprobs,
    )


def check_limits(max_new_tokens: object, stop: object = (), logprobs: object = 0) -> None:
    """UsageError for what `generate` would refuse without looking at the prompt."""
    if not is_number(max_new_tokens, 0, math.inf, Integral):
        raise UsageError(f"max_new_tokens is {short(max_new_tokens)}; expected a whole number, 0 or more.")
    if not is_number(logprobs, 0, MAX_LOGPROBS, Integral):
        raise UsageError(f"logprobs is {short(logprobs)}; expected a whole number from 0 to {MAX_LOGPROBS}.")
    if not isinstance(stop, (str, Sequence)) or not all(isinstance(text, str) for text in stop):
        raise UsageError(f"stop is {short(stop)}; expected a text or a list of texts.")
    if stop == "" or (not isinstance(stop, str) and "" in stop):
        raise UsageError("a stop text is empty; expected at least one character.")


def check_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int], context_length: int) -> list[int]:
    """The ids to evaluate, one at least. ContextOverflowError for more than the context has."""
    ids = list(prompt_ids) or [first_id(tokenizer)]
    if len(ids) > context_length:
        raise ContextOverflowError(
            f"the prompt has {len(ids)} tokens; the context has {context_length}.",
            hint="Shorten the prompt: it is never cut unasked.",
        )
    return ids


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


class Continuation:
    """One text under way: its prompt, its cache, and its own sampler, detokenizer and stop scanner.

    Whoever runs the engine asks it what to run and hands it the logits, until it has ended:

        while not text.ended:
            [logits] = engine.forward([text.next_ids(PREFILL_CHUNK)], [text.cache], "last")
            piece = text.take(logits[-1])     # None while the prompt is not through, and for a stop token
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        cache: Cache,
        options: GenerationOptions,
        begin: bytes = b"",
        *,
        row: int = 0,
        edits: StepEdits | None = None,
    ) -> None:
        self.cache, self.ended = cache, False
        self._tokenizer, self._owed = tokenizer, begin  # owed: what the text must still repeat of the prompt
        if begin and not tokenizer.agreeing_ids(begin):
            raise UsageError(f"no tokens of the vocabulary spell {begin!r}; expected the bytes of one of them.")
        self._prompt_ids, self._options = prompt_ids, options
        under = None if edits is None else edits.key(len(prompt_ids), row)
        self._kept = cache.reuse(prompt_ids, row=row, under=under)
        self._sampler, self._detokenizer = make_sampler(options.sampling, prompt_ids), tokenizer.stream(prompt_ids)
        self._scanner = StopScanner(options.stop)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._scores: list[TokenLogprobs] = []
        self._finish: FinishReason = "length"
        self._decoded = False  # whether the last step ran a token of the text, not the prompt's
        self._decoding_steps = 0
        self._prefill_s = self._decode_s = 0.0

    @property
    def decoding(self) -> bool:
        """Whether the prompt is through, and each step runs the one token chosen last."""
        return bool(self._tokens)

    def next_ids(self, limit: int) -> list[int]:
        """The tokens to run next: the last one, or the prompt's, `limit` of them at most."""
        done = self.cache.length
        return self._tokens[-1:] or self._prompt_ids[done : done + limit]

    def take(self, logits: Logits) -> Piece | None:
        """Choose the next token, from the logits `[vocab_size]` after `next_ids`; None when there is none."""
        self._decoded = self.decoding
        if self.cache.length < len(self._prompt_ids):
            return None
        if len(self._tokens) == self._options.max_new_tokens:
            self.ended = True
            return None
        choice = self._sampler.choose(logits, self._allowed())
        if choice.token_id in self._options.stop_ids:
            self.ended, self._finish = True, "stop"
            return None
        self._tokens.append(choice.token_id)
        if self._options.logprobs:
            self._scores.append(_token_logprobs(logits, choice, self._options.logprobs))
        self._text.append(self._scanner.push(self._text_of(choice.token_id)))
        self.ended = (
            self._scanner.stopped
            or self.cache.length >= self.cache.context_length
            or len(self._tokens) == self._options.max_new_tokens
        )
        return Piece(self._text[-1], choice.token_id, self._scores[-1] if self._scores else None)

    def _allowed(self) -> list[int] | None:
        """The tokens that can come next while the text still repeats a piece of the prompt; None for all.

        One that is banned or ends a text is among them only where the bytes cannot be written without any such.
        """
        if not self._owed:
            return None
        stop, bias = self._options.stop_ids, self._options.sampling.logit_bias or {}
        banned = frozenset(token for token, addend in bias.items() if addend == -math.inf)
        for without in (stop | banned, banned, stop):
            if agreeing := self._tokenizer.agreeing_ids(self._owed, without):
                return agreeing
        return self._tokenizer.agreeing_ids(self._owed)

    def _text_of(self, token: int) -> str:
        """What a token adds to the text: its bytes without those that only repeat the prompt."""
        if not self._owed:
            return self._detokenizer.push(token)
        repeated = min(len(self._owed), len(self._tokenizer.token_bytes(token)))
        self._owed = self._owed[repeated:]
        return self._detokenizer.push(token, repeated)

    def spend(self, seconds: float) -> None:
        """Count the time of the step that `take` ended."""
        if self._decoded:
            self._decoding_steps += 1
            self._decode_s += seconds
        else:
            self._prefill_s += seconds

    def last_piece(self, load_s: float) -> Piece:
        """The text that was held back, and the completion; once, when it has ended."""
        self._text.append(self._scanner.push(self._detokenizer.finish()) + self._scanner.finish())
        if self._scanner.stopped:
            self._finish = "stop"
        prompt_tokens = len(self._prompt_ids)
        timings = Timings(
            load_s,
            _rate(prompt_tokens - self._kept, self._prefill_s),
            _rate(self._decoding_steps, self._decode_s),
        )
        scores = self._scores if self._options.logprobs else None
        completion = Completion("".join(self._text), self._tokens, self._finish, prompt_tokens, timings, scores)
        return Piece(self._text[-1], completion=completion)


def _pieces(engine: Engine, text: Continuation, load_s: float) -> Iterator[Piece]:
    while not text.ended:
        began = time.perf_counter()  # the time between pieces is the reader's
        [logits] = engine.forward([text.next_ids(PREFILL_CHUNK)], [text.cache], "last")
        piece = text.take(logits[-1])
        text.spend(time.perf_counter() - began)
        if piece is not None:
            yield piece
    yield text.last_piece(load_s)


def _token_logprobs(logits: Logits, choice: Choice, count: int) -> TokenLogprobs:
    token = choice.token_id
    before = top_log_probabilities(every_token(logits), token, count)
    return TokenLogprobs(token, *before, *top_log_probabilities(choice.candidates, token, count))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens and seconds > 0 else 0.0
