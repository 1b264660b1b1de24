"""Choosing the next token from its logits: a chain of small pure functions over the candidates.

    temperature -> top_k -> top_p -> min_p -> draw          (temperature 0: the most likely token, nothing drawn)

Candidates stay in the order of their ids and sums are float64, so two engines whose logits differ in the last bits
draw the same token from the same seed. No filter ever empties the candidates: the best one always stays.

    sample = make_sampler(SamplingOptions(temperature=0.8, top_p=0.95, seed=7))
    token = sample(logits)  # float32 [vocab_size] -> id
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from starscope.errors import InvalidContentError, UsageError

Logits = npt.NDArray[np.float32]  # [vocab_size]
Sampler = Callable[[Logits], int]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The defaults take the most likely token; `seed=None` draws a fresh one."""

    temperature: float = 0.0
    top_k: int = 0  # 0: every token
    top_p: float = 1.0  # 1: every token
    min_p: float = 0.0  # 0: every token
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                f"temperature is {self.temperature}; expected 0 (the most likely token) or a number above."
            )
        if not _is_count(self.top_k):
            raise UsageError(f"top_k is {self.top_k}; expected a whole number of tokens, 0 for all of them.")
        if not 0 <= self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; expected a probability from 0 to 1.")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; expected a share of the best probability, from 0 to 1.")
        if self.seed is not None and not _is_count(self.seed):
            raise UsageError(f"seed is {self.seed}; expected a whole number from 0 on, or none for a fresh one.")


class Candidates(NamedTuple):
    """The tokens still in the race, ids ascending, and their logits (float64, one shift for all is free)."""

    ids: npt.NDArray[np.int64]  # [candidates]
    logits: npt.NDArray[np.float64]  # [candidates]


Filter = Callable[[Candidates], Candidates]


def every_token(logits: Logits) -> Candidates:
    """The candidates that a chain begins with."""
    return Candidates(np.arange(len(logits)), logits.astype(np.float64))


def apply_temperature(candidates: Candidates, temperature: float) -> Candidates:
    """Divides the distance to the best logit, so that no temperature overflows."""
    with np.errstate(over="ignore"):
        return Candidates(candidates.ids, (candidates.logits - candidates.logits.max()) / temperature)


def keep_top_k(candidates: Candidates, top_k: int) -> Candidates:
    """The `top_k` most likely tokens; of equals at the border, those with the lowest ids."""
    ids, logits = candidates
    if top_k >= len(ids):
        return candidates
    border = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]  # the top_k-th largest
    keep = logits > border
    ties = np.flatnonzero(logits == border)
    keep[ties[: top_k - np.count_nonzero(keep)]] = True
    return Candidates(ids[keep], logits[keep])


def keep_top_p(candidates: Candidates, top_p: float) -> Candidates:
    """The fewest most likely tokens whose probabilities sum to `top_p` or more (Holtzman et al. 2020)."""
    weights = _weights(candidates)
    total = weights.sum()
    floor = (1 - top_p) * total / len(weights)  # the tokens below it have less than 1 - top_p together: not ranked
    ranked = np.sort(weights[weights >= floor])[::-1]
    count = int(np.searchsorted(np.cumsum(ranked), top_p * total)) + 1
    return keep_top_k(candidates, count)


def keep_min_p(candidates: Candidates, min_p: float) -> Candidates:
    """The tokens at least `min_p` times as likely as the best one (Nguyen et al. 2024)."""
    keep = _weights(candidates) >= min_p
    return Candidates(candidates.ids[keep], candidates.logits[keep])


def draw(candidates: Candidates, uniform: float) -> int:
    """The token at `uniform` (0 to 1, 1 excluded) of the candidates' cumulative probability, in the order of ids."""
    total = np.cumsum(_weights(candidates))
    return int(candidates.ids[np.searchsorted(total, uniform * total[-1], side="right")])


def most_likely(logits: Logits) -> int:
    """The id of the largest logit, the lowest one of equals. InvalidContentError where there is none."""
    best = int(np.argmax(logits))  # NaN wins over every number, so one look is enough
    if not np.isfinite(logits[best]):
        raise InvalidContentError(
            f"the logit of token {best} is {logits[best]}; expected finite numbers.",
            hint="The weights are damaged, or an edit took the model out of float32's range.",
        )
    return best


def log_probabilities(logits: Logits) -> npt.NDArray[np.float32]:  # [vocab_size]
    """The log-softmax of the logits as the model gave them, before temperature and filters; the sum is float64."""
    shifted = logits - logits.max()
    scores: npt.NDArray[np.float32] = shifted - np.float32(math.log(np.exp(shifted.astype(np.float64)).sum()))
    return scores


def make_sampler(options: SamplingOptions) -> Sampler:
    """A function from logits (float32 `[vocab_size]`) to a token id; each call draws the seed's next number.

    The numbers are PCG64's raw output, whose stream NumPy never changes: 53 bits a token.
    """
    if options.temperature == 0:
        return most_likely
    chain: list[Filter] = [partial(apply_temperature, temperature=options.temperature)]
    if options.top_k > 0:
        chain.append(partial(keep_top_k, top_k=options.top_k))
    if options.top_p < 1:
        chain.append(partial(keep_top_p, top_p=options.top_p))
    if options.min_p > 0:
        chain.append(partial(keep_min_p, min_p=options.min_p))
    bits = np.random.PCG64(options.seed)

    def sample(logits: Logits) -> int:
        most_likely(logits)  # refuses what is not a number
        candidates = every_token(logits)
        for keep in chain:
            candidates = keep(candidates)
        return draw(candidates, (int(bits.random_raw()) >> 11) * 2.0**-53)

    return sample


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 0


def _weights(candidates: Candidates) -> npt.NDArray[np.float64]:  # [candidates]
    """Probabilities up to one factor: the best candidate has 1."""
    weights: npt.NDArray[np.float64] = np.exp(candidates.logits - candidates.logits.max())
    return weights
