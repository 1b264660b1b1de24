"""How the next token is chosen: every option, its range, and the value at which it does nothing.

SamplingOptions(temperature=0.8, top_p=0.95, seed=7)
SamplingOptions(temperature=1.0, repetition_penalty=1.1, samplers="temperature,penalties")
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypedDict

from starscope.checkpoint.content import short
from starscope.errors import UsageError

# The steps whose order may be chosen. The logit bias comes before them: a ban holds whatever the order is. The draw,
# mirostat's or the plain one, comes after them.
SAMPLERS = ("penalties", "temperature", "top_k", "typical_p", "top_p", "min_p")

LARGEST_ADDEND = 1e30  # float64 has room for float32's largest logit times this
LARGEST_FLOAT = sys.float_info.max

# The least and the most of each number, and what is expected of it.
NUMBERS: Mapping[str, tuple[float, float, str]] = {
    "temperature":        (0, LARGEST_FLOAT, "0 (the most likely token) or a number above"),
    "top_p":              (0, 1, "a probability from 0 to 1"),
    "typical_p":          (0, 1, "a probability from 0 to 1"),
    "min_p":              (0, 1, "a share of the best probability, from 0 to 1"),
    "mirostat_tau":       (0, LARGEST_FLOAT, "bits of surprise a token, 0 or more"),
    "mirostat_eta":       (0, LARGEST_FLOAT, "a learning rate, 0 or more"),
    "repetition_penalty": (1 / LARGEST_ADDEND, LARGEST_ADDEND, "a factor, 1 for none, at most 1e30"),
    "presence_penalty":   (-LARGEST_ADDEND, LARGEST_ADDEND, "a number, 0 for none, at most 1e30"),
    "frequency_penalty":  (-LARGEST_ADDEND, LARGEST_ADDEND, "a number, 0 for none, at most 1e30"),
}  # fmt: skip
COUNTS: Mapping[str, tuple[float, str]] = {  # the same of whole numbers, all from 0 on
    "top_k":          (math.inf, "a whole number of tokens, 0 for all of them"),
    "penalty_window": (math.inf, "a whole number of tokens"),
    "mirostat":       (2, "0 (off), 1 or 2"),
    "seed":           (math.inf, "a whole number, 0 or more, or None for a random one"),
}  # fmt: skip


class SamplingArguments(TypedDict, total=False):
    """The options by name, for functions that take them as keywords and pass them on."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    typical_p: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float] | None
    samplers: str | Sequence[str]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The defaults take the most likely token; `seed=None` draws a fresh one.

    At temperature 0 only the logit bias and the penalties have a say. Mirostat always draws: with it, temperature 0
    counts as 1. Raises UsageError for a value out of range, and for an option whose step `samplers` leaves out.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: every token
    top_p: float = 1.0  # 1: every token
    min_p: float = 0.0  # 0: every token
    seed: int | None = None
    typical_p: float = 1.0  # 1: every token
    mirostat: int = 0  # 1 or 2: the number of candidates follows the surprise of the tokens so far
    mirostat_tau: float = 5.0  # bits of surprise a token aimed at
    mirostat_eta: float = 0.1  # share of the last token's error that is made up for
    repetition_penalty: float = 1.0  # 1: none; above: what was said is less likely
    presence_penalty: float = 0.0  # off the logit of a token that was said
    frequency_penalty: float = 0.0  # off the logit each time that it was
    penalty_window: int = 64  # the last tokens that the penalties look at, the prompt's among them
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token id -> addend; -inf bans
    samplers: str | Sequence[str] = SAMPLERS  # the order of the steps: a sequence, or one text with commas

    def __post_init__(self) -> None:
        for name, (least, most, meaning) in NUMBERS.items():
            if not is_number(value := getattr(self, name), least, most):
                raise UsageError(f"{name} is {short(value)}; expected {meaning}.")
        for name, (most, meaning) in COUNTS.items():
            value = getattr(self, name)
            if not is_number(value, 0, most, Integral) and not (name == "seed" and value is None):
                raise UsageError(f"{name} is {short(value)}; expected {meaning}.")
        self._check_bias()
        names = self.order
        for name in SAMPLERS:
            if name not in names and self.uses(name):
                raise UsageError(
                    f"{name} is set, but samplers ({', '.join(names) or 'none'}) leaves it out; expected it among them."
                )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise UsageError(f"logit_bias is {short(self.logit_bias)}; expected a mapping from token ids to numbers.")
        for token, addend in (self.logit_bias or {}).items():
            if not is_number(token, 0, math.inf, Integral):
                raise UsageError(f"logit_bias has the token {short(token)}; expected the id of one, a whole number.")
            if not is_number(addend, -LARGEST_ADDEND, LARGEST_ADDEND) and not is_number(addend, -math.inf, -math.inf):
                raise UsageError(
                    f"logit_bias of token {short(token)} is {short(addend)}; "
                    "expected a number of at most 1e30, or -inf to ban it."
                )

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps in the order chosen. UsageError for one that there is not, or that comes twice."""
        if isinstance(self.samplers, str):
            names = [name.strip() for name in self.samplers.split(",")] if self.samplers.strip() else []
        elif isinstance(self.samplers, Sequence):
            names = list(self.samplers)
        else:
            raise UsageError(f"samplers is {short(self.samplers)}; expected a list of names, or one text with commas.")
        for name in names:
            if not isinstance(name, str) or name not in SAMPLERS:
                close = difflib.get_close_matches(name, SAMPLERS, 1) if isinstance(name, str) else []
                raise UsageError(
                    f"samplers has {short(name)}; expected {', '.join(SAMPLERS)}.",
                    hint=f"Did you mean {close[0]}?" if close else "",
                )
        if len(set(names)) < len(names):
            raise UsageError(f"samplers is {', '.join(names)}; expected each step once.")
        return tuple(names)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken and nothing drawn."""
        return self.temperature == 0 and not self.mirostat

    def uses(self, step: str) -> bool:
        """Whether a step of SAMPLERS changes anything."""
        match step:
            case "penalties":
                return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
            case "temperature":
                return self.temperature not in (0, 1)
            case "top_k":
                return self.top_k > 0
            case "min_p":
                return self.min_p > 0
            case _:  # top_p, typical_p
                return bool(getattr(self, step) < 1)


def is_number(value: Any, least: float, most: float, kind: type[Any] = Real) -> bool:
    """Whether a value is a number from `least` to `most`, of NumPy's too; NaN, true and false are not."""
    return isinstance(value, kind) and not isinstance(value, bool) and bool(least <= value <= most)
