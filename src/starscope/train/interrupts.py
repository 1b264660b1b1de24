"""SIGINT and SIGTERM noted instead of obeyed, so that a step is finished and saved before the program ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_signals() -> Iterator[Callable[[], int | None]]:
    """While inside, SIGINT and SIGTERM are noted instead of ending the program; a second one ends it as usual."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
