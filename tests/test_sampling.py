"""The sampler chain: each filter against a naive reference, the draw against its distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import InvalidContentError, UsageError
from starscope.sampling import (
    Candidates,
    SamplingOptions,
    apply_temperature,
    draw,
    every_token,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_probabilities,
    make_sampler,
    most_likely,
)

# Few distinct values, so that ties are common; -inf is a token that something forbade.
LOGITS = st.lists(
    st.sampled_from([-math.inf, -90.0, -3.5, -1.0, 0.0, 0.25, 1.0, 2.0, 30.0]), min_size=1, max_size=40
).filter(lambda values: max(values) > -math.inf)


def ranked(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def naive_probabilities(logits: list[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def candidates(logits: list[float]) -> Candidates:
    return every_token(np.array(logits, np.float32))


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


@given(LOGITS, st.floats(1e-300, 1e300))
def test_any_temperature_keeps_the_order_and_the_best(logits: list[float], temperature: float) -> None:
    scaled = apply_temperature(candidates(logits), temperature).logits
    assert math.isfinite(scaled.max())
    assert not np.isnan(scaled).any()
    assert np.array_equal(np.argsort(-np.array(logits), kind="stable")[0], np.argmax(scaled))


@given(
    LOGITS, st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**64)
)
def test_no_filter_empties_the_candidates_and_a_forbidden_token_is_never_drawn(
    logits: list[float], k: int, p: float, min_p: float, seed: int
) -> None:
    sample = make_sampler(SamplingOptions(0.7, k, p, min_p, seed))
    token = sample(np.array(logits, np.float32))
    assert logits[token] > -math.inf


@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_the_draw_is_the_inverse_of_the_cumulative_probability(logits: list[float], uniform: float) -> None:
    token = draw(candidates(logits), uniform)
    probability = naive_probabilities(logits)
    assert math.fsum(probability[:token]) <= uniform + 1e-12
    assert uniform < math.fsum(probability[: token + 1]) + 1e-12
    assert probability[token] > 0


def test_the_largest_uniform_number_draws_the_last_possible_token() -> None:
    assert draw(candidates([0.0, 1.0, -math.inf]), 1 - 2.0**-53) == 1


@given(LOGITS)
def test_temperature_zero_takes_the_largest_logit_with_the_lowest_id(logits: list[float]) -> None:
    assert make_sampler(SamplingOptions())(np.array(logits, np.float32)) == ranked(logits)[0]


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=1.0, seed=0)])
@pytest.mark.parametrize("logits", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_are_refused(options: SamplingOptions, logits: list[float]) -> None:
    with pytest.raises(InvalidContentError, match="finite"):
        make_sampler(options)(np.array(logits, np.float32))


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = np.random.default_rng(1).standard_normal((200, 50)).astype(np.float32)

    def tokens(seed: int | None) -> list[int]:
        sample = make_sampler(SamplingOptions(temperature=1.0, top_k=20, seed=seed))
        return [sample(row) for row in logits]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


def test_the_numbers_of_a_seed_are_fixed_for_ever() -> None:
    sample = make_sampler(SamplingOptions(temperature=1.0, seed=1234))
    assert [sample(np.zeros(1000, np.float32)) for _ in range(8)] == GOLDEN


GOLDEN = [976, 380, 923, 261, 319, 118, 241, 318]


def test_logits_that_differ_in_the_last_bits_draw_the_same_tokens() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((300, 4096)).astype(np.float32)
    nearby = logits * (1 + rng.integers(-8, 9, logits.shape).astype(np.float32) * np.float32(2.0**-23))
    options = SamplingOptions(temperature=0.8, top_k=200, top_p=0.9, min_p=0.01, seed=3)
    one, other = make_sampler(options), make_sampler(options)
    assert [one(row) for row in logits] == [other(row) for row in nearby]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (SamplingOptions(temperature=1.0, seed=11), 8),
        (SamplingOptions(temperature=0.5, seed=12), 8),
        (SamplingOptions(temperature=2.0, top_k=5, seed=13), 5),
        (SamplingOptions(temperature=1.0, top_p=0.8, seed=14), 4),
        (SamplingOptions(temperature=1.0, min_p=0.2, seed=15), 4),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(options: SamplingOptions, allowed: int) -> None:
    logits = np.array([1.5, -1.0, 0.5, 2.0, 0.0, -0.5, 1.0, -2.0], np.float32)
    best = ranked(logits.tolist())[:allowed]
    weights = np.array([math.exp(x / options.temperature) if i in best else 0.0 for i, x in enumerate(logits.tolist())])
    draws = 20_000
    expected = draws * weights / weights.sum()
    sample = make_sampler(options)
    counts = np.bincount([sample(logits) for _ in range(draws)], minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < CHI_SQUARE_999[allowed - 1]


CHI_SQUARE_999 = {3: 16.27, 4: 18.47, 7: 24.32}  # degrees of freedom -> the value passed once in a thousand


@settings(max_examples=50)
@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30))
def test_log_probabilities_are_those_of_the_softmax(logits: list[float]) -> None:
    found = log_probabilities(np.array(logits, np.float32))
    best = max(logits)
    norm = best + math.log(math.fsum(math.exp(x - best) for x in logits))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [x - norm for x in logits], rtol=4 * 2.0**-23, atol=4 * 2.0**-23 * 80)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, r"top_k is 1\.5"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_option_out_of_range_is_refused_with_what_was_found_and_expected(wrong: dict[str, float], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        SamplingOptions(**wrong)
    assert "expected" in caught.value.message


def test_the_most_likely_token_of_equals_is_the_first() -> None:
    assert most_likely(np.array([0, 3, 3], np.float32)) == 1
