"""Edits that an engine does equal those done by hand in a trace, however the text comes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import starscope
from starscope.engine import ENGINES
from starscope.microscope import Edit
from starscope.microscope.tensors import as_array
from support.edited import Given, by_hand, cuts, given_edits, make_model, random_prompts
from support.llama_checkpoints import make_llama
from support.numbers import TOLERANCE, ulps
from support.traces import same

NEW = 3  # tokens generated


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A form, prompts, and edits for them."""
    multi_query = draw(st.booleans())
    lengths = draw(st.lists(st.integers(3, 9), min_size=1, max_size=3))
    one = given_edits(multi_query=multi_query, shortest=min(lengths), batch=len(lengths))
    return {
        "multi_query": multi_query,
        "prompts": random_prompts(draw(st.integers(0, 99)), lengths),
        "given": draw(st.lists(one, min_size=1, max_size=3)),
        "chunks": draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    }


def run_by_hand(model: starscope.Model, edits: list[Given], prompts: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """The tokens, and the logits of every step `[batch seq vocab_size]`."""
    logits = []
    with model.trace(prompts, max_new_tokens=NEW) as t:
        for step in t.steps():
            by_hand(model, edits, t, prompts, step)
            logits.append(as_array(model.logits).copy())
    return t.tokens, logits


def run_edited(model: starscope.Model, edits: list[Given], prompts: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """The same with the edits given to the model."""
    logits = []
    with model.editing([one.edit for one in edits]), model.trace(prompts, max_new_tokens=NEW) as t:
        for _ in t.steps():
            logits.append(as_array(model.logits).copy())
    return t.tokens, logits


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=40)
@given(case=cases())
def test_an_edit_in_a_trace_is_what_is_done_there_by_hand(name: str, form: str, case: dict[str, Any]) -> None:
    model = make_model(name, form, multi_query=case["multi_query"])
    tokens, expected = run_by_hand(model, case["given"], case["prompts"])
    found_tokens, found = run_edited(model, case["given"], case["prompts"])
    assert found_tokens == tokens
    for a, b in zip(found, expected, strict=True):
        assert same(a, b)


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "F32") for name in ENGINES), ("native", "Q8_0"), ("native", "F16")]
)
@settings(max_examples=40)
@given(case=cases())
def test_edits_hold_in_chunks_batches_and_decoding_steps(name: str, form: str, case: dict[str, Any]) -> None:
    model = make_model(name, form, multi_query=case["multi_query"])
    tokens, expected = run_by_hand(model, case["given"], case["prompts"])
    engine = model.with_edits([one.edit for one in case["given"]]).engine
    allowed = 0 if name == "native" else TOLERANCE
    for row, (prompt, generated) in enumerate(zip(case["prompts"], tokens, strict=True)):
        cache = engine.new_cache()
        cache.row, cache.prompt_length = row, len(prompt)
        text = prompt + generated[:-1]
        parts = [engine.forward([text[a:b]], [cache], "all")[0] for a, b in cuts(len(text), case["chunks"])]
        wanted = [expected[0][row, -len(prompt) :], *(step[row] for step in expected[1:])]
        found, right = np.concatenate(parts), np.concatenate(wanted)
        assert np.array_equal(found, right) or ulps(found, right) <= allowed


@settings(max_examples=40)
@given(case=cases())
def test_edits_hold_where_a_step_is_run_in_pieces(case: dict[str, Any]) -> None:
    model = make_model("native", "Q8_0", multi_query=case["multi_query"])
    with model.editing([one.edit for one in case["given"]]), pytest.MonkeyPatch.context() as patched:
        whole = model.forward(case["prompts"])
        patched.setattr("starscope.engine.native_engine.ROWS_AT_ONCE", 4)
        assert same(model.forward(case["prompts"]), whole)


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=10)
@given(case=cases())
def test_edited_texts_generated_together_are_those_generated_in_a_trace(name: str, case: dict[str, Any]) -> None:
    model = make_model(name, multi_query=case["multi_query"])
    tokens, _ = run_by_hand(model, case["given"], case["prompts"])
    with model.editing([one.edit for one in case["given"]]):
        made = model.generate(case["prompts"], max_new_tokens=NEW)
        logits = model.forward(case["prompts"])
    stop = model.tokenizer.stop_ids
    for row, completion in enumerate(made):
        ended = next((i for i, token in enumerate(tokens[row]) if token in stop), NEW)
        assert completion.token_ids == tokens[row][:ended]
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ENGINES)
def test_a_query_that_sees_nothing_attends_evenly_to_what_is_up_to_it(name: str) -> None:
    """Not to what is behind it, which a shorter piece of the text does not have."""
    model = make_model(name, "F32")
    [prompt] = random_prompts(7, [6])
    with model.editing(Edit("attention_scores", "mask", layers=0, keys="0:3")), model.trace(prompt):
        pattern = as_array(model.layers[0].self_attn.attention_probabilities).copy()[0]
        logits = as_array(model.logits).copy()
    even = np.tril(np.ones((3, 3), np.float32)) / np.arange(1, 4, dtype=np.float32)[:, None]
    assert np.allclose(pattern[:, :3, :3], even, rtol=1e-6)
    assert not pattern[:, :3, 3:].any()
    with model.editing(Edit("attention_scores", "mask", layers=0, keys="0:3")):
        for length in (1, 2, 3):
            assert ulps(as_array(model.forward(prompt[:length])), logits[:, :length]) <= TOLERANCE


@pytest.mark.parametrize("name", ENGINES)
def test_edits_of_patterns_open_nothing_outside_a_sliding_window(name: str, tmp_path: Path) -> None:
    make_llama(tmp_path, window=5)
    model = starscope.load(tmp_path, engine=name)
    prompt = list(range(40, 54))
    tensor = np.random.default_rng(1).normal(size=10).astype(np.float32)
    edits = [
        Edit("attention_scores", "set", layers=0, keys="2:12", tensor=tensor),
        Edit("attention_probabilities", "add", layers=1, keys="0:20", tensor=0.25),
    ]

    def seen(pattern: torch.Tensor) -> torch.Tensor:
        keys, rows = torch.arange(pattern.shape[-1]), pattern.shape[-2]
        queries = torch.arange(len(keys) - rows, len(keys))[:, None]
        return (keys <= queries) & (keys > queries - 5)

    expected = []
    with model.trace(prompt, max_new_tokens=NEW) as t:
        for _ in t.steps():
            scores = model.layers[0].self_attn.attention_scores
            new = scores.clone()
            new[..., 2:12] = torch.from_numpy(tensor[: new.shape[-1] - 2])
            scores[...] = new.where(seen(new), scores)
            probabilities = model.layers[1].self_attn.attention_probabilities
            probabilities[...] = (probabilities + 0.25).where(seen(new), probabilities)
            expected.append(as_array(model.logits).copy())
    with model.editing(edits), model.trace(prompt, max_new_tokens=NEW) as t:
        found = [as_array(model.logits).copy() for _ in t.steps()]
    for a, b in zip(found, expected, strict=True):
        assert same(a, b)
    compiled = as_array(model.with_edits(edits).forward(prompt))
    assert ulps(compiled, expected[0]) <= (0 if name == "native" else TOLERANCE)


@pytest.mark.parametrize("name", ENGINES)
def test_no_cache_filled_under_other_edits_is_used_again(name: str) -> None:
    model, plain = make_model(name), make_model(name).with_edits([])
    vector = np.random.default_rng(1).normal(0, 3, model.hidden_size).astype(np.float32)
    edit = Edit("layer_output", "add", layers=0, tensor=vector)
    new = Edit("layer_output", "add", layers=0, tensor=vector, positions="new")
    [prompt] = random_prompts(5, [8])
    longer = [*prompt, 7, 8, 9]

    def fresh(edits: list[Edit], ids: list[int]) -> list[int]:
        return plain.with_edits(edits).generate(ids, max_new_tokens=6).token_ids

    order: list[list[Edit]] = [[edit], [], [new], [edit, edit], [], [edit], [new]]
    for edits in order:
        for ids in (prompt, longer, prompt):
            with model.editing(edits):
                assert model.generate(ids, max_new_tokens=6).token_ids == fresh(edits, ids)
    assert model.generate(prompt, max_new_tokens=6).token_ids == fresh([], prompt)
    assert fresh([], prompt) != fresh([edit], prompt)
    # What "new" has changed in one call is the prompt of the next.
    with model.editing(new):
        first = model.generate(prompt, max_new_tokens=6).token_ids
        assert model.generate(prompt + first, max_new_tokens=6).token_ids == fresh([new], prompt + first)


def test_a_cache_under_the_same_edits_is_used_again() -> None:
    model = make_model("numpy")
    [prompt] = random_prompts(6, [20])
    with model.editing(Edit("layer_output", "scale", layers=0, factor=0.5)):
        first = model.generate(prompt, max_new_tokens=1)
        again = model.generate(prompt, max_new_tokens=1)
    assert again.token_ids == first.token_ids
    assert again.timings.prefill_tok_s == 0 or again.timings.prefill_tok_s < first.timings.prefill_tok_s
