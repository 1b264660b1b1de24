"""Each filter of the chain against a naive reference, and the draw against its definition."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from starscope.errors import UsageError
from starscope.sampling import (
    Candidates,
    apply_logit_bias,
    apply_temperature,
    check_tokens,
    draw,
    keep_best,
    keep_min_p,
    keep_surprise,
    keep_top_k,
    keep_top_p,
    keep_typical,
    mirostat_top_k,
    most_likely,
    penalize,
    surprises,
    top_log_probabilities,
)
from support.logits import LOGITS, candidates, naive_probabilities, naive_surprises, ranked, zipf_logits

BIASES = st.dictionaries(st.integers(0, 39), st.sampled_from([-math.inf, -100.0, -1.5, 0.0, 2.0, 1e30]), max_size=40)


@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_k_best_and_of_equals_the_lowest_ids(logits: list[float], k: int) -> None:
    assert keep_top_k(candidates(logits), k).ids.tolist() == sorted(ranked(logits)[:k])


@given(LOGITS, st.floats(0, 1))
def test_top_p_keeps_the_fewest_best_that_reach_p(logits: list[float], p: float) -> None:
    kept = keep_top_p(candidates(logits), p).ids.tolist()
    order, probability = ranked(logits), naive_probabilities(logits)
    assert kept == sorted(order[: len(kept)])
    assert kept
    reached = math.fsum(probability[i] for i in kept)
    before = math.fsum(probability[i] for i in order[: len(kept) - 1])
    assert reached >= p - 1e-12
    assert len(kept) == 1 or before < p + 1e-12


@given(LOGITS, st.floats(0.0009765625, 1))
def test_min_p_keeps_those_at_least_p_times_as_likely_as_the_best(logits: list[float], p: float) -> None:
    kept = keep_min_p(candidates(logits), p).ids.tolist()
    ratio = [math.exp(x - max(logits)) for x in logits]
    assert kept == [i for i in range(len(logits)) if ratio[i] >= p]
    assert set(kept) >= {i for i in range(len(logits)) if logits[i] == max(logits)}


@given(LOGITS, st.floats(0, 1))
def test_typical_keeps_the_fewest_nearest_to_the_entropy_that_reach_p(logits: list[float], p: float) -> None:
    kept = keep_typical(candidates(logits), p).ids.tolist()
    probability, surprise = naive_probabilities(logits), naive_surprises(logits)
    entropy = math.fsum(q * s for q, s in zip(probability, surprise, strict=True) if q > 0)
    distance = [abs(s - entropy) for s in surprise]
    dropped = [i for i in range(len(logits)) if i not in kept]
    assert kept
    assert all(distance[i] <= distance[j] + 1e-12 for i in kept for j in dropped)
    assert all(i < j for i in kept for j in dropped if logits[i] == logits[j])
    reached = math.fsum(probability[i] for i in kept)
    last = min(probability[i] for i in kept if distance[i] >= max(distance[k] for k in kept) - 1e-12)
    assert reached >= p - 1e-12
    assert len(kept) == 1 or reached - last < p + 1e-12


def test_typical_may_leave_out_the_most_likely_token() -> None:
    probabilities = [0.3, *[0.7 / 32] * 32]  # entropy 4.4 bits; the best has 1.7, the others 5.5
    assert 0 not in keep_typical(candidates(np.log(probabilities).tolist()), 0.6).ids.tolist()


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])  # from nearly equals to a few that have nearly all
@pytest.mark.parametrize("p", [0.2, 0.9, 0.999])
def test_typical_finds_the_same_in_a_large_vocabulary_as_a_whole_sort(spread: float, p: float) -> None:
    logits = np.random.default_rng(6).normal(0, spread, 20_000).round(2)  # rounded: many equals
    these = Candidates(np.arange(20_000), logits)
    bits = surprises(these)
    order = np.argsort(np.abs(bits - (2**-bits * bits).sum()).round(9), kind="stable")
    count = int(np.searchsorted(np.cumsum(2 ** -bits[order]), p)) + 1
    assert keep_typical(these, p).ids.tolist() == sorted(order[:count].tolist())


@given(LOGITS, BIASES)
def test_a_bias_is_added_and_a_ban_is_final(logits: list[float], bias: dict[int, float]) -> None:
    bias = {token: addend for token, addend in bias.items() if token < len(logits)}
    expected = {i: x + bias.get(i, 0.0) for i, x in enumerate(logits) if x + bias.get(i, 0.0) > -math.inf}
    assume(expected)
    found = apply_logit_bias(candidates(logits), bias)
    assert dict(zip(found.ids.tolist(), found.logits.tolist(), strict=True)) == expected


def test_a_ban_of_every_token_leaves_the_models_best() -> None:
    assert apply_logit_bias(candidates([0.0, 2.0, 1.0]), dict.fromkeys(range(3), -math.inf)).ids.tolist() == [1]


def test_a_bias_on_a_token_that_there_is_not_is_refused() -> None:
    check_tokens({0: 1.0, 9: 1.0}, vocab_size=10)
    with pytest.raises(UsageError, match="token 10; the vocabulary ends at token 9"):
        check_tokens({3: 1.0, 10: 1.0}, vocab_size=10)


@given(
    LOGITS,
    st.lists(st.integers(0, 45), max_size=60),
    st.sampled_from([0.5, 1.0, 1.1, 30.0]),
    st.sampled_from([-1.0, 0.0, 0.75]),
    st.sampled_from([-0.25, 0.0, 0.5]),
)
def test_penalties_are_those_of_the_tokens_said(
    logits: list[float], said: list[int], repetition: float, presence: float, frequency: float
) -> None:
    counts = Counter(said)
    expected = [
        (x / repetition if x > 0 else x * repetition) - presence - frequency * counts[i] if i in counts else x
        for i, x in enumerate(logits)
    ]
    found = penalize(candidates(logits), said, repetition=repetition, presence=presence, frequency=frequency)
    assert found.ids.tolist() == list(range(len(logits)))
    assert found.logits.tolist() == expected


def test_penalties_find_their_tokens_among_few_candidates() -> None:
    few = Candidates(np.array([3, 7, 9]), np.zeros(3))
    found = penalize(few, [9, 1, 9, 8, 100, 3], repetition=1.0, presence=1.0, frequency=0.5)
    assert found.logits.tolist() == [-1.5, 0.0, -2.0]


@given(LOGITS, st.floats(-5, 50))
def test_mirostat_2_keeps_what_surprises_by_mu_at_most_and_the_best_when_nothing_does(
    logits: list[float], mu: float
) -> None:
    expected = [i for i, bits in enumerate(naive_surprises(logits)) if bits <= mu]
    assume(all(abs(bits - mu) > 1e-9 for bits in naive_surprises(logits)))
    assert keep_surprise(candidates(logits), mu).ids.tolist() == (expected or ranked(logits)[:1])


@given(LOGITS, st.floats(-50, 50))
def test_mirostat_1_keeps_one_at_least_and_all_at_most(logits: list[float], mu: float) -> None:
    assert 1 <= mirostat_top_k(candidates(logits), mu) <= len(logits)


@pytest.mark.parametrize("slope", [0.5, 0.9, 1.3, 2.0])
@pytest.mark.parametrize("mu", [1.0, 4.0, 8.0])
def test_mirostat_1_is_the_papers_formula_on_zipfs_law(slope: float, mu: float) -> None:
    count = 5000
    excess = slope - 1
    k = (excess * 2**mu / (1 - count**-excess)) ** (1 / slope)
    assert abs(mirostat_top_k(candidates(zipf_logits(slope, count).tolist()), mu) - min(max(k, 1), count)) <= 1


def test_mirostat_1_on_a_slope_of_one_is_the_limit_of_its_neighbours() -> None:
    one, beside = (mirostat_top_k(candidates(zipf_logits(s, 5000).tolist()), 6.0) for s in (1.0, 1.001))
    assert 7 == one == pytest.approx(beside, abs=1)  # 2 ** 6 / ln(5000)


@given(LOGITS, st.floats(1e-300, 1e300))
def test_any_temperature_keeps_the_order_and_the_best(logits: list[float], temperature: float) -> None:
    scaled = apply_temperature(candidates(logits), temperature).logits
    assert math.isfinite(scaled.max())
    assert not np.isnan(scaled).any()
    assert np.array_equal(np.argsort(-np.array(logits), kind="stable")[0], np.argmax(scaled))


@given(LOGITS, st.floats(0.1, 10))
def test_temperature_divides_the_logits(logits: list[float], temperature: float) -> None:
    scaled = apply_temperature(candidates(logits), temperature).logits
    np.testing.assert_allclose(scaled, [x / temperature for x in logits], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "strictest",
    [
        lambda these: apply_logit_bias(these, dict.fromkeys(range(40), -math.inf)),
        lambda these: keep_top_k(these, 1),
        lambda these: keep_top_p(these, 0.0),
        lambda these: keep_min_p(these, 1.0),
        lambda these: keep_typical(these, 0.0),
        lambda these: keep_surprise(these, -1.0),
        lambda these: keep_top_k(these, mirostat_top_k(these, -1e9)),
    ],
)
@given(logits=LOGITS)
def test_the_strictest_filter_leaves_one_that_can_be_drawn(strictest, logits: list[float]) -> None:
    kept = strictest(candidates(logits))
    assert len(kept.ids) >= 1
    assert logits[draw(kept, 0.5)] > -math.inf


@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_the_draw_is_the_inverse_of_the_cumulative_probability(logits: list[float], uniform: float) -> None:
    token = draw(candidates(logits), uniform)
    probability = naive_probabilities(logits)
    assert math.fsum(probability[:token]) <= uniform + 1e-12
    assert uniform < math.fsum(probability[: token + 1]) + 1e-12
    assert probability[token] > 0


def test_the_largest_uniform_number_draws_the_last_possible_token() -> None:
    assert draw(candidates([0.0, 1.0, -math.inf]), 1 - 2.0**-53) == 1


def test_the_most_likely_token_of_equals_is_the_first() -> None:
    assert most_likely(np.array([0, 3, 3], np.float32)) == 1
    assert keep_best(candidates([0, 3, 3])).ids.tolist() == [1]


@given(LOGITS)
def test_surprises_are_in_bits(logits: list[float]) -> None:
    np.testing.assert_allclose(surprises(candidates(logits)), naive_surprises(logits), rtol=1e-12, atol=1e-12)


@given(LOGITS, st.integers(1, 50), st.data())
def test_the_top_log_probabilities_are_sorted_and_name_possible_tokens_alone(
    logits: list[float], count: int, data: st.DataObject
) -> None:
    possible = [i for i in ranked(logits) if logits[i] > -math.inf]
    token = data.draw(st.sampled_from(possible))
    score, top = top_log_probabilities(candidates(logits), token, count)
    bits = naive_surprises(logits)
    assert [i for i, _ in top] == possible[:count]
    assert score == pytest.approx(-bits[token] * math.log(2), abs=1e-12)
    assert [x for _, x in top] == pytest.approx([-bits[i] * math.log(2) for i in possible[:count]], abs=1e-12)
