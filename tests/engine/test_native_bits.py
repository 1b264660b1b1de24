"""A row's logits are the same bits whatever runs beside it: threads, other sequences, the cut of a prompt, a fork."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope import native
from starscope.engine.native_engine import ROWS_AT_ONCE, NativeEngine
from starscope.formats import find_format
from support.stored import make_graph, prompts, stored_weights

module = native.kernels()
assert module is not None, native.why_missing()
NAMES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q2_K"]  # the last two as float32
FORMAT = pytest.mark.parametrize("name", NAMES)
MULTI_QUERY = pytest.mark.parametrize("multi_query", [True, False], ids=["multi_query", "multi_head"])
LONGEST = 150  # tokens: past a tile of keys
# Where one way of multiplying ends and another begins, and tiles of rows and keys end.
EDGES = [1, 2, 3, 11, 12, 13, 23, 24, 25, 36, 37, 127, 128, 129]


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = module.isa()
    yield
    native.use_isa(before)


@functools.cache
def make_engine(name: str, multi_query: bool, isa: str, threads: int, wide: bool = False) -> NativeEngine:
    block = find_format(name).block_size
    hidden, inner = {1: (52, 77), 32: (96, 160)}.get(block, (256, 512))
    if wide:  # more columns than are multiplied at a time, and enough of them for several panels to a thread
        inner = {1: 2053, 32: 2080}.get(block, 2304)
    graph = make_graph(
        hidden=hidden, heads=4, inner=inner, layers=1 if wide else 2, multi_query=multi_query, positions=700
    )
    native.use_isa(isa)
    return NativeEngine(graph, stored_weights(graph, name, tied=not wide), threads=threads)


@functools.cache
def expected(name: str, multi_query: bool, isa: str, length: int, count: int, wide: bool = False) -> Any:
    """Some texts of `length` tokens, and the logits of each by itself, in one step, on one thread."""
    engine = make_engine(name, multi_query, isa, 1, wide)
    texts = prompts(engine.graph, [length] * count)
    return texts, [engine.forward([text], None, "all")[0] for text in texts]


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def run_in_steps(engine: NativeEngine, texts: list[list[int]], logits: list[np.ndarray], data: st.DataObject) -> None:
    """All texts to their ends, in steps that take some tokens of some of them."""
    caches, done = [engine.new_cache() for _ in texts], [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        active = [i for i, text in enumerate(texts) if done[i] < len(text)]
        active = [i for i in active if len(active) == 1 or data.draw(st.booleans())] or active[:1]
        counts = [min(data.draw(st.sampled_from([*EDGES, LONGEST])), len(texts[i]) - done[i]) for i in active]
        wanted = data.draw(st.sampled_from(["last", "all"]))
        found = engine.forward(
            [texts[i][done[i] : done[i] + n] for i, n in zip(active, counts, strict=True)],
            [caches[i] for i in active],
            wanted,
        )
        for i, n, rows in zip(active, counts, found, strict=True):
            done[i] += n
            assert_same(rows, logits[i][done[i] - len(rows) : done[i]])


@FORMAT
@MULTI_QUERY
@given(data=st.data())
@settings(max_examples=12)
def test_bits_depend_on_a_text_alone(name: str, multi_query: bool, data: st.DataObject) -> None:
    isa, threads = data.draw(st.sampled_from(module.isas()[1:] or module.isas())), data.draw(st.integers(1, 3))
    texts, logits = expected(name, multi_query, isa, LONGEST, 8)
    count = data.draw(st.integers(1, 8))
    lengths = [data.draw(st.one_of(st.sampled_from(EDGES), st.integers(1, LONGEST))) for _ in range(count)]
    cut = [text[:length] for text, length in zip(texts, lengths, strict=False)]
    run_in_steps(make_engine(name, multi_query, isa, threads), cut, logits, data)


@FORMAT
def test_bits_of_the_scalar_set_depend_on_a_text_alone(name: str) -> None:
    texts, logits = expected(name, True, "scalar", 40, 3)
    engine = make_engine(name, True, "scalar", 2)
    for found, wanted in zip(engine.forward(texts, None, "all"), logits, strict=True):
        assert_same(found, wanted)
    cache = engine.new_cache()
    for start, stop in ((0, 1), (1, 3), (3, 20), (20, 40)):
        assert_same(engine.forward([texts[0][start:stop]], [cache], "all")[0], logits[0][start:stop])


@FORMAT
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_are_the_same_across_the_rows_of_a_step(name: str, threads: int) -> None:
    length = ROWS_AT_ONCE + 90
    texts, logits = expected(name, True, module.isa(), length, 1, wide=True)
    engine = make_engine(name, True, module.isa(), threads, wide=True)
    for cuts in ([length], [1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, length], [33, 545, length]):
        cache, start = engine.new_cache(), 0
        for stop in cuts:
            assert_same(engine.forward([texts[0][start:stop]], [cache], "all")[0], logits[0][start:stop])
            start = stop
    assert_same(engine.forward([texts[0]], None, "last")[0], logits[0][-1:])
    short = texts[0][:7]
    for a, b in zip(
        engine.forward([short, texts[0], short], None, "all"), (logits[0][:7], logits[0], logits[0][:7]), strict=True
    ):
        assert_same(a, b)


def test_a_cache_cut_back_and_used_again_gives_the_same_bits() -> None:
    texts, logits = expected("Q8_0", True, module.isa(), LONGEST, 2)
    engine = make_engine("Q8_0", True, module.isa(), 2)
    cache = engine.new_cache()
    engine.forward([texts[1]], [cache])
    for keep in (130, 128, 5, 0):
        cache.truncate(0)
        engine.forward([texts[0]], [cache])
        cache.truncate(keep)
        assert_same(engine.forward([texts[0][keep:]], [cache], "all")[0], logits[0][keep:])


def test_threads_of_python_may_share_an_engine() -> None:
    texts, logits = expected("Q4_K", True, module.isa(), LONGEST, 8)
    engine = make_engine("Q4_K", True, module.isa(), 2)
    wrong: list[str] = []

    def work(i: int) -> None:
        for _ in range(5):
            cache, start = engine.new_cache(), 0
            for stop in (1, 30, 31, LONGEST):
                [found] = engine.forward([texts[i][start:stop]], [cache], "all")
                if found.tobytes() != logits[i][start:stop].tobytes():
                    wrong.append(f"text {i}, rows {start} to {stop}")
                start = stop

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


FORKS = """
import os, sys
import numpy as np
import starscope
model = starscope.load("demo", engine="native", threads=3)
ids = np.arange(70) % 2000
logits = model.engine.forward([ids], None, "all")[0] if sys.argv[1] == "used" else None
child = os.fork()
if child == 0:
    found = model.engine.forward([ids], None, "all")[0]
    if logits is None or found.tobytes() == logits.tobytes():
        again = starscope.load("demo", engine="native", threads=2).engine.forward([ids], None, "all")[0]
        print("child", again.tobytes() == found.tobytes(), flush=True)
    del model
    os._exit(0)
print("child ended with", os.waitpid(child, 0)[1])
found = model.engine.forward([ids], None, "all")[0]
print("parent", logits is None or found.tobytes() == logits.tobytes())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("before", ["used", "unused"])
def test_an_engine_works_in_a_forked_child_and_goes_on_in_the_parent(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, before], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["child True", "child ended with 0", "parent True"], done.stderr
