"""The rules of tracing, one after another, on every engine and on float32 and quantized files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.engine.base import MASKED
from starscope.errors import (
    DoesNotFitError,
    OutOfOrder,
    OutOfOrderError,
    OutsideTrace,
    Stopped,
    Unavailable,
    UnsupportedError,
    UsageError,
    ValueShapeError,
)
from starscope.microscope import trace as trace_module
from support.numbers import TOLERANCE
from support.traces import all_values, changed, logits_of, read, same, value_names, value_ulps, write

PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
OTHER = [12, 301, 5, 78]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


# 1. The body drives.


def test_the_body_is_ordinary_python_that_decides_by_what_it_reads(model: starscope.Model) -> None:
    seen = []
    with model.trace(PROMPT):
        for block in model.layers:
            seen.append(float(block.layer_output[0, -1].norm()))
            if seen[-1] > seen[0] or len(seen) == 2:
                break
    assert 1 <= len(seen) <= 2
    assert all(np.isfinite(seen))


def test_an_exception_of_the_body_comes_out_unchanged_and_leaves_nothing(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    mine = KeyError("mine")
    for depth in range(3):
        with pytest.raises(KeyError) as caught, model.trace(PROMPT) as t:  # noqa: PT012
            if depth:
                model.layers[0].layer_output[:] = 0
            if depth == 2:
                _ = model.logits
            raise mine
        assert caught.value is mine
        assert caught.value.__cause__ is None
        assert "raise mine" in str(caught.traceback[-1].statement)
        with pytest.raises(OutsideTrace):
            model.logits  # noqa: B018
        with pytest.raises(Stopped):
            t.result  # noqa: B018
        assert same(logits_of(model, PROMPT), plain)


def test_an_error_of_ours_is_raised_at_the_users_own_line(model: starscope.Model) -> None:
    with pytest.raises(OutOfOrder) as caught, model.trace(PROMPT):  # noqa: PT012
        _ = model.layers[2].layer_output
        _ = model.layers[0].layer_mid  # this line
    assert [entry for entry in caught.traceback if "# this line" in str(entry.statement)]


def test_looking_at_parts_runs_nothing(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        for part in (model, model.layers, model.layers[0], model.layers[0].self_attn, model.lm_head, model.transformer):
            repr(part)
            dir(part)
        assert not hasattr(model.layers[0], "something_else")
        model.support()
        model.input_ids = torch.tensor([OTHER])  # which is refused once anything has run
        assert tuple(model.input_size) == (1, len(OTHER))


def test_nested_traces_have_their_own_values(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        expected = all_values(model)
    with model.trace(OTHER):
        inner_expected = all_values(model)
    with model.trace(PROMPT) as outer:
        before = model.layers[0].layer_output
        with model.trace(OTHER) as inner:
            model.layers[0].layer_output[:] += 1
            _ = model.logits
        assert same(model.layers[1].layer_output, expected["layers.1.layer_output"])
        with model.trace(OTHER):
            assert same(model.logits, inner_expected["logits"])
        with pytest.raises(RuntimeError, match="out"), model.trace(OTHER):  # noqa: PT012
            _ = model.layers[0].layer_output
            raise RuntimeError("out")
        assert same(model.logits, expected["logits"])
    assert same(before, expected["layers.0.layer_output"])
    assert not same(inner.result.logits, inner_expected["logits"])
    assert same(outer.result.logits, expected["logits"])


# 2. A value is live until the first operation that uses it has run.


def test_a_value_changed_before_it_is_used_is_what_is_used_by_whatever_view(model: starscope.Model) -> None:
    direction = noise(model.hidden_size)

    def by_slice(value: Any) -> None:
        value[:, -1] += direction

    def by_numpy(value: Any) -> None:
        value.numpy()[:, -1] += direction.numpy()

    def by_view(value: Any) -> None:
        value.view(-1, model.hidden_size)[-1].add_(direction)

    def by_saved(value: Any) -> None:
        value.save()[:, -1] += direction

    results = []
    for change in (by_slice, by_numpy, by_view, by_saved):
        with model.trace(PROMPT) as t:
            value = model.layers[1].layer_output
            change(value)
            assert model.layers[1].layer_output is value
        results.append(t.result.logits)
    assert all(same(one, results[0]) for one in results)
    assert not same(results[0], logits_of(model, PROMPT))


def test_what_is_assigned_is_copied_and_the_copy_is_live(model: starscope.Model) -> None:
    given = noise(1, len(PROMPT), model.hidden_size)
    with model.trace(PROMPT) as t:
        model.layers[1].layer_output = given
        given[:] = 0  # the caller's own
        assert model.layers[1].layer_output.any()
    with model.trace(PROMPT) as again:
        model.layers[1].layer_output = noise(1, len(PROMPT), model.hidden_size, seed=1)
        model.layers[1].layer_output[:] = noise(1, len(PROMPT), model.hidden_size)
    assert same(t.result.logits, again.result.logits)
    assert not given.any()


def test_a_value_never_changes_by_itself(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=3) as t:
        first = {}
        for step in t.steps():
            if step == 0:
                first = {name: read(model, name) for name in value_names(model)}
                copies = {name: value.clone() for name, value in first.items()}
    logits_of(model, OTHER)
    for name, value in first.items():
        assert same(value, copies[name]), name


def test_a_change_that_comes_too_late_is_an_error_that_names_the_value(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    with pytest.raises(OutOfOrder, match=r"layers\.0\.layer_mid was changed.*did nothing"), model.trace(PROMPT):  # noqa: PT012
        value = model.layers[0].layer_mid
        _ = model.layers[0].layer_output
        value[:] = 0
        _ = model.layers[1].layer_output  # where the run next goes on
        pytest.fail("it went on")
    with pytest.raises(OutOfOrder, match=r"layers\.0\.layer_mid was changed"), model.trace(PROMPT):  # noqa: PT012
        value = model.layers[0].layer_mid
        _ = model.layers[0].layer_output
        value.numpy()[:] = 0  # seen at the block's end
    assert same(logits_of(model, PROMPT), plain)


def test_a_clone_is_private_and_a_saved_value_is_a_plain_tensor_on_the_same_numbers(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT) as t:
        value = model.layers[0].layer_output
        value.clone()[:] = 0
        (value + 0)[:] = 0
        saved = value.save()
        assert type(saved) is torch.Tensor
        assert saved.data_ptr() == value.data_ptr()
        assert starscope.save(value).data_ptr() == value.data_ptr()
        copy = value.clone()
        _ = model.logits
        copy[:] = 0  # late or not
    assert same(t.result.logits, plain)


def test_buffers_of_the_engine_are_never_handed_out(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT) as t:
        t.keep(value_names(model))
        values = {name: read(model, name) for name in value_names(model)}
    for value in values.values():
        value[:] = float("nan")
    assert same(logits_of(model, PROMPT), plain)
    model.layers[0].mlp.up_proj.weight[:] = 0  # a copy as well
    assert same(logits_of(model, PROMPT), plain)
    model.scope._weights.clear()


# 3. A name is an edge.


def test_an_edit_reaches_all_that_use_the_value(model: starscope.Model) -> None:
    block, new = model.layers[1], noise(1, len(PROMPT), model.hidden_size)
    with model.trace(PROMPT):
        block.layer_mid = new
        normed, feed, out = block.mlp_norm_output, block.mlp.mlp_output, block.layer_output
    centred = new - new.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    norm = block.post_attention_layernorm
    assert value_ulps(normed, expected * norm.weight + norm.bias) <= TOLERANCE
    assert same(out, new + feed)


def test_the_output_of_a_block_and_the_input_of_the_next_are_one_object(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        assert model.layers[0].layer_output is model.layers[1].layer_input
        assert model.layers[0].layer_output is model.layers[0].layer_output
        model.layers[1].layer_input[:, 0] = 7
        assert (model.layers[0].layer_output[:, 0] == 7).all()


# 4. Order.


def test_past_its_uses_a_value_names_itself_and_the_ways_out(model: starscope.Model) -> None:
    assert OutOfOrderError is OutOfOrder
    with model.trace(PROMPT) as t:
        t.keep("layers.0.mlp.mlp_neurons")
        second = model.layers[1].self_attn.attention_output
        with pytest.raises(OutOfOrder, match=r"layers\.0\.layer_mid .*Read it earlier, or say t\.keep\("):
            model.layers[0].layer_mid  # noqa: B018
        assert same(model.layers[1].self_attn.attention_output, second)
        kept = model.layers[0].mlp.mlp_neurons
        with pytest.raises(OutOfOrder, match="assigned"):
            model.layers[0].mlp.mlp_neurons = kept + 1
    with model.trace(PROMPT):
        assert same(kept, model.layers[0].mlp.mlp_neurons)


def test_between_its_first_and_last_use_a_value_can_be_read_and_not_written(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        expected = model.layers[0].layer_mid
    with model.trace(PROMPT):
        _ = model.layers[0].mlp.mlp_output  # the norm has used it, the sum has not
        assert same(model.layers[0].layer_mid, expected)
        with pytest.raises(OutOfOrder, match="assigned after"):
            model.layers[0].layer_mid = expected * 2


# 5. Looking changes nothing: the suite of families reads every value. Here: only an edit leaves attention's own path.


def test_an_edited_pattern_leaves_other_blocks_as_they_are(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        expected = all_values(model, value_names(model, [0]))
    with model.trace(PROMPT):
        found = all_values(model, value_names(model, [0])[:-3])
        model.layers[1].self_attn.attention_probabilities[:, 0] = 0
        assert not model.layers[1].self_attn.attention_head_outputs[:, :, 0].any()
        assert model.layers[1].self_attn.attention_head_outputs[:, :, 1:].any()
    for name, value in found.items():
        assert same(value, expected[name]), name


# 6. Writes.


def test_other_floating_types_are_taken_by_value_and_other_kinds_of_arrays_too(model: starscope.Model) -> None:
    exact = noise(1, len(PROMPT), model.hidden_size).bfloat16()
    results = []
    for given in (exact, exact.float(), exact.double(), exact.float().numpy(), exact.double().numpy()):
        with model.trace(PROMPT) as t:
            model.layers[0].layer_output = given
            assert model.layers[0].layer_output.dtype == torch.float32
        results.append(t.result.logits)
    assert all(same(one, results[0]) for one in results)


def test_a_tensor_with_gradients_or_without_order_is_taken_by_value(model: starscope.Model) -> None:
    given = noise(1, model.hidden_size, len(PROMPT))
    results = []
    for one in (
        given.transpose(1, 2),
        given.transpose(1, 2).contiguous(),
        given.transpose(1, 2).clone().requires_grad_(),
    ):
        with model.trace(PROMPT) as t:
            model.layers[0].layer_output = one
        results.append(t.result.logits)
    assert all(same(one, results[0]) for one in results)


def test_another_shape_is_refused_at_that_line_with_what_was_found_and_expected(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT) as t:
        wrong = torch.zeros(1, len(PROMPT) - 1, model.hidden_size)
        expected = rf"layers\.1\.layer_mid .*\[1, 8, {model.hidden_size}\]; expected \[1, 9, {model.hidden_size}\]"
        with pytest.raises(ValueShapeError, match=expected):
            model.layers[1].layer_mid = wrong
        with pytest.raises(ValueShapeError):
            model.layers[1].self_attn.o_proj.input = wrong
        with pytest.raises((ValueShapeError, RuntimeError)):
            model.layers[1].layer_mid[:] = wrong
        for nonsense in ("text", None, 3.0, [1.0], object()):
            with pytest.raises((ValueShapeError, TypeError)):
                model.layers[1].layer_mid = nonsense
    assert same(t.result.logits, plain)


def test_input_ids_alone_may_change_the_length(model: starscope.Model) -> None:
    with model.trace(PROMPT) as t, pytest.raises(ValueShapeError):
        model.token_embeddings = torch.zeros(1, 4, model.hidden_size)
    with model.trace(PROMPT) as t:
        model.input_ids = torch.tensor([OTHER])
        assert model.token_embeddings.shape[1] == len(OTHER)
        with pytest.raises(OutOfOrder, match="input_ids"):
            model.input_ids = torch.tensor([PROMPT])
    assert same(t.result.logits, logits_of(model, OTHER))
    for wrong in (
        torch.tensor(OTHER),
        torch.zeros(1, 3),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(2, 3).long(),
    ):
        with model.trace(PROMPT), pytest.raises(ValueShapeError, match="input_ids"):
            model.input_ids = wrong


# 7. Everything of attention can be changed in place, on every engine.


def test_support_has_a_reason_for_what_is_not_there_and_none_for_the_rest(model: starscope.Model) -> None:
    assert set(model.support().values()) == {None}
    with model.trace(PROMPT):
        model.skip_layer(1)
        with pytest.raises(Unavailable, match="block 1 was skipped"):
            model.layers[1].mlp.mlp_output  # noqa: B018
        reasons = model.support(layer=1)
        assert "skipped" in str(reasons["mlp.mlp_output"])
        assert model.layers[1].layer_output.shape == (1, len(PROMPT), model.hidden_size)


# 8. Masked scores.


def test_adding_to_masked_scores_keeps_the_mask_and_multiplying_lifts_it(model: starscope.Model) -> None:
    n, attention = len(PROMPT), model.layers[1].self_attn
    with model.trace(PROMPT):
        scores = attention.attention_scores
        above = torch.ones(n, n, dtype=torch.bool).triu(1)
        assert (scores[..., above] == MASKED).all()
        assert (scores[..., ~above] > -1e4).all()
        scores += 3
        added = attention.attention_probabilities
    assert same(added.tril(), added)
    with model.trace(PROMPT) as t:
        attention.attention_scores *= 0
        lifted = attention.attention_probabilities
    assert (lifted - 1 / n).abs().max() <= 2.0**-20
    assert torch.isfinite(t.result.logits).all()


# 9. Keys and values.


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_key_or_value_that_is_written_stays_in_the_cache(model: starscope.Model, part: str) -> None:
    name = f"layers.1.self_attn.attention_{part}"
    with model.trace(PROMPT, max_new_tokens=4) as t:
        for _ in t.steps():
            old = read(model, name).clone()
    new = noise(model.head_dim, seed=3)
    for at, assigned in ((0, False), (0, True), (2, False), (2, True)):
        with model.trace(PROMPT, max_new_tokens=4) as t:
            for step in t.steps():
                value = read(model, name)
                assert value.shape[2] == len(PROMPT) + step
                if step == at:
                    other = value.clone() if assigned else value
                    other[0, 0, 5] = new
                    if assigned:
                        write(model, name, other)
                elif step > at:
                    stays = new.half().float() if model.weights.half_cache else new
                    assert same(value[0, 0, 5], stays), (step, at)
                    assert same(value[0, 0, :5], old[0, 0, :5])
    with model.trace(PROMPT, max_new_tokens=4) as t:
        for _ in t.steps():
            last = read(model, name)
    assert same(last, old)


# 10. Generation has its own tests, in test_generation.py. 11. The prompt is one piece.


def test_a_trace_neither_reads_nor_leaves_anything_in_the_cache_of_generation(model: starscope.Model) -> None:
    text = "def add(a, b):\n    return a"
    first = model.generate(text, max_new_tokens=6).token_ids
    with model.trace(text, max_new_tokens=3) as t:
        for step in t.steps():
            assert step or model.layers[0].layer_input.shape[1] == len(model.tokenizer.encode(text))
            model.layers[0].self_attn.attention_keys[:] = 1
            model.layers[1].layer_output[:] *= -1
    assert model.generate(text, max_new_tokens=6).token_ids == first
    assert model.generate(text + " + b\n", max_new_tokens=4).token_ids == fresh(model, text + " + b\n")


def fresh(model: starscope.Model, text: str) -> list[int]:
    again = starscope.load(model.path, engine=model.engine.name, threads=1)
    return again.generate(text, max_new_tokens=4).token_ids


def test_a_prompt_over_the_memory_says_so_before_it_runs(
    quick: starscope.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "free_memory", lambda: 1000)
    with pytest.raises(DoesNotFitError, match="in one piece"):
        quick.trace(PROMPT)


# 12. Batches: the suite of families has the rest.


def test_a_mask_may_have_zeros_at_the_beginning_alone(model: starscope.Model) -> None:
    padded = torch.tensor([[0, 0, *PROMPT], [*OTHER, *OTHER, 1, 2, 3]])
    mask = (torch.arange(11) >= torch.tensor([[2], [0]])).long()
    with model.trace(padded.tolist()) as t:
        model.attention_mask = mask
        assert not model.layers[0].layer_output[0, :2].any()
        assert model.layers[0].layer_output[0, 2:].any()
    assert value_ulps(t.result.logits[0, 2:], logits_of(model, PROMPT)[0]) <= (
        2**13 if model.weights.half_cache else 32
    )
    for wrong in ([1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 2]):
        with model.trace([PROMPT[:3]]), pytest.raises(ValueShapeError, match="attention_mask"):
            model.attention_mask = torch.tensor([wrong])
    with model.trace([PROMPT]), pytest.raises(ValueShapeError, match="attention_mask"):
        model.attention_mask = torch.ones(1, 3, dtype=torch.int64)


# 13. Invoking.


def test_invoked_prompts_run_one_after_another_and_later_ones_use_earlier_values(model: starscope.Model) -> None:
    with model.trace() as t:
        with t.invoke(PROMPT) as first:
            donor = model.layers[1].layer_output
        with t.invoke(OTHER) as second:
            model.layers[1].layer_output[:, -1] = donor[:, -1]
    assert same(first.result.logits, logits_of(model, PROMPT))
    with model.trace(OTHER) as by_hand:
        model.layers[1].layer_output[:, -1] = donor[:, -1]
    assert same(second.result.logits, by_hand.result.logits)
    with model.trace() as t, pytest.raises(UsageError, match="no prompt"):
        t.invoke()


# 14. Logits.


def test_all_rows_of_the_logits_or_the_last_alone_the_last_has_the_same_bits(model: starscope.Model) -> None:
    with model.trace(PROMPT):
        all_rows = model.logits
        probs = model.next_token_probs
    assert all_rows.shape == (1, len(PROMPT), model.vocab_size)
    assert same(all_rows[:, -1], model.engine.forward([PROMPT])[0])
    assert same(probs, all_rows[:, -1].softmax(-1))
    assert value_ulps(all_rows, model.forward(PROMPT)) <= (2**13 if model.weights.half_cache else TOLERANCE)


# 15. Gradients: test_gradients.py has their numbers.


def test_without_torch_as_the_engine_gradients_say_what_to_load(quick: starscope.Model) -> None:
    if quick.engine.name == "torch":
        with quick.trace(PROMPT, grad=True):
            assert quick.logits.requires_grad
    else:
        with pytest.raises(UnsupportedError, match=r'no gradients.*engine="torch"'):
            quick.trace(PROMPT, grad=True)


# 16. Modules.


def test_outputs_of_modules_keep_the_checkpoints_convention(model: starscope.Model) -> None:
    block = model.layers[1]
    with model.trace(PROMPT):
        pattern, output = block.self_attn.attention_probabilities, block.self_attn.output[0]
        feed, out = block.mlp.output, block.output
    assert isinstance(feed, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    with model.trace(PROMPT):
        first, second = block.self_attn.output
        assert same(first, output)
        assert same(second, pattern)
    with model.trace(PROMPT):
        assert [one.shape for one in block.self_attn.output[:]] == [output.shape, pattern.shape]


def test_a_weight_has_three_names_and_is_decoded_once(model: starscope.Model) -> None:
    ours = model.layers[1].self_attn.qkv_proj
    assert ours is model.transformer.h[1].attn.c_attn is model.blk[1].attn_qkv is model.layers[1].self_attn.c_attn
    assert ours.weight is ours.weight
    assert ours.weight.dtype == torch.float32
    assert np.array_equal(ours.weight.numpy(), model.weights["layers.1.self_attn.qkv_proj.weight"])
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.lm_head.bias is None
    with pytest.raises(AttributeError, match="read-only"):
        ours.weight = torch.zeros(1)


# 17. The identity.


def test_a_block_is_the_sum_of_its_parts_left_to_right(model: starscope.Model) -> None:
    with model.trace(PROMPT, max_new_tokens=3) as t:
        for _ in t.steps():
            for block in model.layers:
                before, attention = block.input.clone(), block.self_attn.attention_output
                feed = block.mlp.mlp_output
                assert same(before + attention + feed, block.layer_output)


def test_a_change_of_a_value_that_was_kept_is_refused(model: starscope.Model) -> None:
    with pytest.raises(OutOfOrder, match=r"layers\.0\.layer_mid"), model.trace(PROMPT) as t:  # noqa: PT012
        t.keep(["layers.0.layer_mid"])
        _ = model.logits
        model.layers[0].layer_mid[:] = changed(model.layers[0].layer_mid)
