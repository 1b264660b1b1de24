"""What is timed is what is said to be, with the right history before it; what cannot be measured is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import starscope
from starscope import bench as module
from starscope.bench import BenchResult, bench, peak_rss_bytes, read_bandwidth, weight_bytes
from starscope.convert import convert
from starscope.errors import ContextOverflowError, UsageError
from starscope.gguf.reader import read_gguf
from starscope.quantize import quantize
from support.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 128 positions."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return convert(folder, folder / "model.gguf", to="f16").out


class Recorded:
    """The steps that an engine ran: for each, the tokens of every sequence and what its cache held before."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[list[tuple[list[int], list[int]]]] = []
        self._forward = engine.forward
        engine.forward = self.forward

    def forward(self, sequences: Any, caches: Any = None, wanted: str = "last") -> Any:
        assert wanted == "last"
        self.steps.append([(np.asarray(s).tolist(), list(c.ids)) for s, c in zip(sequences, caches, strict=True)])
        return self._forward(sequences, caches, wanted)

    def lengths(self) -> list[tuple[list[int], list[int]]]:
        """New tokens and tokens before, of every sequence of every step."""
        return [([len(new) for new, _ in step], [len(before) for _, before in step]) for step in self.steps]


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_every_figure_is_there_and_positive(engine: str, path: Path) -> None:
    found = bench(starscope.load(path, engine=engine), prompt=9, steps=4, depths=(5, 0), batches=(3, 1), repeat=2)
    assert isinstance(found, BenchResult)
    assert list(found.prefill_tok_s) == list(found.decode_tok_s) == [5, 0]
    assert list(found.batch_tok_s) == [3, 1]
    assert found.decode_read_share is not None
    speeds = (found.prefill_tok_s, found.decode_tok_s, found.batch_tok_s, found.decode_read_share)
    assert all(speed > 0 for by_key in speeds for speed in by_key.values())
    assert found.load_s > 0
    assert found.read_gb_s is not None
    assert found.read_gb_s > 0.01


def test_each_repeat_finds_the_depth_and_nothing_else_in_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 16)
    model = starscope.load(path)
    recorded = Recorded(model.engine)
    bench(model, prompt=7, steps=3, depths=(40, 0, 20), batches=(2,), repeat=2)
    steps = recorded.lengths()[2:]  # behind the two that warm up

    def at(depth: int) -> list[tuple[list[int], list[int]]]:
        once = [([7], [depth]), *(([1], [depth + i]) for i in range(3))]
        return once * 2

    filled = {20: [([16], [0]), ([4], [16])], 40: [([16], [20]), ([4], [36])]}
    together = [([1, 1], [i, i]) for i in range(3)] * 2
    assert steps == [*at(0), *filled[20], *at(20), *filled[40], *at(40), *together]


def test_the_tokens_before_are_the_same_in_every_repeat_and_the_seed_decides_them(path: Path) -> None:
    model = starscope.load(path)
    recorded = Recorded(model.engine)
    runs = []
    for seed in (0, 0, 1):
        recorded.steps.clear()
        bench(model, prompt=3, steps=2, depths=(6,), batches=(2,), repeat=2, seed=seed)
        runs.append(list(recorded.steps))
    assert runs[0] == runs[1] != runs[2]
    [(prompt, before)], [(again, before_again)] = (step for step in runs[0] if len(step[0][0]) == 3)
    assert (prompt, before) == (again, before_again)
    assert len(before) == 6
    one, other = runs[0][-1]
    assert one != other  # each sequence has tokens of its own


def test_only_the_steps_are_timed_and_the_median_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that a step moves by 1 s a row, and 1000 s for one row in the second of three repeats."""
    model = starscope.load(path)
    now, steps = 0.0, 0

    def forward(sequences: Any, caches: Any, wanted: str = "last") -> Any:
        nonlocal now, steps
        rows = sum(map(len, sequences))
        now += rows + (1000 if caches[0].length == 10 and steps == 1 else 0)
        for sequence, cache in zip(sequences, caches, strict=True):
            cache.advance(None, len(sequence))
        return []

    def truncate(cache: Any, length: int) -> None:
        nonlocal now, steps
        now, steps = now + 500, steps + 1
        cache.length = length

    monkeypatch.setattr(model.engine, "forward", forward)
    monkeypatch.setattr("starscope.cache.Cache.truncate", truncate)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(module, "read_bandwidth", lambda threads: 1e9)
    found = bench(model, prompt=8, steps=4, depths=(10,), batches=(3,), repeat=3)
    assert found.prefill_tok_s == {10: 1.0}
    assert found.decode_tok_s == {10: 1.0}
    assert found.batch_tok_s == {3: 1.0}
    assert found.decode_read_share == {10: weight_bytes(model) / 1e9}


@pytest.mark.parametrize(("wrong", "said"), [
    ({"prompt": 0}, "the prompt is 0; expected a whole number, 1 or more."),
    ({"prompt": True}, "the prompt is True"),
    ({"steps": -1}, "the number of steps is -1"),
    ({"steps": 2.0}, "the number of steps is 2.0"),
    ({"depths": (0, -1)}, "a depth is -1; expected a whole number, 0 or more."),
    ({"depths": ()}, "there is no depth to measure"),
    ({"batches": ()}, "there is no batch size to measure"),
    ({"batches": (0,)}, "a batch size is 0; expected a whole number, 1 to 1024."),
    ({"batches": (1025,)}, "a batch size is 1025"),
    ({"repeat": 0}, "repeat is 0; expected a whole number, 1 to 1000."),
])  # fmt: skip
def test_numbers_that_nothing_can_be_measured_with_are_refused(wrong: dict[str, Any], said: str, path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bench(starscope.load(path), **wrong)
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(("sizes", "said"), [
    ({"prompt": 129}, "depth 0 and a prompt of 129 tokens need 129 positions; the context has 128."),
    ({"prompt": 28, "steps": 4, "depths": (101,)}, "depth 101 and a prompt of 28 tokens need 129 positions"),
    ({"prompt": 4, "steps": 28, "depths": (0, 101)}, "depth 101 and decoding 28 tokens need 129 positions"),
    ({"prompt": 10**30}, f"depth 0 and a prompt of {10**30} tokens"),
])  # fmt: skip
def test_a_depth_past_the_context_is_refused_before_anything_runs(sizes: Any, said: str, path: Path) -> None:
    model = starscope.load(path)
    recorded = Recorded(model.engine)
    with pytest.raises(ContextOverflowError) as caught:
        bench(model, **sizes)
    assert caught.value.message.startswith(said)
    assert recorded.steps == []


def test_a_depth_may_end_with_the_context(path: Path) -> None:
    found = bench(starscope.load(path), prompt=28, steps=28, depths=(100,), repeat=1)
    assert set(found.prefill_tok_s) == {100}


def test_the_bytes_of_a_decoded_token_are_those_of_the_files_matrices_and_vectors(path: Path, tmp_path: Path) -> None:
    small = quantize(path, tmp_path / "small.gguf", to="q8_0").out
    for file in (path, small):
        with read_gguf(file) as read:
            sizes = {name: read.raw(name).nbytes for name in read.tensors}
        tied = "output.weight" not in sizes
        whole = sum(sizes.values()) - sizes["position_embd.weight"] - (0 if tied else sizes["token_embd.weight"])
        assert weight_bytes(starscope.load(file)) == whole


def test_the_peak_is_that_of_the_system() -> None:
    before = peak_rss_bytes()
    assert before is not None
    held = np.ones(1 << 23)
    after = peak_rss_bytes()
    assert after is not None
    assert after >= before
    assert after >= held.nbytes


def test_a_system_that_does_not_tell_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert peak_rss_bytes() is None


def test_the_read_loop_reads_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert read_bandwidth(3, size=8 * 1000) == 8 * 1000  # a second a pass


def test_nothing_is_said_of_bandwidth_off_the_cpu(path: Path) -> None:
    model = starscope.load(path)
    model.engine.device = "cuda"
    found = bench(model, prompt=2, steps=1, repeat=1)
    assert found.read_gb_s is None
    assert found.decode_read_share is None


def test_progress_is_told_what_comes_next(path: Path) -> None:
    told: list[str] = []
    bench(starscope.load(path), prompt=2, steps=1, depths=(0, 3), batches=(2,), repeat=1, progress=told.append)
    assert told == [
        "loading",
        "filling the cache to depth 0",
        "prefill at depth 0, 1 of 1",
        "decode at depth 0, 1 of 1",
        "filling the cache to depth 3",
        "prefill at depth 3, 1 of 1",
        "decode at depth 3, 1 of 1",
        "decode of 2 together, 1 of 1",
        "read bandwidth",
    ]
