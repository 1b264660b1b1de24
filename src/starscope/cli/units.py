"""Numbers and names for people: bytes in binary units, counts in thousands, texts in one line."""

from __future__ import annotations

from typing import Any

from starscope.machine import bytes_text as bytes_text


def count_text(count: int) -> str:
    """1137207296 -> "1.1B"."""
    size = float(count)
    for unit in ("", "K", "M", "B"):
        if size < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g}T"


def plural(count: int, noun: str) -> str:
    """1 -> "1 token", 2 -> "2 tokens"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def one_line(value: Any) -> str:
    """A value without line feeds or other control characters, which a file or its name may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(value))
