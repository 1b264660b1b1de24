"""How fast a model runs here: prefill and decode at several depths, sequences decoded together, load time and memory.

Only `Engine.forward` is timed, on random token ids (the same for the same seed), and nothing is sampled. A depth is the
number of tokens that the cache holds already: it is prefilled once, and the cache is cut back to it between repeats.
Every figure is the median of its repeats.

    found = bench(starscope.load("model.gguf"), depths=(0, 2048), batches=(1, 8))
    print(found.prefill_tok_s[2048], found.decode_tok_s[0], found.batch_tok_s[8])

Decoding reads every weight once a token, so the memory sets its limit. `read_gb_s` is what a plain read loop gets on
as many threads; `decode_read_share` the part of it that decoding the weights, at their stored size, comes to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.errors import ContextOverflowError, UsageError
from starscope.formats import find_format

if TYPE_CHECKING:
    from starscope.cache import Cache
    from starscope.engine import Engine
    from starscope.model import Model

PROMPT, STEPS, REPEAT = 512, 64, 3
MAX_BATCH = 1024  # sequences
MAX_REPEAT = 1000
CHUNK = 512  # tokens a step while a depth is filled
READ_BYTES = 256 << 20  # far more than a processor's caches hold
READ_PASSES = 7
SEED = 0

Ids = np.ndarray[Any, Any]
Progress = Callable[[str], None]
"""Is told what is about to be measured."""


@dataclass(frozen=True)
class BenchResult:
    """What was measured. Speeds are tokens per second, by depth (tokens in the cache) or by batch size (sequences).

    `load_s` ends once the weights are ready to run. `peak_rss_bytes` is the process's highest resident memory so far,
    without the buffer of the read loop; None where the system does not tell. `weight_bytes` are those that a decoded
    token needs, as stored. `read_gb_s` (10⁹ bytes per second) and the shares of it are None off the CPU.
    """

    prefill_tok_s: dict[int, float]
    decode_tok_s: dict[int, float]
    batch_tok_s: dict[int, float]
    load_s: float
    peak_rss_bytes: int | None
    weight_bytes: int
    read_gb_s: float | None
    decode_read_share: dict[int, float] | None


def check_sizes(
    prompt: int = PROMPT,
    steps: int = STEPS,
    depths: Iterable[int] = (0,),
    batches: Iterable[int] = (1,),
    repeat: int = REPEAT,
) -> None:
    """UsageError for a number that can be measured on no model."""
    depths, batches = list(depths), list(batches)
    if not depths or not batches:
        raise UsageError(f"there is no {'batch size' if depths else 'depth'} to measure; expected at least one.")
    rows: list[tuple[str, list[Any], int, int | None]] = [
        ("the prompt", [prompt], 1, None),
        ("the number of steps", [steps], 1, None),
        ("a depth", depths, 0, None),
        ("a batch size", batches, 1, MAX_BATCH),
        ("repeat", [repeat], 1, MAX_REPEAT),
    ]
    for name, values, least, most in rows:
        for value in values:
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not is_whole or value < least or (most is not None and value > most):
                expected = f"{least} or more" if most is None else f"{least} to {most}"
                raise UsageError(f"{name} is {value!r}; expected a whole number, {expected}.")


def check_room(context_length: int, prompt: int, steps: int, depths: Iterable[int]) -> None:
    """ContextOverflowError when a depth leaves too few positions for the prompt or the steps."""
    for depth in depths:
        for count, what in ((prompt, "a prompt of"), (steps, "decoding")):
            if depth + count > context_length:
                raise ContextOverflowError(
                    f"depth {depth} and {what} {count} tokens need {depth + count} positions; the context has "
                    f"{context_length}.",
                    hint="Measure at a smaller depth, or with fewer tokens.",
                )


def bench(
    model: Model,
    prompt: int = PROMPT,
    steps: int = STEPS,
    depths: Sequence[int] = (0,),
    batches: Sequence[int] = (1,),
    repeat: int = REPEAT,
    *,
    seed: int = SEED,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure a loaded model: `prompt` tokens in one step, and `steps` steps of one token, at each of `depths`;
    `steps` steps of one token for each of `batches` sequences that begin empty.

    Raises UsageError for numbers out of range and ContextOverflowError for a depth that leaves too little room.
    """
    check_sizes(prompt, steps, depths, batches, repeat)
    engine = model.engine
    check_room(engine.context_length, prompt, steps, (0, *depths))
    tell = progress or (lambda _: None)
    tell("loading")
    began = time.perf_counter()
    engine.prepare()
    load_s = model.load_s + time.perf_counter() - began

    ids = np.random.default_rng(seed).integers(0, model.vocab_size, max(depths) + max(prompt, steps) + max(batches))
    _warm_up(engine, ids)
    prefill, decode = _by_depth(engine, ids, prompt, steps, depths, repeat, tell)
    batch = _by_batch(engine, ids, steps, batches, repeat, tell)
    peak = peak_rss_bytes()
    tell("read bandwidth")
    read = read_bandwidth(engine.threads) if engine.device == "cpu" else None
    size = weight_bytes(model)
    return BenchResult(
        prefill_tok_s={depth: prompt / prefill[depth] for depth in depths},
        decode_tok_s={depth: steps / decode[depth] for depth in depths},
        batch_tok_s={count: count * steps / batch[count] for count in batches},
        load_s=load_s,
        peak_rss_bytes=peak,
        weight_bytes=size,
        read_gb_s=None if read is None else read / 1e9,
        decode_read_share=None if read is None else {depth: steps / decode[depth] * size / read for depth in depths},
    )


def _warm_up(engine: Engine, ids: Ids) -> None:
    """What an engine does once, at its first steps of either kind, belongs to no figure."""
    cache = engine.new_cache()
    if engine.context_length > 1:
        engine.forward([ids[: min(len(ids), engine.context_length, 32) - 1]], [cache])
    engine.forward([ids[:1]], [cache])


def _by_depth(
    engine: Engine, ids: Ids, prompt: int, steps: int, depths: Sequence[int], repeat: int, tell: Progress
) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds of the prompt and of the steps, by depth; one cache serves all of them, the smallest first."""
    prefill, decode = {}, {}
    cache = engine.new_cache()
    for depth in sorted(set(depths)):
        tell(f"filling the cache to depth {depth}")
        for start in range(cache.length, depth, CHUNK):
            engine.forward([ids[start : min(start + CHUNK, depth)]], [cache])
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(repeat):
            tell(f"prefill at depth {depth}, {i + 1} of {repeat}")
            seconds[0].append(_timed(engine, [[ids[depth : depth + prompt]]], [cache]))
            cache.truncate(depth)
            tell(f"decode at depth {depth}, {i + 1} of {repeat}")
            seconds[1].append(_timed(engine, [[ids[at : at + 1]] for at in range(depth, depth + steps)], [cache]))
            cache.truncate(depth)
        prefill[depth], decode[depth] = map(statistics.median, seconds)
    return prefill, decode


def _by_batch(
    engine: Engine, ids: Ids, steps: int, batches: Sequence[int], repeat: int, tell: Progress
) -> dict[int, float]:
    """Median seconds of the steps, by the number of sequences that share them; each has its own tokens."""
    found = {}
    for count in dict.fromkeys(batches):
        caches = [engine.new_cache() for _ in range(count)]
        each = [[ids[at + i : at + i + 1] for i in range(count)] for at in range(steps)]
        seconds = []
        for i in range(repeat):
            tell(f"decode of {count} together, {i + 1} of {repeat}")
            seconds.append(_timed(engine, each, caches))
            for cache in caches:
                cache.truncate(0)
        found[count] = statistics.median(seconds)
    return found


def _timed(engine: Engine, steps: Sequence[Sequence[Ids]], caches: Sequence[Cache]) -> float:
    """Seconds that the steps take one after the other."""
    began = time.perf_counter()
    for sequences in steps:
        engine.forward(sequences, caches)
    return time.perf_counter() - began


def weight_bytes(model: Model) -> int:
    """The bytes of the weights that a decoded token needs, as they are stored: all but the tables that only give a
    row each.
    """
    weights = model.weights
    whole = {name for op in model.graph.ops if op.kind != "embed" for name in op.weights}
    return sum(find_format(weights.format_name(name)).nbytes(weights.slots[name].shape) for name in whole)


def peak_rss_bytes() -> int | None:
    """The highest resident memory of this process so far; None where the system does not tell.

    Of this program alone: what getrusage gives begins at what the process had before it became this program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def read_bandwidth(threads: int, size: int = READ_BYTES) -> float:
    """Bytes per second of a plain read loop: `threads` threads sum one buffer of `size` bytes, a part each."""
    parts = np.array_split(np.ones(size // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READ_PASSES):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, parts))  # integers: nothing is waited for but the memory
            seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds)
