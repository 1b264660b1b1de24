"""The share of held-out text that is trained on too: against a count by hand, within bounded memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from starscope.train.documents import Passage, find_documents, survey
from starscope.train.leakage import LONGEST_LINE, SHORTEST_LINE, WORDS, Sketch, measure_leakage

FOX = "the quick brown fox jumps over the lazy dog and runs away into the deep dark wood\n"


def passages(folder: Path, texts: Sequence[str]) -> list[Passage]:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return survey(find_documents([folder])).passages


def numbered(start: int, lines: int, words: int = 8) -> str:
    """Lines that no other start has."""
    return "".join(" ".join(f"w{start + line}x{word}" for word in range(words)) + "\n" for line in range(lines))


def shares_by_hand(train: Sequence[str], held_out: Sequence[str]) -> tuple[float, float]:
    def lines(texts: Sequence[str]) -> list[str]:
        stripped = [line.strip() for text in texts for line in text.split("\n")]
        return [line for line in stripped if SHORTEST_LINE <= len(line) <= LONGEST_LINE]

    def grams(texts: Sequence[str]) -> list[tuple[str, ...]]:
        words = [re.findall(r"\w+", text.lower()) for text in texts]
        return [tuple(w[i : i + WORDS]) for w in words for i in range(len(w) - WORDS + 1)]

    found = []
    for items in (lines, grams):
        known, asked = set(items(train)), items(held_out)
        found.append(sum(item in known for item in asked) / len(asked))
    return found[0], found[1]


def test_the_shares_are_those_that_a_count_by_hand_gives(tmp_path):
    train = [numbered(0, 300) + FOX * 3 + numbered(300, 50), numbered(400, 100)]
    held_out = [numbered(90, 40) + FOX + "short\n", numbered(1000, 60) + FOX.upper() * 2 + numbered(405, 5)]
    found = measure_leakage(passages(tmp_path / "train", train), passages(tmp_path / "held", held_out))
    lines, grams = shares_by_hand(train, held_out)
    assert (found.line_share, found.gram_share) == pytest.approx((lines, grams))
    assert 0.3 < lines < 0.6
    assert 0.3 < grams < 0.6
    assert found.compared == 1


def test_text_of_its_own_leaks_nothing_and_the_same_text_everything(tmp_path):
    train, other = passages(tmp_path / "a", [numbered(0, 200)]), passages(tmp_path / "b", [numbered(500, 200)])
    assert (measure_leakage(train, other).line_share, measure_leakage(train, other).gram_share) == (0, 0)
    assert (measure_leakage(train, train).line_share, measure_leakage(train, train).gram_share) == (1, 1)


def test_runs_of_words_are_found_across_the_pieces_of_a_long_document_and_not_across_documents(tmp_path):
    text = numbered(0, 20_000, words=5)  # several pieces
    train = passages(tmp_path / "train", [text])
    found = measure_leakage(train, train)
    assert (found.lines, found.grams) == (text.count("\n"), 20_000 * 5 - WORDS + 1)
    assert found.gram_share == 1
    middle = text.index(" ", len(text) // 2)
    halves = passages(tmp_path / "halves", [text[:middle], text[middle:]])
    around = text[:middle].split()[-6:] + text[middle:].split()[:7]
    across = passages(tmp_path / "across", [" ".join(around)])
    assert measure_leakage(train, across).gram_share == 1
    assert measure_leakage(halves, across).gram_share == 0


def test_lines_are_compared_without_their_indentation_and_too_long_ones_not_at_all(tmp_path):
    line = "a line that is long enough to count"
    train = passages(tmp_path / "train", [line + "\r\n" + "x" * 200_000 + "\n" + "y" * 10_001])
    held_out = passages(tmp_path / "held", ["\t  " + line + "  \n" + "x" * 200_000 + "\n" + "y" * 10_001 + "\nz"])
    found = measure_leakage(train, held_out)
    assert (found.lines, found.line_share) == (1, 1)


def test_a_large_text_is_compared_in_evenly_spread_pieces_and_the_share_says_so(tmp_path):
    text = numbered(0, 20_000)
    train = passages(tmp_path / "train", [text])
    found = measure_leakage(train, train, most_bytes=len(text) // 4)
    assert found.compared == 0.25
    assert found.line_share == 1  # the same pieces of both
    held_out = passages(tmp_path / "held", [numbered(0, 500)])
    some = measure_leakage(train, held_out, most_bytes=len(text) // 4)
    assert 0 <= some.line_share <= 1


def test_a_sketch_keeps_few_hashes_and_its_share_stays_near_the_true_one():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 50_000, np.uint64)
    sketch = Sketch(most=2000)
    for part in np.split(np.concatenate([values, values[:25_000]]), 15):
        sketch.add(part)
    assert len(sketch._values) <= 2000
    for part in np.split(np.concatenate([values[:10_000], rng.integers(0, 2**64, 10_000, np.uint64)]), 4):
        sketch.look_for(part)
    assert sketch.share == pytest.approx(20_000 / 75_000, abs=0.04)


def test_a_sketch_of_nothing_has_no_share():
    sketch = Sketch()
    sketch.look_for(np.arange(5, dtype=np.uint64))
    assert (sketch.count, sketch.share) == (0, 0.0)
