"""Logits for the samplers' tests, and the naive references that the filters are held against."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from starscope.sampling import Candidates, every_token

# Few distinct values, so that ties are common; -inf is a token that something forbade.
LOGITS = st.lists(
    st.sampled_from([-math.inf, -90.0, -3.5, -1.0, 0.0, 0.25, 1.0, 2.0, 30.0]), min_size=1, max_size=40
).filter(lambda values: max(values) > -math.inf)

CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}
"""Degrees of freedom -> the value passed once in a thousand."""


def candidates(logits: list[float]) -> Candidates:
    return every_token(np.array(logits, np.float32))


def ranked(logits: list[float]) -> list[int]:
    """The ids, the most likely first, of equals the lowest."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def naive_probabilities(logits: list[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def naive_surprises(logits: list[float]) -> list[float]:
    """Bits."""
    best = max(logits)
    norm = math.log(math.fsum(math.exp(x - best) for x in logits))
    return [(best - x + norm) / math.log(2) for x in logits]


def zipf_logits(slope: float, count: int) -> np.ndarray:
    """Logits whose probabilities are rank ** -slope, the most likely first: float32 `[count]`."""
    return (-slope * np.log(np.arange(1, count + 1))).astype(np.float32)
