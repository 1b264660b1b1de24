"""`benches/infill.py`: its holes follow a fixed rule, and it counts as right what it says it does."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import starscope
from starscope.generate import Completion, Timings

TESTS = Path(__file__).parent
BENCH = TESTS.parent / "benches" / "infill.py"
HELD_OUT = sorted((TESTS / "data" / "held_out").glob("*.py"))

pytestmark = pytest.mark.skipif(not BENCH.is_file(), reason="the benches are not in a source distribution")


@pytest.fixture(scope="module")
def bench() -> SimpleNamespace:
    # A dataclass looks its module up by name.
    sys.modules["bench"] = SimpleNamespace()  # type: ignore[assignment]
    try:
        return SimpleNamespace(**runpy.run_path(str(BENCH), run_name="bench"))
    finally:
        del sys.modules["bench"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in HELD_OUT]


@pytest.mark.parametrize("kind", ["span", "rest"])
def test_every_hole_is_in_a_line_of_its_own_and_is_not_blank(bench, texts, kind):
    holes = bench.choose_holes(texts, kind, 400, seed=0)
    assert len(holes) == 400
    for hole in holes:
        assert hole.prefix + hole.middle + hole.suffix in texts
        assert hole.middle.strip()
        assert "\n" not in hole.middle
        line = hole.prefix.rpartition("\n")[2] + hole.middle + hole.suffix.partition("\n")[0]
        assert len("".join(line.split())) >= 8
        if kind == "span":
            assert 1 <= len(hole.middle) <= 24
        else:
            assert hole.suffix.partition("\n")[0].strip() == ""
            assert hole.prefix.rpartition("\n")[2].strip()
    assert len({(len(hole.prefix + hole.middle + hole.suffix), hole.prefix.count("\n")) for hole in holes}) == 400


def test_holes_depend_on_the_seed_and_the_text_alone(bench, texts):
    chosen = bench.choose_holes(texts, "span", 6, seed=0)
    assert bench.choose_holes(texts, "span", 400, seed=0)[:6] == chosen
    assert bench.choose_holes(texts, "span", 6, seed=1) != chosen
    assert [hole.middle for hole in chosen] == [
        "f __dir__", ".path", "e sure all children ", "all_queue.full()", "while", "system_site",
    ]  # fmt: skip


def test_fewer_lines_give_fewer_holes(bench):
    assert len(bench.choose_holes(["x = 1\n\nsome_name = 2\n    another_name = 3"], "rest", 100, seed=0)) == 2


@pytest.mark.parametrize(
    ("kind", "more", "finish", "right", "exact"),
    [
        ("span", "", "stop", True, True),
        ("span", " more", "stop", True, False),
        ("span", "", "length", True, False),
        ("rest", "", "stop", True, True),
        ("rest", " more", "stop", False, False),
        ("rest", "", "length", False, False),
    ],
)
def test_what_counts_as_right_is_the_same_with_the_suffix_and_without(bench, texts, kind, more, finish, right, exact):
    demo = starscope.load("demo")
    holes = [bench.shorten(demo, hole) for hole in bench.choose_holes(texts, kind, 5, seed=0)]

    class Knowing:
        """Gives what was hidden, and `more`."""

        tokenizer = demo.tokenizer

        def generate(self, prompt: Any, suffix: Any = None, **options: Any) -> Any:
            if isinstance(prompt, list):
                return [self.generate(one) for one in prompt]
            [middle] = [hole.middle for hole in holes if hole.prefix == prompt]
            return Completion(middle + more, [], finish, 1, Timings(0, 0, 0))

    for way in bench.WAYS.values():
        done = bench.complete(Knowing(), holes, bench.KINDS[kind], way)
        for hole, one in zip(holes, done, strict=True):
            assert bench.is_right(hole, one, bench.KINDS[kind]) is right
            assert bench.is_exact(hole, one) is exact
            assert not bench.is_right(hole, replace(one, text="?" + one.text), bench.KINDS[kind])


def test_the_document_has_both_kinds_and_every_way(bench, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["infill.py", "demo", str(HELD_OUT[0]), str(HELD_OUT[1]), "--holes", "3", "--json"]
    )
    bench.main()
    document = json.loads(capsys.readouterr().out)
    assert list(document["kinds"]) == ["span", "rest"]
    for found in document["kinds"].values():
        assert found["holes"] == 3
        assert list(found["ways"]) == ["psm", "spm", "prefix"]
        assert all(0 < found["ways"][way]["bits_per_byte"] < 30 for way in ("psm", "spm", "prefix"))
        assert len(found["pairs"]) == 2


def test_the_table_has_a_line_a_way(bench, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["infill.py", "demo", str(HELD_OUT[0]), "--holes", "2", "--kind", "span", "--order", "psm"]
    )
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 holes, a span of 1 to 24 characters inside of a line; ")
    assert [line.split()[0] for line in lines[2:4]] == ["psm", "prefix"]
