"""Comparing with a peer: each side in a process of its own, in turns, and a ratio that is the median of the rounds'."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PEERS = Path(__file__).parent.parent / "benches" / "peers"
FAKE = f"""
    import sys, time
    sys.path.insert(0, {str(PEERS)!r})
    from side_by_side import serve

    class Side:
        def __init__(self):
            print("a library says hello on stdout")
            self.calls = 0
        def about(self):
            return {{"name": sys.argv[2], "vocab_size": 1000}}
        def prefill(self, ids):
            self.calls += 1
            return float(self.calls * len(ids))
        def spin(self):
            began = time.perf_counter()
            while time.perf_counter() - began < 0.3: pass
        def fail(self):
            raise ValueError("as asked")

    serve(Side)
"""


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PEERS))
    import side_by_side

    return side_by_side  # type: ignore[no-any-return]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return str(path)


def test_both_sides_take_turns_and_the_ratio_is_the_median_of_the_rounds(side_by_side: Any, script: str) -> None:
    order = []

    def measure(side: Any) -> float:
        order.append(side.about["name"])
        return float(side.call("prefill", [1, 2] if side.about["name"] == "a" else [1]))

    with (
        side_by_side.Worker(sys.executable, script, "a") as ours,
        side_by_side.Worker(sys.executable, script, "b") as theirs,
    ):
        theirs.call("prefill", [1])
        row = side_by_side.in_turns("some", "tok/s", 3, measure, ours, theirs)
        assert ours.call("peak_rss") > 1 << 20
    assert order == ["a", "b"] * 3
    assert row.rounds == [(2.0, 2.0), (4.0, 3.0), (6.0, 4.0)]
    assert (row.ours, row.theirs, row.ratio) == (4.0, 3.0, 4 / 3)
    assert side_by_side.row_of("", "", [(1.0, 1.0), (1.0, 4.0), (9.0, 10.0)]).ratio == 0.9  # the medians' is 0.25


def test_a_side_that_waits_uses_no_processor_time_and_one_that_works_does(side_by_side: Any, script: str) -> None:
    with (
        side_by_side.Worker(sys.executable, script, "a") as ours,
        side_by_side.Worker(sys.executable, script, "b") as theirs,
    ):
        assert side_by_side.idle_share(theirs, lambda: time.sleep(0.3)) < side_by_side.MOST_IDLE
        assert side_by_side.idle_share(ours, lambda: ours.call("spin")) > side_by_side.MOST_IDLE


def test_a_side_that_ends_is_named(side_by_side: Any, script: str) -> None:
    with side_by_side.Worker(sys.executable, script, "a") as ours:
        with pytest.raises(SystemExit, match=r"fake\.py --worker a ended with status 1"):
            ours.call("fail")
        with pytest.raises(SystemExit, match="ended with status 1"):
            ours.call("prefill", [1])


def test_sides_that_compute_something_else_are_not_compared(side_by_side: Any) -> None:
    near = side_by_side.check_agreement([1.0, -10.0, 3.0], [1.1, -10.0, 2.9])
    assert near["same_token"] is True
    assert near["largest_relative_difference"] == pytest.approx(0.01)
    assert side_by_side.check_agreement([3.0, 2.9, 5e-1], [2.9, 3.0, 5e-1])["same_token"] is False
    with pytest.raises(SystemExit, match="do not compute the same"):
        side_by_side.check_agreement([1.0, -10.0, 3.0], [1.0, -7.0, 3.0])


def test_starscopes_side_leaves_its_cache_as_it_was(side_by_side: Any, tmp_path: Path) -> None:
    from starscope.convert import convert
    from support.checkpoints import make_checkpoint

    make_checkpoint(tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", to="f32").out
    side = side_by_side.Starscope(str(path), "numpy", 1)
    ids = side_by_side.token_ids(side.model.vocab_size, 30)
    side.fill(ids[:20])
    assert side.cache.ids == ids[:20]
    assert min(side.prefill(ids[20:]), side.decode(ids[20:24]), side.batch([[1, 2], [3, 4]])) > 0
    assert side.cache.ids == ids[:20]
    for count in (25, 10, 0):
        side.fill(ids[:count])
        assert side.cache.ids == ids[:count]
    assert len(side.logits(ids)) == side.model.vocab_size


def test_a_bench_named_like_a_package_does_not_hide_it(side_by_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(PEERS), *sys.path])
    monkeypatch.delitem(sys.modules, "ctranslate2", raising=False)
    try:
        found = side_by_side.installed("ctranslate2").__file__
    except ModuleNotFoundError:  # it is not installed here, and the file beside was not taken for it
        return
    assert Path(found).parent != PEERS


def test_a_table_is_aligned_and_says_where_less_is_better(side_by_side: Any) -> None:
    rows = [
        side_by_side.row_of("prefill 512 at depth 0", "tok/s", [(1200.0, 600.0)]),
        side_by_side.row_of("load", "s", [(0.5, 1.0)]),
    ]
    assert side_by_side.table("title", ["ours", "theirs"], rows) == (
        "title\n"
        "                        ours  theirs  ratio\n"
        "prefill 512 at depth 0  1200     600   2.00  tok/s\n"
        "load                     0.5       1   0.50  s (less is better)\n"
    )
