"""Signals that end a command: it unwinds as for an error, so that nothing half-written stays, and says nothing.

Ctrl-C (SIGINT) ends it with 130, SIGTERM with 143, SIGHUP (the terminal was closed) with 129. One that was ignored when
the process began stays ignored, as under nohup. The first one counts; those that follow it find the command unwinding
already.

What unwinds is an exception, and an exception raised in the middle of anything may be lost: Python drops one that
leaves a `__del__`, an extension module that is being imported drops it or makes another of it. So the signal is
remembered, raised again as long as the command goes on, and whatever the command ends with, the signal's status counts.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from starscope.machine import STOPPING

AGAIN_S = 0.1  # from one look at whether the command still goes on to the next


class Stopped(BaseException):
    """A signal other than Ctrl-C asked the command to end. Not an Exception, so that nothing takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """The signals of one process. `number` is the first that came, None before."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._heeded = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        self._ending = False

    def listen(self) -> None:
        """Let a signal unwind the command. KeyboardInterrupt stands for Ctrl-C, as everywhere in Python."""
        sys.unraisablehook = _tell_unraisable
        for number in self._heeded:
            signal.signal(number, self._stop)

    @property
    def status(self) -> int | None:
        """The exit status for the signal that came: as a shell gives it to a process that the signal ended."""
        return None if self.number is None else 128 + self.number

    def check(self) -> None:
        """Raise what the signal that came raised, for it may have been lost."""
        if self.number is not None:
            raise KeyboardInterrupt if self.number == signal.SIGINT else Stopped(self.number)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._ending:
            return
        if self.number is None:
            signal.signal(signal.SIGALRM, self._stop)  # which takes a signal that waits: that one came first then
            self.number = self.number or number
        if not _is_unwinding():
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            self.check()

    def ignore(self) -> None:
        """From here on the process only ends: a signal could but break a step of that."""
        self._ending = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (*STOPPING, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)


def _is_unwinding() -> bool:
    """Whether what runs at this moment is there to clean up after a signal: the handling of what it raised, or of an
    error that came up meanwhile.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, (KeyboardInterrupt, Stopped)):
        error = error.__context__
    return error is not None


def _tell_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Python's message about an exception that it could not pass on; none about a signal's, which is raised again."""
    if not isinstance(unraisable.exc_value, (KeyboardInterrupt, Stopped)):
        sys.__unraisablehook__(unraisable)
