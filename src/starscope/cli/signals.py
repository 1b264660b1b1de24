"""Signals that end a command: it unwinds as for an error, so that nothing half-written stays, and says nothing.

Ctrl-C (SIGINT) ends it with 130, SIGTERM with 143, SIGHUP (the terminal was closed) with 129. One that was ignored when
the process began stays ignored, as under nohup. The first one counts; those that follow it find the command unwinding
already.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(BaseException):
    """A signal other than Ctrl-C asked the command to end. Not an Exception, so that nothing takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: as a shell gives it to a process that the signal ended."""
        return 128 + self.number


def stop_on_signals() -> None:
    """Let each signal unwind the command, once. KeyboardInterrupt stands for Ctrl-C, as everywhere in Python."""
    heeded = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]

    def listen() -> None:
        for number in heeded:
            signal.signal(number, stop)

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    def note_swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, (KeyboardInterrupt, Stopped)):
            listen()  # Python could not pass it on, so the command goes on; deaf, it could not be ended at all
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = note_swallowed
    listen()


def ignore_signals() -> None:
    """From here on the process only ends: a signal could but break a step of that."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
