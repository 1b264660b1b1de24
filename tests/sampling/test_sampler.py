"""The chain: its order, what a sampler remembers, the tokens of a seed and their distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope.engine import ENGINES
from starscope.errors import InvalidContentError, UsageError
from starscope.model import find_model
from starscope.quantize import quantize
from starscope.sampling import (
    SAMPLERS,
    Candidates,
    SamplingOptions,
    apply_logit_bias,
    apply_temperature,
    chain,
    describe,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    make_sampler,
    penalize,
)
from support.logits import CHI_SQUARE_999, LOGITS, candidates, ranked

EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "penalty_window": 5,
    "logit_bias": {0: -math.inf, 3: 1.5},
    "seed": 3,
}
PROMPT = [1, 2, 2, 4, 4, 4, 9]


def one_by_one(logits: list[float], order: tuple[str, ...], window: list[int]) -> Candidates:
    """EVERYTHING but the draw, written out."""
    steps = {
        "penalties": lambda c: penalize(c, window, repetition=1.2, presence=0.1, frequency=0.2),
        "temperature": lambda c: apply_temperature(c, 0.8),
        "top_k": lambda c: keep_top_k(c, 30),
        "top_p": lambda c: keep_top_p(c, 0.9),
        "min_p": lambda c: keep_min_p(c, 0.01),
        "typical_p": lambda c: keep_typical(c, 0.95),
    }
    these = apply_logit_bias(candidates(logits), {0: -math.inf, 3: 1.5})
    for name in order:
        these = steps[name](these)
    return these


@given(st.lists(st.floats(-20, 20, width=32), min_size=10, max_size=60), st.permutations(SAMPLERS), st.booleans())
def test_the_steps_run_in_the_order_chosen_after_the_bias(logits: list[float], order: list[str], text: bool) -> None:
    samplers = ", ".join(order) if text else order
    sampler = make_sampler(SamplingOptions(**EVERYTHING, samplers=samplers), PROMPT)
    found = sampler.choose(np.array(logits, np.float32)).candidates
    expected = one_by_one(logits, tuple(order), PROMPT[-5:])
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logits.tolist() == expected.logits.tolist()


def test_the_chain_says_its_steps_in_order_and_leaves_out_those_that_do_nothing() -> None:
    assert chain(SamplingOptions()) == []
    assert chain(SamplingOptions(**EVERYTHING)) == ["logit_bias", *SAMPLERS]
    assert chain(SamplingOptions(temperature=1.0, top_p=0.5)) == ["top_p"]
    assert chain(SamplingOptions(temperature=0.5, top_p=0.5, samplers="top_p,temperature")) == ["top_p", "temperature"]
    assert chain(SamplingOptions(**{**EVERYTHING, "temperature": 0})) == ["logit_bias", "penalties"]


def test_the_chain_reads_as_one_line() -> None:
    assert describe(SamplingOptions()) == "the most likely"
    assert describe(SamplingOptions(temperature=0.5, top_k=4, samplers="top_k,temperature", seed=7)) == (
        "top_k 4 → temperature 0.5 → draw (seed 7)"
    )
    assert describe(SamplingOptions(mirostat=2, logit_bias={1: 0.5}, presence_penalty=0.5)) == (
        "logit_bias of 1 → penalties (repetition 1, presence 0.5, frequency 0, window 64) → "
        "mirostat 2 (tau 5, eta 0.1) (fresh seed)"
    )


def test_the_penalties_see_the_last_tokens_of_prompt_and_text() -> None:
    options = SamplingOptions(presence_penalty=10.0, penalty_window=3)
    sampler = make_sampler(options, [0, 1])
    logits = np.array([5, 4, 3, 2, 1], np.float32)
    # 0 and 1 are the prompt's; each token chosen pushes one out of the window of three.
    assert [sampler(logits) for _ in range(6)] == [2, 3, 0, 1, 2, 3]
    assert list(sampler.window) == [1, 2, 3]


def test_generating_feeds_the_penalties_with_prompt_and_text() -> None:
    model, prompt = starscope.load("demo", engine="numpy"), "def f(x):\n    if "
    completion = model.generate(prompt, max_new_tokens=40, presence_penalty=1e30, penalty_window=1000)
    said = model.tokenizer.encode(prompt)
    assert set(completion.token_ids).isdisjoint(said)
    assert len(set(completion.token_ids)) == len(completion.token_ids) > 5


def test_a_window_of_no_tokens_penalizes_none() -> None:
    sampler = make_sampler(SamplingOptions(presence_penalty=10.0, penalty_window=0), [0, 1])
    assert [sampler(np.array([5, 4, 3], np.float32)) for _ in range(3)] == [0, 0, 0]


def test_a_long_prompt_counts_by_its_end() -> None:
    sampler = make_sampler(SamplingOptions(presence_penalty=10.0), [0] * 100 + [1] * 64)
    assert sampler(np.array([5, 5, 3], np.float32)) == 0


@given(LOGITS)
def test_temperature_zero_takes_the_largest_logit_with_the_lowest_id(logits: list[float]) -> None:
    filters = {"top_k": 3, "top_p": 0.1, "typical_p": 0.01, "min_p": 0.5}
    for options in (SamplingOptions(), SamplingOptions(**filters)):
        choice = make_sampler(options).choose(np.array(logits, np.float32))
        assert choice.candidates.ids.tolist() == [choice.token_id] == ranked(logits)[:1]


def test_bias_and_penalties_hold_at_temperature_zero() -> None:
    logits = np.array([3.0, 2.5, 2.0], np.float32)
    assert make_sampler(SamplingOptions(logit_bias={0: -math.inf}))(logits) == 1
    assert make_sampler(SamplingOptions(logit_bias={2: 1.5}))(logits) == 2
    assert make_sampler(SamplingOptions(repetition_penalty=2.0), [0, 1])(logits) == 2


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.7, 1e30]),
        "top_k": st.integers(0, 3),
        "top_p": st.sampled_from([0.0, 0.1, 1.0]),
        "min_p": st.sampled_from([0.0, 0.5, 1.0]),
        "typical_p": st.sampled_from([0.0, 0.2, 1.0]),
        "mirostat": st.integers(0, 2),
        "mirostat_tau": st.sampled_from([0.0, 0.1, 5.0]),
        "mirostat_eta": st.sampled_from([0.0, 0.1, 30.0]),
        "repetition_penalty": st.sampled_from([1e-30, 1.0, 1.3, 1e30]),
        "presence_penalty": st.sampled_from([-1e30, 0.0, 1e30]),
        "frequency_penalty": st.sampled_from([-1e30, 0.0, 1e30]),
        "logit_bias": st.dictionaries(st.just(0), st.sampled_from([-math.inf, -1e30, 1e30])),
        "samplers": st.permutations(SAMPLERS),
        "seed": st.integers(0, 2**64),
    }
)


@given(LOGITS, OPTIONS, st.lists(st.integers(0, 40), max_size=8))
def test_no_chain_empties_the_candidates_and_a_forbidden_token_is_never_drawn(
    logits: list[float], options: dict[str, Any], prompt: list[int]
) -> None:
    sampler = make_sampler(SamplingOptions(**options), prompt)
    banned = options["logit_bias"].get(0) == -math.inf
    for _ in range(3):
        token, kept = sampler.choose(np.array(logits, np.float32))
        assert token in kept.ids.tolist()
        assert np.isfinite(kept.logits.max())
        assert logits[token] > -math.inf
        assert token != 0 or not banned or max(logits[1:], default=-math.inf) == -math.inf


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=1.0, seed=0)])
@pytest.mark.parametrize("logits", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_are_refused(options: SamplingOptions, logits: list[float]) -> None:
    with pytest.raises(InvalidContentError, match="finite"):
        make_sampler(options)(np.array(logits, np.float32))


def test_a_bias_outside_the_vocabulary_is_refused_by_the_sampler_too() -> None:
    with pytest.raises(UsageError, match="token 3"):
        make_sampler(SamplingOptions(logit_bias={3: 1.0}))(np.zeros(3, np.float32))


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = np.random.default_rng(1).standard_normal((200, 50)).astype(np.float32)

    def tokens(seed: int | None) -> list[int]:
        sample = make_sampler(SamplingOptions(temperature=1.0, top_k=20, seed=seed))
        return [sample(row) for row in logits]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


def test_two_samplers_of_the_same_options_share_nothing() -> None:
    options = SamplingOptions(**EVERYTHING, mirostat=2)
    logits = np.random.default_rng(4).standard_normal((60, 50)).astype(np.float32)
    alone, one, other = (make_sampler(options, PROMPT) for _ in range(3))
    expected = [alone(row) for row in logits]
    assert [(one(row), other(row)) for row in logits] == [(token, token) for token in expected]


def test_the_numbers_of_a_seed_are_fixed_for_ever() -> None:
    sample = make_sampler(SamplingOptions(temperature=1.0, seed=1234))
    assert [sample(np.zeros(1000, np.float32)) for _ in range(8)] == GOLDEN


GOLDEN = [976, 380, 923, 261, 319, 118, 241, 318]


@pytest.mark.parametrize("more", [{}, {"mirostat": 1}, {"mirostat": 2}])
def test_logits_that_differ_in_the_last_bits_draw_the_same_tokens(more: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((300, 4096)).astype(np.float32)
    nearby = logits * (1 + rng.integers(-8, 9, logits.shape).astype(np.float32) * np.float32(2.0**-23))
    options = SamplingOptions(**{**EVERYTHING, "top_k": 200}, **more)
    one, other = make_sampler(options, PROMPT), make_sampler(options, PROMPT)
    assert [one(row) for row in logits] == [other(row) for row in nearby]


@pytest.fixture(scope="module")
def demo_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in a format on which the logits of all engines agree."""
    out = tmp_path_factory.mktemp("demo") / "demo-f32.gguf"
    quantize(find_model("demo"), out, to="f32")
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9},
        {"mirostat": 1, "mirostat_tau": 3.0},
        {**EVERYTHING, "mirostat": 2},
        {**EVERYTHING, "samplers": "top_k,penalties,typical_p,top_p,min_p,temperature"},
    ],
)
def test_the_same_seed_gives_the_same_text_on_every_engine(options: dict[str, Any], demo_f32: Path) -> None:
    pytest.importorskip("torch")
    texts = {
        starscope.load(demo_f32, engine=engine).generate("def f(", max_new_tokens=60, **{**options, "seed": 8}).text
        for engine in ENGINES
    }
    assert len(texts) == 1


LOGITS_OF_EIGHT = [1.5, -1.0, 0.5, 2.0, 0.0, -0.5, 1.0, -2.0]


def cases() -> Iterator[tuple[SamplingOptions, list[int], list[float]]]:
    """Options, the ids that may be drawn, and the logits by which they are."""
    best = ranked(LOGITS_OF_EIGHT)
    halves, doubles = ([x * f for x in LOGITS_OF_EIGHT] for f in (0.5, 2.0))
    yield SamplingOptions(temperature=1.0, seed=11), best, LOGITS_OF_EIGHT
    yield SamplingOptions(temperature=0.5, seed=12), best, doubles
    yield SamplingOptions(temperature=2.0, top_k=5, seed=13), best[:5], halves
    yield SamplingOptions(temperature=1.0, top_p=0.8, seed=14), best[:4], LOGITS_OF_EIGHT
    yield SamplingOptions(temperature=1.0, min_p=0.2, seed=15), best[:4], LOGITS_OF_EIGHT
    # Entropy 1.60 nats; surprises of the best 0.91, 1.41, 1.91, 2.41: the second is nearest, then the third, the first.
    yield SamplingOptions(temperature=1.0, typical_p=0.6, seed=16), best[:3], LOGITS_OF_EIGHT
    yield SamplingOptions(temperature=1.0, typical_p=0.3, seed=17), best[1:3], LOGITS_OF_EIGHT
    # Surprises in bits: 1.31, 2.03, 2.75, 3.48, ...; mu is 3, and held there.
    held = {"mirostat_tau": 1.5, "mirostat_eta": 0.0}
    yield SamplingOptions(mirostat=2, **held, seed=18), best[:3], LOGITS_OF_EIGHT
    biased = [-9.0 if i == 3 else x + 1.0 if i == 4 else x for i, x in enumerate(LOGITS_OF_EIGHT)]
    bias = {3: -math.inf, 4: 1.0}
    yield SamplingOptions(temperature=1.0, logit_bias=bias, seed=19), [i for i in best if i != 3], biased


@pytest.mark.parametrize(("options", "allowed", "by"), list(cases()))
def test_tokens_are_drawn_with_their_probabilities(
    options: SamplingOptions, allowed: list[int], by: list[float]
) -> None:
    weights = np.array([math.exp(x) if i in allowed else 0.0 for i, x in enumerate(by)])
    draws = 10_000
    expected = draws * weights / weights.sum()
    sample = make_sampler(options)
    counts = np.bincount([sample(np.array(LOGITS_OF_EIGHT, np.float32)) for _ in range(draws)], minlength=8)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < CHI_SQUARE_999[len(allowed) - 1]


def test_penalized_tokens_are_drawn_with_their_probabilities() -> None:
    logits, draws = [1.5, -1.0, 0.5, 2.0], 10_000
    by = [1.5 / 1.5 - 0.5 - 2 * 0.25, -1.0 * 1.5 - 0.5 - 0.25, 0.5, 2.0]
    options = SamplingOptions(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, penalty_window=3, seed=21
    )
    sampler = make_sampler(options)
    tokens = []
    for _ in range(draws):
        sampler.window.extend([0, 1, 0])  # as if the text had gone on with these
        tokens.append(sampler(np.array(logits, np.float32)))
    expected = draws * np.exp(by) / np.exp(by).sum()
    assert ((np.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum() < CHI_SQUARE_999[3]
