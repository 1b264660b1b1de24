"""The pure functions of the chain: candidates in, candidates out, and the draw at its end.

Candidates stay in the order of their ids and sums are float64, so two engines whose logits differ in the last bits
draw the same token from the same seed. A filter that nothing passes keeps the best candidate: none ever empties them.

    candidates = keep_top_p(apply_temperature(every_token(logits), 0.8), 0.95)
    token = draw(candidates, uniform=0.5)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from starscope.errors import InvalidContentError, UsageError

Logits = npt.NDArray[np.float32]  # [vocab_size]
Floats = npt.NDArray[np.float64]  # [candidates]

LARGEST = 1e300  # a best logit beyond it is moved here: float64 ends at 1.8e308
SORTED_FIRST = (512, 4096)  # so many of the nearest are tried: sorting the whole vocabulary takes many times longer
ZIPF_TOKENS = 100  # mirostat 1 reads the distribution's slope off so many of the best


class Candidates(NamedTuple):
    """The tokens still in the race, ids ascending, and their logits (float64)."""

    ids: npt.NDArray[np.int64]  # [candidates]
    logits: Floats  # [candidates]


def every_token(logits: Logits) -> Candidates:
    """The candidates that a chain begins with."""
    return Candidates(np.arange(len(logits)), logits.astype(np.float64))


def apply_logit_bias(candidates: Candidates, bias: Mapping[int, float]) -> Candidates:
    """Adds to the logits of single tokens; those at -inf leave the race."""
    places, addends = _find(candidates, bias), np.array(list(bias.values()), np.float64)
    logits = candidates.logits.copy()
    logits[places[places >= 0]] += addends[places >= 0]
    keep = logits > -math.inf
    return Candidates(candidates.ids[keep], logits[keep]) if keep.any() else keep_best(candidates)


def penalize(
    candidates: Candidates, tokens: Iterable[int], *, repetition: float, presence: float, frequency: float
) -> Candidates:
    """Makes the `tokens` less likely: what the text has said lately.

    `repetition` divides a positive logit and multiplies a negative one, once a token (Keskar et al. 2019); then
    `presence` is taken off once, and `frequency` as often as the token occurs.
    """
    found, counts = np.unique(np.fromiter(tokens, np.int64), return_counts=True)
    places = _find(candidates, found)
    places, counts = places[places >= 0], counts[places >= 0]
    logits = candidates.logits.copy()
    now = logits[places]
    logits[places] = np.where(now > 0, now / repetition, now * repetition) - presence - frequency * counts
    return Candidates(candidates.ids, logits)


def apply_temperature(candidates: Candidates, temperature: float) -> Candidates:
    """Divides the logits. Their distance to the best is divided alone, so that no temperature overflows."""
    best = candidates.logits.max()
    with np.errstate(over="ignore"):
        scaled = (candidates.logits - best) / temperature
        return Candidates(candidates.ids, scaled + np.clip(best / temperature, -LARGEST, LARGEST))


def keep_best(candidates: Candidates) -> Candidates:
    """The most likely token alone, the one with the lowest id of equals."""
    best = int(np.argmax(candidates.logits))
    return Candidates(candidates.ids[best : best + 1], candidates.logits[best : best + 1])


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
    return _keep(candidates, _weights(candidates) >= min_p)


def keep_typical(candidates: Candidates, typical_p: float) -> Candidates:
    """Those whose surprise is nearest to the one expected, the fewest that sum to `typical_p` (Meister et al. 2022).

    The expected surprise is the entropy. The most likely token can be among those that leave.
    """
    surprise, weights = surprises(candidates), _weights(candidates)
    probabilities = weights / weights.sum()
    entropy = (probabilities * np.where(weights > 0, surprise, 0.0)).sum()
    nearest = Candidates(np.arange(len(weights)), -np.abs(surprise - entropy))  # places, the nearest to 0 first
    for count in SORTED_FIRST:
        few = keep_top_k(nearest, count)
        if probabilities[few.ids].sum() >= typical_p:
            nearest = few
            break
    order = np.argsort(-nearest.logits, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[nearest.ids][order]), typical_p)) + 1
    places = keep_top_k(nearest, count).ids
    return Candidates(candidates.ids[places], candidates.logits[places])


def keep_surprise(candidates: Candidates, mu: float) -> Candidates:
    """Mirostat 2: the tokens whose surprise is `mu` bits at most, the best one where there is none."""
    return _keep(candidates, surprises(candidates) <= mu)


def mirostat_top_k(candidates: Candidates, mu: float) -> int:
    """Mirostat 1: how many of the best to keep so that none surprises by more than about `mu` bits.

    The probabilities are taken for Zipf's, rank to the power of -s, with s fitted to the best hundred (Basu et al.
    2021, algorithm 1). Always from 1 to the number of candidates.
    """
    count = len(candidates.ids)
    best = np.sort(keep_top_k(candidates, ZIPF_TOKENS).logits)[::-1]
    best = best[best > -math.inf]
    rank = np.arange(1, len(best))
    steps = np.log((rank + 1) / rank)
    slope = float((steps * (best[:-1] - best[1:])).sum() / (steps**2).sum()) if len(best) > 1 else math.inf
    if slope in (0, math.inf):  # equals, or one alone
        return count if slope == 0 else 1
    excess = slope - 1
    share = excess / -math.expm1(-excess * math.log(count)) if excess else 1 / math.log(count)
    log_k = (math.log(share) + mu * math.log(2)) / slope
    return count if log_k >= math.log(count) else max(1, int(math.exp(log_k)))


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


def surprises(candidates: Candidates) -> Floats:
    """The surprise of each candidate, -log2 of its probability among them: bits, float64 `[candidates]`."""
    bits: Floats = -_log_softmax(candidates) / math.log(2)
    return bits


def top_log_probabilities(
    candidates: Candidates, token: int, count: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `token`, a candidate, and the `count` most likely (id, log-probability), best first.

    Tokens of no probability at all are not listed.
    """
    scores = _log_softmax(candidates)
    best = keep_top_k(Candidates(candidates.ids, scores), count)
    order = np.lexsort((best.ids, -best.logits))
    top = tuple((int(best.ids[i]), float(best.logits[i])) for i in order if best.logits[i] > -math.inf)
    return float(scores[_find(candidates, [token])[0]]), top


def check_tokens(bias: Mapping[int, float], vocab_size: int) -> None:
    """UsageError for a bias on a token that the vocabulary has not."""
    last = max(bias, default=0)
    if last >= vocab_size:
        raise UsageError(f"logit_bias names token {last}; the vocabulary ends at token {vocab_size - 1}.")


def _find(candidates: Candidates, tokens: Iterable[int]) -> npt.NDArray[np.int64]:  # [tokens]
    """Where each of the tokens is among the candidates; -1 for those that are not."""
    wanted = np.fromiter(tokens, np.int64)
    places = np.minimum(np.searchsorted(candidates.ids, wanted), len(candidates.ids) - 1)
    return np.where(candidates.ids[places] == wanted, places, -1)


def _keep(candidates: Candidates, keep: npt.NDArray[np.bool_]) -> Candidates:
    """The candidates that a filter lets pass, and the best one when it lets none."""
    return Candidates(candidates.ids[keep], candidates.logits[keep]) if keep.any() else keep_best(candidates)


def _log_softmax(candidates: Candidates) -> Floats:
    shifted = candidates.logits - candidates.logits.max()
    scores: Floats = shifted - math.log(np.exp(shifted).sum())
    return scores


def _weights(candidates: Candidates) -> Floats:
    """Probabilities up to one factor: the best candidate has 1."""
    weights: Floats = np.exp(candidates.logits - candidates.logits.max())
    return weights
