"""Traces of a text that is being generated: steps, what can be changed in them, and their ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.errors import ContextOverflowError, OutOfOrder, Stopped, Unavailable, UsageError
from support.traces import all_values, logits_of, read, same, value_names, value_ulps

PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
OTHER = [12, 301, 5]
HALF = 2**13  # ulp: rounding of what is cached to float16


def never(model: starscope.Model) -> dict[int, float]:
    """Options by which no stop token is chosen."""
    return dict.fromkeys(model.tokenizer.stop_ids, -1e9)


def greedy(model: starscope.Model, prompt: list[int], count: int) -> list[int]:
    return model.generate(prompt, max_new_tokens=count, logit_bias=never(model)).token_ids


def test_an_unwatched_generation_is_that_of_generate(model: starscope.Model) -> None:
    for prompts in ([PROMPT], [PROMPT, OTHER], [OTHER, PROMPT, PROMPT[:1]]):
        with model.trace(prompts, max_new_tokens=7, logit_bias=never(model)) as t:
            pass
        assert t.tokens == [greedy(model, one, 7) for one in prompts]
        assert t.result.shape == (len(prompts), max(map(len, prompts)) + 7)


def test_sampling_is_that_of_generate_with_the_same_seed(model: starscope.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 7, "logit_bias": never(model)}
    expected = model.generate(PROMPT, max_new_tokens=8, **options).token_ids
    with model.trace(PROMPT, max_new_tokens=8, **options) as t:
        for _ in t.steps():
            read(model, "layers.1.layer_output")
    assert t.tokens == [expected]
    with model.trace(PROMPT, max_new_tokens=8, **options) as t:
        pass
    assert t.tokens == [expected]


def test_a_decoded_step_has_the_values_of_the_whole_text_run_at_once(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=4, logit_bias=never(model)) as t:
        steps = [all_values(model) for _ in t.steps()]
    text = t.result[0].tolist()
    with model.trace(text[:-1]):
        whole = all_values(model)
    for step, values in enumerate(steps):
        at = len(PROMPT) - 1 + step
        for name, value in values.items():
            expected = whole[name]
            if "scores" in name or "probabilities" in name:
                found, expected = value[:, :, -1], expected[:, :, at, : at + 1]
            elif "keys" in name or "values" in name:
                found, expected = value, expected[:, :, : at + 1]
            elif "queries" in name:
                found, expected = value[:, :, -1], expected[:, :, at]
            else:
                found, expected = value[:, -1], expected[:, at]
            limit = HALF if model.weights.half_cache else 32
            assert value_ulps(found, expected) <= (0 if model.engine.name == "native" else limit), (step, name)


def test_reads_before_the_loop_are_of_the_prompt(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=2) as t:
        early = model.layers[0].layer_output
        for step in t.steps():
            if step == 0:
                assert model.layers[0].layer_output is early
            else:
                assert model.layers[0].layer_output.shape[1] == 1


def test_what_is_written_to_the_logits_is_what_is_chosen_and_fed_next(model: starscope.Model) -> None:
    with model.trace([PROMPT, OTHER], max_new_tokens=4, logit_bias=never(model)) as t:
        for step in t.steps():
            if step:
                assert model.input_ids.tolist() == [[100 + step - 1], [200 + step - 1]]
            model.logits[0, -1, 100 + step] = 1e6
            model.logits[1, -1, 200 + step] = 1e6
    assert t.tokens == [[100, 101, 102, 103], [200, 201, 202, 203]]


def test_an_edit_changes_the_step_and_those_after_it(model: starscope.Model) -> None:
    plain = greedy(model, PROMPT, 6)
    with model.trace(PROMPT, max_new_tokens=6, logit_bias=never(model)) as t:
        for step in t.steps():
            if step == 2:
                model.layers[1].layer_output[:, -1] *= -3
    assert t.tokens[0][:2] == plain[:2]
    assert t.tokens[0] != plain
    assert greedy(model, PROMPT, 6) == plain


def test_a_value_and_a_part_of_it_are_changed_apart_once_reads_are_foreseen(model: starscope.Model) -> None:
    """The queries are a part of what c_attn gives: two values, with numbers of their own, in every step."""
    with model.trace(PROMPT, max_new_tokens=6, logit_bias=never(model)) as t:
        for step in t.steps():
            attention = model.layers[0].self_attn
            fused = attention.c_attn.output
            before = fused.clone()
            queries = attention.attention_queries
            if step == 4:
                queries *= 2
                assert same(fused, before)
        assert step == 5


def test_after_break_the_rest_runs_and_after_stop_it_does_not(model: starscope.Model) -> None:
    plain = greedy(model, PROMPT, 6)
    for at in (0, 2, 5):
        with model.trace(PROMPT, max_new_tokens=6, logit_bias=never(model)) as t:
            for step in t.steps():
                _ = model.layers[0].layer_output
                if step == at:
                    break
        assert t.tokens == [plain]
        with model.trace(PROMPT, max_new_tokens=6, logit_bias=never(model)) as t:
            for step in t.steps():
                early = model.layers[0].layer_output
                if step == at:
                    t.stop()
            with pytest.raises(Stopped, match="ended"):
                model.logits  # noqa: B018
            with pytest.raises(Stopped):
                model.layers[0].layer_output = early
        assert t.tokens == [plain[:at]]
        assert t.result.tolist() == [[*PROMPT, *plain[:at]]]


def test_the_result_is_bound_inside_the_block_too(model: starscope.Model) -> None:
    plain = greedy(model, PROMPT, 5)
    with model.trace(PROMPT, max_new_tokens=5, logit_bias=never(model)) as t:
        assert t.result.tolist() == [[*PROMPT, *plain]]
        with pytest.raises(Stopped):
            model.logits  # noqa: B018
    assert t.result.tolist() == [[*PROMPT, *plain]]
    with model.trace(PROMPT) as t:
        logits = t.result.logits
    assert same(logits, logits_of(model, PROMPT))


def test_more_steps_than_there_are_end_the_loop_and_code_behind_it_runs(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=5) as t:
        for step in t.steps():
            model.logits[:, -1, model.tokenizer.eos_id if step == 2 else 50] = 1e6
        after = True
        with pytest.raises(OutOfOrder):
            model.layers[0].layer_output  # noqa: B018
    assert after
    assert step == 2
    assert t.tokens == [[50, 50, model.tokenizer.eos_id]]


def test_rows_that_have_finished_stay_until_all_have_and_their_padding_is_not_text(model: starscope.Model) -> None:
    eos = model.tokenizer.eos_id
    with model.trace([PROMPT, OTHER], max_new_tokens=6, logit_bias={}) as t:
        for step in t.steps():
            assert model.input_ids.shape[0] == 2
            model.logits[0, -1, eos if step >= 1 else 60] = 1e6
            model.logits[1, -1, eos if step >= 3 else 61] = 1e6
    assert step == 3
    assert t.tokens[1] == [61, 61, 61, eos]
    assert t.tokens[0][:2] == [60, eos]
    assert set(t.tokens[0][2:]) == {eos}
    with model.trace([OTHER], max_new_tokens=6) as alone:
        for at in alone.steps():
            model.logits[0, -1, eos if at >= 3 else 61] = 1e6
    assert alone.tokens[0] == t.tokens[1]


def test_the_end_of_the_context_ends_the_steps(model: starscope.Model) -> None:
    limit = model.context_length
    with model.trace([3] * (limit - 2), max_new_tokens=10, logit_bias=never(model)) as t:
        count = sum(1 for _ in t.steps())
    assert count == len(t.tokens[0]) == 3
    assert t.tokens == [greedy(model, [3] * (limit - 2), 10)]
    with pytest.raises(ContextOverflowError, match=f"{limit + 1} tokens do not fit: the context is {limit}"):
        model.trace([3] * (limit + 1))


def test_a_step_that_was_left_cannot_be_asked(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=3) as t:
        kept = []
        for step in t.steps():
            value = model.layers[0].layer_output
            kept.append(value)
            if step == 1:
                before = kept[0].clone()
                kept[0][:] = 0  # of a step that is over: the caller's own
        assert not kept[0].any()
    assert before.any()
    with model.trace(PROMPT, max_new_tokens=3) as again:
        pass
    assert t.tokens == again.tokens


def test_steps_without_a_length_and_lengths_that_are_none_are_refused(quick: starscope.Model) -> None:
    with quick.trace(PROMPT) as t, pytest.raises(UsageError, match="max_new_tokens"):
        list(t.steps())
    for wrong in (0, -1, 1.5, "3"):
        with pytest.raises(UsageError, match="max_new_tokens"):
            quick.trace(PROMPT, max_new_tokens=wrong)
    with quick.trace(PROMPT, max_new_tokens=3) as t:
        for _ in t.steps():
            pass
        with pytest.raises(UsageError, match="once"):
            list(t.steps())


def test_a_block_is_skipped_in_every_step_or_in_none(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=4, logit_bias=never(model)) as t:
        for _ in t.steps():
            model.skip_layer(1)
            with pytest.raises(Unavailable, match="block 1 was skipped"):
                model.layers[1].layer_mid  # noqa: B018
            assert same(model.layers[1].layer_output, model.layers[2].layer_input)
    assert len(t.tokens[0]) == 4
    with pytest.raises(Unavailable, match="skipped in an earlier step"), model.trace(PROMPT, max_new_tokens=3) as t:  # noqa: PT012
        for step in t.steps():
            if step == 0:
                model.skip_layers(1, 2)
            _ = model.logits
    assert greedy(model, PROMPT, 3) == greedy(model, PROMPT, 3)


def test_keys_written_reach_their_own_row_alone(model: starscope.Model) -> None:
    with model.trace([PROMPT, OTHER], max_new_tokens=3, logit_bias=never(model)) as t:
        plain = [model.logits.clone() for _ in t.steps()]
    with model.trace([PROMPT, OTHER], max_new_tokens=3, logit_bias=never(model)) as t:
        for step in t.steps():
            if step == 0:
                model.layers[1].self_attn.attention_keys[0] *= -2
                model.layers[1].self_attn.attention_values[0] *= 3
            if step:
                model.input_ids = plain[step - 1][:, -1].argmax(-1)[:, None]
            logits = model.logits
            assert same(logits[1], plain[step][1])
            assert not same(logits[0, -1], plain[step][0, -1])


def test_values_can_be_kept_anew_in_each_step(model: starscope.Model) -> None:
    names = value_names(model, [1])
    with model.trace(PROMPT, max_new_tokens=3) as t:
        plain = [all_values(model, names) for _ in t.steps()]
    with model.trace(PROMPT, max_new_tokens=3) as t:
        for step in t.steps():
            t.keep(names)
            _ = model.logits
            for name in reversed(names):
                assert same(read(model, name), plain[step][name])


def test_the_prompt_may_be_of_one_token_and_of_embeddings(model: starscope.Model) -> None:
    with model.trace([5], max_new_tokens=3, logit_bias=never(model)) as t:
        for step in t.steps():
            assert model.layers[0].self_attn.attention_probabilities.shape[-1] == 1 + step
    assert t.tokens == [greedy(model, [5], 3)]
    rows = model.embed_tokens.weight[PROMPT]
    with model.trace(rows, max_new_tokens=4, logit_bias=never(model)) as t:
        for step in t.steps():
            if step:
                assert model.input_ids.shape == (1, 1)
            _ = model.layers[0].layer_output
    assert t.tokens == [greedy(model, PROMPT, 4)]


def test_steering_every_step_is_not_steering_the_prompt_alone(model: starscope.Model) -> None:
    vector = torch.from_numpy(np.random.default_rng(0).normal(size=model.hidden_size).astype(np.float32))

    def run(steps: Any) -> list[Any]:
        made = []
        with model.trace(PROMPT, max_new_tokens=4, logit_bias=never(model)) as t:
            for step in t.steps():
                if step:
                    model.input_ids = torch.tensor([[33]])
                if step in steps:
                    model.steer(1, vector, factor=20.0)
                made.append(model.logits[:, -1].clone())
        return made

    none, first, every, last = run(()), run((0,)), run(range(4)), run((3,))
    assert not same(first[0], none[0])
    assert not same(first[3], none[3])  # by the keys and values of the prompt
    assert not same(every[3], first[3])
    assert [same(a, b) for a, b in zip(last, none, strict=True)] == [True, True, True, False]
