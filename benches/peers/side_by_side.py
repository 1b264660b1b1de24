"""Two engines on the same work in turns: a process each, which holds its model and waits at a pipe between its turns.

A bench file makes the peer's `Side`; starscope's is here. The file starts itself again as a worker for each side, and
`Worker.call` has it run one method. Only the engine's steps are timed, in the worker. A round is one turn each, A B
A B ..., and a ratio is the median of the rounds' own ratios: what the machine does besides hits both alike.

    ours, theirs = Worker(python, script, "starscope", ...), Worker(python, script, "llama.cpp", ...)
    row = in_turns("prefill 512", "tok/s", 5, lambda side: 512 / side.call("prefill", ids), ours, theirs)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
PAUSE_S = 0.05  # before a turn: the other side's threads have gone to sleep by then
MOST_IDLE = 0.05  # of a core, that a side may use while it waits
MOST_LOAD = 0.5  # processes that ran or wanted to, on average over the last minute
ROUGHLY = 0.2  # how far logits may be apart, of their largest: both round weights or activations in their own way


class Side(Protocol):
    """One engine with one model, in a worker. Times are seconds; the cache is cut back after whatever is timed."""

    def about(self) -> dict[str, Any]:
        """At least `name` and `vocab_size`."""

    def logits(self, ids: list[int]) -> list[float]:
        """Of the token behind the last one."""

    def fill(self, ids: list[int]) -> None:
        """Have the cache hold just these tokens."""

    def prefill(self, ids: list[int]) -> float:
        """For these tokens in one step, behind those in the cache."""

    def decode(self, ids: list[int]) -> float:
        """For these tokens one by one, behind those in the cache."""

    def batch(self, steps: list[list[int]]) -> float:
        """For these steps of one token a sequence; the sequences begin empty."""


class Starscope:
    """starscope's side."""

    def __init__(self, file: str, engine: str, threads: int) -> None:
        import starscope

        self.model = starscope.load(file, engine=engine, threads=threads)
        self.engine = self.model.engine
        self.cache = self.engine.new_cache()

    def about(self) -> dict[str, Any]:
        import starscope

        return {
            "name": f"starscope {starscope.__version__}, {self.engine.name} engine",
            "vocab_size": self.model.vocab_size,
        }

    def logits(self, ids: list[int]) -> list[float]:
        [rows] = self.engine.forward([ids])
        return [float(value) for value in rows[-1]]

    def fill(self, ids: list[int]) -> None:
        kept = self.cache.reuse(ids)
        for start in range(kept, len(ids), 512):
            self.engine.forward([ids[start : start + 512]], [self.cache])

    def prefill(self, ids: list[int]) -> float:
        return self._timed([ids])

    def decode(self, ids: list[int]) -> float:
        return self._timed([[token] for token in ids])

    def _timed(self, steps: list[list[int]]) -> float:
        depth = self.cache.length
        began = time.perf_counter()
        for step in steps:
            self.engine.forward([step], [self.cache])
        seconds = time.perf_counter() - began
        self.cache.truncate(depth)
        return seconds

    def batch(self, steps: list[list[int]]) -> float:
        caches = [self.engine.new_cache() for _ in steps[0]]
        self.engine.forward([[token] for token in steps[0]], [self.engine.new_cache() for _ in steps[0]])
        began = time.perf_counter()
        for step in steps:
            self.engine.forward([[token] for token in step], caches)
        return time.perf_counter() - began


def serve(make: Callable[[], Side]) -> None:
    """A worker's life: make the side, say what it is, then answer calls until stdin ends. Waiting takes no time."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    began = time.perf_counter()
    side = make()
    load_s = time.perf_counter() - began
    print(json.dumps({**side.about(), "load_s": load_s}), file=answers, flush=True)
    for line in sys.stdin:
        name, args = json.loads(line)
        result = peak_rss() if name == "peak_rss" else getattr(side, name)(*args)
        print(json.dumps(result), file=answers, flush=True)


def peak_rss() -> int:
    """The highest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


class Worker:
    """A side's process, seen from the one that compares. Use it in a `with`."""

    def __init__(self, python: str, script: str, *args: object) -> None:
        command = [python, script, "--worker", *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about: dict[str, Any] = self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):  # it had ended before it read all
                pipe.close()
        self.process.wait()

    def call(self, name: str, *args: Any) -> Any:
        """What the side's method gives."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer either
            print(json.dumps([name, args]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with status {self.process.wait()}")
        return json.loads(line)

    def cpu_s(self) -> float:
        """Processor time that it has used so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Row:
    """One metric of both sides: the rounds' figures, their medians, and the median of the rounds' ratios."""

    metric: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    rounds: list[tuple[float, float]]


def row_of(metric: str, unit: str, rounds: list[tuple[float, float]]) -> Row:
    """The medians of rounds."""
    ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    return Row(metric, unit, ours, theirs, statistics.median(a / b for a, b in rounds), rounds)


def in_turns(
    metric: str, unit: str, rounds: int, measure: Callable[[Worker], float], ours: Worker, theirs: Worker
) -> Row:
    """Measure both sides `rounds` times each, in turns."""

    def turn(side: Worker) -> float:
        time.sleep(PAUSE_S)
        return measure(side)

    if sys.stderr.isatty():
        print(f"{metric} ...", file=sys.stderr, flush=True)
    return row_of(metric, unit, [(turn(ours), turn(theirs)) for _ in range(rounds)])


def say_if_busy() -> None:
    """Threads that wait for each other at every operation crawl where others take their cores: one side's may, more
    than the other's.
    """
    if (load := os.getloadavg()[0]) > MOST_LOAD:
        print(f"the machine is busy (load {load:.1f}): ratios will not hold", file=sys.stderr)


def check_agreement(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Whether both sides compute one model: the same likeliest token, or logits that are roughly the same."""
    best = [max(range(len(logits)), key=logits.__getitem__) for logits in (ours, theirs)]
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, ours))
    if apart > ROUGHLY:
        raise SystemExit(f"logits differ by {apart:.0%} of their largest: the two do not compute the same.")
    return {"same_token": best[0] == best[1], "largest_relative_difference": apart}


def idle_share(idle: Worker, busy: Callable[[], object]) -> float:
    """The part of a core that a side uses while it waits for the other."""
    time.sleep(PAUSE_S)
    began, used = time.perf_counter(), idle.cpu_s()
    busy()
    return (idle.cpu_s() - used) / max(time.perf_counter() - began, 0.1)


def token_ids(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """Random ordinary tokens: special ones stand at either end of a vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size // 8, vocab_size - 200) for _ in range(count)]


def table(title: str, names: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as aligned lines; where less is better, the unit says so."""
    lines = [("", *names, "ratio", "")]
    for row in rows:
        unit = row.unit if row.unit == "tok/s" else f"{row.unit} (less is better)"
        lines.append((row.metric, number_text(row.ours), number_text(row.theirs), f"{row.ratio:.2f}", unit))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [title]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in (1, 2, 3)), line[4]]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def number_text(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def as_document(rows: Sequence[Row], **about: Any) -> dict[str, Any]:
    return {**about, "rows": [asdict(row) for row in rows]}


def installed(name: str) -> ModuleType:
    """Import an installed package although a file of this folder, which Python looks into first, has its name."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    return importlib.import_module(name)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every comparison."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("-p", "--prompt", type=int, default=512, help="tokens to prefill")
    made.add_argument("-n", "--steps", type=int, default=64, help="tokens to decode")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--engine", default="auto", help="starscope's")
    made.add_argument("--starscope-python", default=sys.executable, help="an interpreter that has starscope")
    made.add_argument("--peer-python", default=sys.executable, help="an interpreter that has the peer")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    return made
