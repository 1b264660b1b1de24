"""Whether the passes of a micro-batch are compiled: where that pays itself back before the run ends.

torch.compile takes half a minute and a C++ compiler. On a CPU what it makes was no faster than the kernels here, so it
is off there unless asked for. On another device a run that is long enough tries, times both, and takes the faster one.
Last bits differ between the two, so a run that goes on computes as it began; and from one compiled run to another,
which is said where one goes on.
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MODES = ("auto", "on", "off")
COMPILE_SECONDS = 30.0  # on two cores, for models of four to sixteen blocks
MOST_SAVED = 0.2  # of a step, hoped for
TRIAL_SHARE = 0.02  # of the time left that an attempt may take
ON_A_CPU = "not compiled: on a CPU a compiled step takes as long, or longer (--compile on tries)"

PROBE_STEPS = 3

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """`loss` is the compiled one, None where it is not used; and why."""

    loss: Loss | None
    why: str


def step_seconds(step: Callable[[], object], steps: int = PROBE_STEPS) -> float:
    """Seconds that a step takes, the least of `steps` after a first one that warms up. They are real steps."""
    step()
    least = math.inf
    for _ in range(steps):
        start = time.perf_counter()
        step()
        least = min(least, time.perf_counter() - start)
    return least


def break_even(step: float, saved: float = MOST_SAVED, compiling: float = COMPILE_SECONDS) -> int:
    """The steps after which compiling has paid itself back, at `step` seconds each of which a share is `saved`."""
    return math.ceil(compiling / (saved * step))


def foreseen(mode: str, device: str) -> str:
    """What a run would say that is decided without trying; nothing when it would try."""
    if mode == "off":
        return "not compiled: as asked"
    if mode == "auto" and device == "cpu":
        return ON_A_CPU
    return compiler_problem(device)


def compiler_problem(device: str) -> str:
    """A sentence where torch would find no compiler: it needs one for C++ on a CPU, and Triton elsewhere."""
    if device != "cpu":
        from torch.utils._triton import has_triton

        return "" if has_triton() else f"not compiled: there is no Triton for {device}"
    from torch._inductor import config

    given = config.cpp.cxx
    names = [name for name in (given if isinstance(given, (tuple, list)) else (given,)) if name]
    return "" if any(map(shutil.which, names)) else f"not compiled: there is no C++ compiler ({', '.join(names)})"


def choose(
    loss: Loss,
    run: Callable[[Loss], object],
    *,
    mode: str,
    device: str,
    left: int,
    before: bool | None,
    backend: str = "inductor",
) -> Choice:
    """Decide for `left` steps. `run` makes the passes of one step with the loss that it is given, and leaves no trace.

    `before`: what the run has done so far, None at its beginning. With `auto` that decides.
    """
    if mode == "auto" and before is not None:
        if not before or (reason := compiler_problem(device)):
            return Choice(None, reason if before else "not compiled: as before")
        made, problem, _ = _compile(loss, run, backend)
        return Choice(made, problem or "compiled: as before")
    if not left:
        return Choice(None, "not compiled: no step is left")
    if reason := foreseen(mode, device):
        return Choice(None, reason)
    step = step_seconds(lambda: run(loss))
    if mode == "auto" and left * step * TRIAL_SHARE < COMPILE_SECONDS:
        return Choice(
            None,
            f"not compiled: that takes about {COMPILE_SECONDS:.0f} s, pays back after {break_even(step):,} steps at "
            f"the earliest, and {left:,} are left",
        )
    compiled, problem, took = _compile(loss, run, backend)
    if compiled is None:
        return Choice(None, problem)
    faster = step_seconds(lambda: run(compiled))
    times = f"a step takes {1e3 * faster:.3g} ms compiled and {1e3 * step:.3g} ms as it is; {took:.0f} s to compile"
    if faster >= step:
        times += ", never paid back"
        return Choice(compiled if mode == "on" else None, f"{'' if mode == 'on' else 'not '}compiled: {times}")
    even = break_even(step, 1 - faster / step, took)
    pays = mode == "on" or even <= left
    return Choice(
        compiled if pays else None,
        f"{'' if pays else 'not '}compiled: {times}, paid back after {even:,} steps, and {left:,} are left",
    )


def _compile(loss: Loss, run: Callable[[Loss], object], backend: str) -> tuple[Loss | None, str, float]:
    """The compiled loss, ready for a run's batches, or None and why there is none; and the seconds that it took."""
    start = time.perf_counter()
    made = torch.compile(loss, dynamic=False, backend=backend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it traces through instead of calling
            run(made)
    except RuntimeError as error:  # the root of what torch's compilers raise
        return None, f"not compiled: {(str(error).strip() or type(error).__name__).splitlines()[0]}", 0.0
    return made, "", time.perf_counter() - start
