"""Fill-in-the-middle: pieces rejoin, middles survive, and chance depends on the place alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import UsageError
from starscope.train.fim import FillInTheMiddle, FimIds, cut_to_fit, draw
from support.training import DOCUMENTS, tiny_bpe, tiny_ids

IDS = FimIds.of(tiny_bpe())
LENGTH = 97


def transform(rate: float = 1.0, spm_rate: float = 0.5, seed: int = 0) -> FillInTheMiddle:
    return FillInTheMiddle(tiny_bpe(), IDS, seed=seed, rate=rate, spm_rate=spm_rate)


def sample(start: int) -> np.ndarray:
    return np.resize(tiny_ids(), start + LENGTH)[start:].astype(np.int64)


def fragments(ids: np.ndarray) -> list[list[int]]:
    """The runs of tokens between ends of text, padding dropped."""
    kept = [int(i) for i in ids if i != IDS.pad]
    runs: list[list[int]] = [[]]
    for token in kept:
        if token == IDS.end_of_text:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run]


def pieces(run: list[int]) -> tuple[str, str, str]:
    """Prefix, middle and suffix of a moved fragment, by its form."""
    bpe = tiny_bpe()
    suffix, middle = run.index(IDS.suffix), run.index(IDS.middle)
    assert run[0] == IDS.prefix
    assert 0 < suffix < middle
    if suffix == 1:  # SPM: the prefix and the middle follow one another
        return "", bpe.decode(run[middle + 1 :]), bpe.decode(run[2:middle])
    return bpe.decode(run[1:suffix]), bpe.decode(run[middle + 1 :]), bpe.decode(run[suffix + 1 : middle])


@given(st.integers(0, 200), st.integers(0, 1000), st.sampled_from([0.0, 1.0]))
def test_pieces_rejoin_to_the_document_and_only_its_far_ends_are_cut(start, index, spm_rate):
    before = sample(start)
    after = transform(spm_rate=spm_rate)(before, 0, index)
    assert after.shape == before.shape
    texts = [tiny_bpe().decode(run) for run in fragments(before)]
    runs = fragments(after)
    assert len(runs) == len(texts)
    for text, run in zip(texts, runs, strict=True):
        if run[0] != IDS.prefix:
            assert tiny_bpe().decode(run) == text
            continue
        prefix, middle, suffix = pieces(run)
        if "\ufffd" not in prefix + middle + suffix:  # a cut by tokens may go through a character
            assert prefix + middle + suffix in text


def test_the_whole_middle_survives_and_is_followed_by_the_end_of_text():
    moved = 0
    for index in range(200):
        before = sample(index)
        after = transform(spm_rate=0.0)(before, 1, index)
        text = tiny_bpe().decode(fragments(before)[0])
        run = fragments(after)[0]
        if run[0] == IDS.prefix:
            moved += 1
            number = int(before[0] == IDS.end_of_text)  # an empty fragment before it counts
            first, second = draw(0, 1, index, number, length=len(text), rate=1.0, spm_rate=0.0).cuts
            assert pieces(run)[1] == text[first:second]
            assert after[number + len(run)] == IDS.end_of_text
    assert moved > 150


def test_decisions_do_not_depend_on_the_order_of_samples():
    one, other = transform(0.5), transform(0.5)
    forwards = [one(sample(i), 2, i) for i in range(40)]
    backwards = [other(sample(i), 2, i) for i in reversed(range(40))][::-1]
    assert all((a == b).all() for a, b in zip(forwards, backwards, strict=True))
    assert any((one(sample(i), 3, i) != forwards[i]).any() for i in range(40))


def test_half_of_the_fragments_move_and_half_of_those_are_spm():
    draws = [draw(0, 0, i, 0, length=100, rate=0.5, spm_rate=0.5) for i in range(4000)]
    moved = [d for d in draws if d.move]
    assert abs(len(moved) / len(draws) - 0.5) < 0.03
    assert abs(sum(d.spm for d in moved) / len(moved) - 0.5) < 0.04
    cuts = {cut for d in draws for cut in d.cuts}
    assert {0, 100} <= cuts <= set(range(101))  # both ends included


def test_rate_zero_changes_nothing():
    before = sample(5)
    assert transform(rate=0.0)(before, 0, 0) is before


def test_special_tokens_that_a_text_spells_stay_text():
    ids = np.array([*tiny_bpe().encode("a = '<fim_suffix>' + '<|endoftext|>'\n" * 3), IDS.end_of_text])
    for index in range(20):
        after = transform()(ids, 0, index)
        assert (after == IDS.end_of_text).sum() == 1
        assert (after == IDS.suffix).sum() <= 1


def test_far_ends_are_cut_in_proportion():
    assert cut_to_fit([1, 2, 3, 4], [5, 6, 7, 8], 4) == ([3, 4], [5, 6])
    assert cut_to_fit([], [5, 6, 7, 8], 3) == ([], [5])
    assert cut_to_fit([1, 2], [3], 0) == ([1, 2], [3])
    assert cut_to_fit([1, 2], [3], 3) == ([], [])


def test_rates_are_probabilities():
    with pytest.raises(UsageError, match="expected probabilities"):
        transform(rate=1.5)


def test_documents_are_made_of_whole_characters():
    assert all(tiny_bpe().decode(tiny_bpe().encode(text)) == text for text in DOCUMENTS)
