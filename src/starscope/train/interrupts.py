"""Signals noted instead of obeyed, so that a step is finished and saved before the program ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from starscope.machine import STOPPING


@contextmanager
def noted_signals() -> Iterator[Callable[[], int | None]]:
    """While inside, signals that ask the process to end are noted instead; a second one ends it as usual.

    One that is ignored stays ignored, as under nohup. In another thread than the main one, which gets no signals,
    nothing is ever noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    handlers = {number: signal.getsignal(number) for number in STOPPING}
    # None: a handler that is not Python's, which could not be put back.
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
