"""One generation's sampler: the chain of its options, and what it remembers from token to token.

The memory is three things: the last tokens (for the penalties), mirostat's mu, and the place in the seed's numbers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from starscope.sampling.filters import (
    Candidates,
    Logits,
    apply_logit_bias,
    apply_temperature,
    check_tokens,
    draw,
    every_token,
    keep_best,
    keep_min_p,
    keep_surprise,
    keep_top_k,
    keep_top_p,
    keep_typical,
    mirostat_top_k,
    most_likely,
    penalize,
    surprises,
)
from starscope.sampling.options import SamplingOptions


class Choice(NamedTuple):
    """A token, and the candidates that it was drawn from: what bias, penalties and filters left."""

    token_id: int
    candidates: Candidates


class Step(NamedTuple):
    """A step of the chain: what it does to the candidates, given the options and the last tokens, and how it reads."""

    apply: Callable[[Candidates, SamplingOptions, Iterable[int]], Candidates]
    text: Callable[[SamplingOptions], str]


STEPS = {
    "logit_bias": Step(
        lambda candidates, options, _: apply_logit_bias(candidates, options.logit_bias or {}),
        lambda options: f"logit_bias of {len(options.logit_bias or {})}",
    ),
    "penalties": Step(
        lambda candidates, options, window: penalize(
            candidates,
            window,
            repetition=options.repetition_penalty,
            presence=options.presence_penalty,
            frequency=options.frequency_penalty,
        ),
        lambda options: (
            f"penalties (repetition {options.repetition_penalty:g}, presence {options.presence_penalty:g}, "
            f"frequency {options.frequency_penalty:g}, window {options.penalty_window})"
        ),
    ),
    "temperature": Step(
        lambda candidates, options, _: apply_temperature(candidates, options.temperature),
        lambda options: f"temperature {options.temperature:g}",
    ),
    "top_k": Step(
        lambda candidates, options, _: keep_top_k(candidates, options.top_k),
        lambda options: f"top_k {options.top_k}",
    ),
    "typical_p": Step(
        lambda candidates, options, _: keep_typical(candidates, options.typical_p),
        lambda options: f"typical_p {options.typical_p:g}",
    ),
    "top_p": Step(
        lambda candidates, options, _: keep_top_p(candidates, options.top_p),
        lambda options: f"top_p {options.top_p:g}",
    ),
    "min_p": Step(
        lambda candidates, options, _: keep_min_p(candidates, options.min_p),
        lambda options: f"min_p {options.min_p:g}",
    ),
}


def chain(options: SamplingOptions) -> list[str]:
    """The names of the steps that change something, in order: the logit bias, then those of `options.samplers`."""
    names = ["logit_bias"] if options.logit_bias else []
    names += [name for name in options.order if options.uses(name)]
    # Without a draw, a filter could only take away the one token that is wanted.
    return [name for name in names if name in ("logit_bias", "penalties")] if options.is_greedy else names


def describe(options: SamplingOptions) -> str:
    """The whole chain in one line: `temperature 0.8 → top_k 40 → draw (seed 7)`."""
    if options.is_greedy:
        end = "the most likely"
    elif options.mirostat:
        end = f"mirostat {options.mirostat} (tau {options.mirostat_tau:g}, eta {options.mirostat_eta:g})"
    else:
        end = "draw"
    if not options.is_greedy:
        end += " (fresh seed)" if options.seed is None else f" (seed {options.seed})"
    return " → ".join([*(STEPS[name].text(options) for name in chain(options)), end])


class Sampler:
    """Logits to tokens, for one text: made anew for each, with the ids of its prompt.

    Its numbers are PCG64's raw output, whose stream NumPy never changes: 53 bits a token, none at temperature 0.
    """

    def __init__(self, options: SamplingOptions, prompt_ids: Sequence[int] = ()) -> None:
        self.options = options
        self.window = deque(prompt_ids, maxlen=min(options.penalty_window, sys.maxsize))
        self.mu = 2 * options.mirostat_tau  # bits; where Basu et al. begin
        self._steps = [STEPS[name] for name in chain(options)]
        self._bits = np.random.PCG64(options.seed)

    def __call__(self, logits: Logits) -> int:
        """The id of the next token, from float32 logits `[vocab_size]`."""
        return self.choose(logits).token_id

    def choose(self, logits: Logits, allowed: Sequence[int] | None = None) -> Choice:
        """The next token with its candidates; it is remembered as the text's last.

        `allowed` are the only ids in the race, ascending, one at least; None for every token.

        Raises InvalidContentError for logits that are no numbers, UsageError for a bias on a token there is not.
        """
        most_likely(logits)  # refuses what is not a number
        check_tokens(self.options.logit_bias or {}, len(logits))
        candidates = every_token(logits)
        if allowed is not None:
            ids = np.array(allowed, np.int64)
            candidates = Candidates(ids, candidates.logits[ids])
        for step in self._steps:
            candidates = step.apply(candidates, self.options, self.window)
        choice = self._choose_of(candidates)
        self.window.append(choice.token_id)
        return choice

    def _choose_of(self, candidates: Candidates) -> Choice:
        if self.options.is_greedy:
            kept = keep_best(candidates)
            return Choice(int(kept.ids[0]), kept)
        kept = candidates
        if self.options.mirostat == 1:
            kept = keep_top_k(candidates, mirostat_top_k(candidates, self.mu))
        elif self.options.mirostat == 2:
            kept = keep_surprise(candidates, self.mu)
        token = draw(kept, (int(self._bits.random_raw()) >> 11) * 2.0**-53)
        if self.options.mirostat:
            # The surprise is the one before the cut, as in the paper: cutting alone would lower it to any target.
            surprise = float(surprises(candidates)[np.searchsorted(candidates.ids, token)])
            mu = self.mu - self.options.mirostat_eta * (surprise - self.options.mirostat_tau)
            self.mu = max(mu, 0.0)  # at 0 the best token alone is left: a debt below would change nothing but last
        return Choice(token, kept)


def make_sampler(options: SamplingOptions, prompt_ids: Sequence[int] = ()) -> Sampler:
    """The sampler of one text that begins with `prompt_ids`."""
    return Sampler(options, prompt_ids)
