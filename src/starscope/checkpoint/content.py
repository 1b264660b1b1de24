"""What files say, taken by its type and told in a line.

Nothing that a file says is used as a key, a size or a switch before its type is known, and a message never repeats a
megabyte of it:

    typed(config, "multi_query", bool, "config.json")       # CheckpointError: key, found, expected
    short("x" * 100_000)                                     # "'xxxx...xxxx'", at most 80 characters
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from starscope.errors import CheckpointError, StarscopeError

T = TypeVar("T", int, float, bool, str)

LONGEST = 80  # characters of a file's content in a message
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write a number of more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() <= 200 else f"a number of {x.bit_length()} bits"


_brief = _Brief()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60
_brief.maxlist = _brief.maxdict = 4
_brief.maxlevel = 3


def short(value: Any) -> str:
    """The value as Python writes it, on one line of at most 80 characters."""
    return cut(_brief.repr(value).replace("\n", " "))


def cut(text: str) -> str:
    """A name or another text, cut after 80 characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def is_finite(value: float) -> bool:
    """Whether a number is finite as a float is: not NaN, infinite, or a whole number that no float holds."""
    return abs(value) <= sys.float_info.max


def is_of(value: Any, kind: type) -> bool:
    """Whether a value is of the kind: true is no number, and a whole number is a number."""
    return type(value) is kind or (kind is float and type(value) is int)


def typed(
    table: Mapping[str, Any], key: str, kind: type[T], where: str, error: type[StarscopeError] = CheckpointError
) -> T | None:
    """The value under `key`, of the type that is expected; None where it is absent or null."""
    value = table.get(key)
    if value is not None and not is_of(value, kind):
        raise error(f"{where}: {key} is {short(value)}; expected {WORDS[kind]}.")
    return value


def switch(
    table: Mapping[str, Any], key: str, default: bool, where: str, error: type[StarscopeError] = CheckpointError
) -> bool:
    """True or false, and `default` where the key is absent; null is neither."""
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise error(f"{where}: {key} is {short(value)}; expected true or false.")
    return value
