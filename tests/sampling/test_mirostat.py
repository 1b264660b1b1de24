"""Mirostat holds the surprise of the text at its target: the model's own surprise, measured before any cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope.sampling import Sampler, SamplingOptions, make_sampler
from support.logits import naive_surprises, zipf_logits

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def drawn_surprises(sampler: Sampler, rows: list[np.ndarray]) -> list[float]:
    """Bits of each token under the logits that the sampler was given."""
    return [naive_surprises(row.tolist())[sampler(row)] for row in rows]


@VERSIONS
@pytest.mark.parametrize("tau", [3.0, 4.0, 5.0])
def test_the_target_is_reached_on_zipfs_law(version: int, tau: float) -> None:
    rng = np.random.default_rng(1)
    rows = [
        rng.permutation(zipf_logits(slope, 2000)) for slope in rng.uniform(0.9, 1.3, 400)
    ]  # the best token has 2.6 bits, a mean over them
    found = drawn_surprises(make_sampler(SamplingOptions(mirostat=version, mirostat_tau=tau, seed=2)), rows)
    plain = drawn_surprises(make_sampler(SamplingOptions(temperature=1.0, seed=2)), rows)
    assert np.mean(found) == pytest.approx(tau, rel=0.1)
    assert np.mean(plain) > 1.2 * tau


@VERSIONS
def test_the_target_is_reached_on_the_demo_model(version: int) -> None:
    model, tau = starscope.load("demo", engine="numpy"), 3.0
    completion = model.generate(
        "def read_lines(path):\n",
        max_new_tokens=400,
        mirostat=version,
        mirostat_tau=tau,
        seed=5,
        logprobs=1,
        logit_bias=dict.fromkeys(model.tokenizer.stop_ids, -math.inf),
    )
    assert completion.logprobs is not None
    found = [-entry.logprob / math.log(2) for entry in completion.logprobs]
    assert len(found) == 400
    assert np.mean(found) == pytest.approx(tau, rel=0.1)


@VERSIONS
@given(st.lists(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20), max_size=8), st.integers(0, 99))
def test_mu_moves_against_the_error_and_never_below_zero(version: int, rows: list[list[float]], seed: int) -> None:
    sampler = make_sampler(SamplingOptions(mirostat=version, mirostat_tau=1.5, mirostat_eta=0.4, seed=seed))
    mu = 3.0
    for row in rows:
        assert sampler.mu == pytest.approx(mu, abs=1e-9)
        token = sampler(np.array(row, np.float32))
        mu = max(0.0, mu - 0.4 * (naive_surprises(row)[token] - 1.5))
    assert sampler.mu == pytest.approx(mu, abs=1e-9)


@VERSIONS
def test_when_every_candidate_is_above_mu_the_best_one_is_drawn(version: int) -> None:
    sampler = make_sampler(SamplingOptions(mirostat=version, mirostat_tau=0.25, mirostat_eta=0.0, seed=0))
    logits = np.linspace(0, 1, 64, dtype=np.float32)  # 5.4 bits at the least; mu is half a bit
    choices = [sampler.choose(logits) for _ in range(20)]
    assert {choice.token_id for choice in choices} == {63}
    assert {choice.candidates.ids.tolist() == [63] for choice in choices} == {True}


@VERSIONS
def test_temperature_zero_counts_as_one(version: int) -> None:
    rng = np.random.default_rng(3)
    rows = [rng.normal(0, 2, 200).astype(np.float32) for _ in range(50)]
    at_zero, at_one = (
        make_sampler(SamplingOptions(temperature=t, mirostat=version, mirostat_tau=3.0, seed=4)) for t in (0.0, 1.0)
    )
    tokens = [at_zero(row) for row in rows]
    assert tokens == [at_one(row) for row in rows]
    assert tokens != [int(row.argmax()) for row in rows]


@VERSIONS
def test_the_filters_of_the_chain_come_before_mirostats_own(version: int) -> None:
    logits = np.random.default_rng(5).normal(0, 1, 100).astype(np.float32)
    options = SamplingOptions(mirostat=version, mirostat_tau=100.0, mirostat_eta=0.0, top_k=7, seed=6)
    kept = make_sampler(options).choose(logits).candidates.ids
    assert kept.tolist() == sorted(np.argsort(-logits)[:7].tolist())


def test_before_any_token_mu_is_twice_the_target() -> None:
    assert make_sampler(SamplingOptions(mirostat=2, mirostat_tau=3.0)).mu == 6.0
