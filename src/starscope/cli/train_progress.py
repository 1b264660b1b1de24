"""What a run shows while it goes: a bar on a terminal, elsewhere a line for each line of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starscope.cli.common import Session
from starscope.cli.units import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


SAMPLE_CHARACTERS = 100  # of a sample that a line shows


class Shown:
    """Takes what a run tells. `bar` is None where there is no terminal."""

    def __init__(self, session: Session, bar: Progress | None) -> None:
        self._session, self._bar = session, bar
        self._task: TaskID | None = None
        self._what = ""
        self._steps = self._first = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """A sentence for the person."""
        if self._bar is None:
            self._session.note(text)
        elif not self._session.quiet:
            self._bar.console.print(one_line(text), markup=False, highlight=False)

    def prepare(self, what: str, done: int, total: int) -> None:
        """Bytes of text done, of those in all."""
        if self._bar is None:
            return
        if what != self._what or self._task is None:
            self._restart(what, total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)

    def begin(self, steps: int, step: int) -> None:
        """Training begins at `step`, of `steps`."""
        self._steps, self._first, self._began = steps, step, time.monotonic()
        if self._bar is not None:
            self._restart("training", steps)
            assert self._task is not None
            self._bar.update(self._task, completed=step)

    def _restart(self, what: str, total: int) -> None:
        assert self._bar is not None
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._what, self._task = what, self._bar.add_task(what, total=total, facts="")

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of the log."""
        if "loss" in line:
            self._step(line)
        elif "bits_per_byte" in line:
            self.say(f"step {line['step']}: {line['bits_per_byte']:.4f} bits per byte of held-out text")
        elif "samples" in line:
            for sample in line["samples"]:
                self._sample(sample)

    def _step(self, line: Mapping[str, Any]) -> None:
        # Evaluations and samples count in the time left, and not in the speed.
        per_step = (time.monotonic() - self._began) / max(1, line["step"] - self._first)
        left = clock((self._steps - line["step"]) * per_step)
        facts = f"loss {line['loss']:.3f} · rate {line['learning_rate']:.2g} · {line['tokens_per_second']:,} tokens/s"
        if self._bar is None:
            self.say(f"step {line['step']}/{self._steps} · {facts} · {left} left")
        else:
            assert self._task is not None
            self._bar.update(self._task, completed=line["step"], facts=f"{facts} · {left} left")

    def _sample(self, sample: Mapping[str, Any]) -> None:
        text = sample["before"][-SAMPLE_CHARACTERS // 2 :] + "▸" + sample["text"][:SAMPLE_CHARACTERS]
        if sample.get("after"):
            text += "◂" + sample["after"][: SAMPLE_CHARACTERS // 2]
        self.say(f"  {one_line(text)}")


def clock(seconds: float) -> str:
    """A length of time: 45 s, 3:20, 2:05:00."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@contextmanager
def training_progress(session: Session) -> Iterator[Shown]:
    """What to tell a run's progress to."""
    if not session.shows_progress:
        yield Shown(session, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Shown(session, bar)
