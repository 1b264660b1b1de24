"""Numbers for people: bytes in binary units, counts in thousands."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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
