"""How the next token is chosen: every option, its range, and the value at which it does nothing.

SamplingOptions(temperature=0.8, top_p=0.95, seed=7)
SamplingOptions(temperature=1.0, repetition_penalty=1.1, samplers="temperature,penalties")
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from starscope.errors import UsageError

# The steps whose order may be chosen. The logit bias comes before them: a ban holds whatever the order is. The draw,
# mirostat's or the plain one, comes after them.
SAMPLERS = ("penalties", "temperature", "top_k", "typical_p", "top_p", "min_p")

LARGEST_ADDEND = 1e30  # float64 has room for float32's largest logit times this


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
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                f"temperature is {self.temperature}; expected 0 (the most likely token) or a number above."
            )
        if not _is_count(self.top_k):
            raise UsageError(f"top_k is {self.top_k}; expected a whole number of tokens, 0 for all of them.")
        for name in ("top_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a probability from 0 to 1.")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; expected a share of the best probability, from 0 to 1.")
        if self.seed is not None and not _is_count(self.seed):
            raise UsageError(f"seed is {self.seed}; expected a whole number from 0 on, or none for a fresh one.")
        if not (_is_count(self.mirostat) and self.mirostat <= 2):
            raise UsageError(f"mirostat is {self.mirostat}; expected 0 (off), 1 or 2.")
        if not 0 <= self.mirostat_tau < math.inf:
            raise UsageError(f"mirostat_tau is {self.mirostat_tau}; expected bits of surprise a token, 0 or more.")
        if not 0 <= self.mirostat_eta < math.inf:
            raise UsageError(f"mirostat_eta is {self.mirostat_eta}; expected a learning rate, 0 or more.")
        self._check_addends()
        names = self.order
        for name in SAMPLERS:
            if name not in names and self.uses(name):
                raise UsageError(
                    f"{name} is set, and samplers ({', '.join(names) or 'none'}) leaves it out; expected it there."
                )

    def _check_addends(self) -> None:
        if not 1 / LARGEST_ADDEND <= self.repetition_penalty <= LARGEST_ADDEND:
            raise UsageError(
                f"repetition_penalty is {self.repetition_penalty}; expected a factor, 1 for none, at most 1e30."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= LARGEST_ADDEND:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a number, 0 for none, at most 1e30.")
        if not _is_count(self.penalty_window):
            raise UsageError(f"penalty_window is {self.penalty_window}; expected a whole number of tokens.")
        for token, addend in (self.logit_bias or {}).items():
            if not _is_count(token):
                raise UsageError(f"logit_bias has the token {token!r}; expected the id of one, a whole number.")
            if not (abs(addend) <= LARGEST_ADDEND or addend == -math.inf):
                raise UsageError(
                    f"logit_bias of token {token} is {addend}; expected a number of at most 1e30, or -inf to ban it."
                )

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps in the order chosen. UsageError for one that there is not, or that comes twice."""
        if isinstance(self.samplers, str):
            names = [name.strip() for name in self.samplers.split(",")] if self.samplers.strip() else []
        else:
            names = list(self.samplers)
        for name in names:
            if name not in SAMPLERS:
                close = difflib.get_close_matches(name, SAMPLERS, 1)
                raise UsageError(
                    f"samplers has {name!r}; expected {', '.join(SAMPLERS)}.",
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


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 0
