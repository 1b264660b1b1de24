"""The body of a trace is ordinary Python, wherever Python runs: at a prompt, in threads, tasks, under a debugger."""

from __future__ import annotations

import asyncio
import code
import contextvars
import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.errors import OutOfOrder, OutsideTrace, Stopped, UsageError
from support.traces import logits_of, read, same, value_names

PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
OTHER = [12, 301, 5, 78]


def test_a_body_without_source_runs_by_exec(quick: starscope.Model) -> None:
    space: dict[str, Any] = {"model": quick, "prompt": PROMPT}
    exec("with model.trace(prompt) as t: out = model.layers[1].layer_output; logits = model.logits", space)
    exec("with model.trace(prompt):\n  try:\n    first = model.layers[1].layer_output\n  finally:\n    done = 1", space)
    assert same(space["logits"], logits_of(quick, PROMPT))
    assert same(space["first"], space["out"])
    assert space["done"]
    traced = eval("[(t, model.layers[0].layer_output) for t in [model.trace(prompt)] for _ in [t.__enter__()]]", space)
    traced[0][0].__exit__(None, None, None)
    assert traced[0][1].any()


def test_a_body_typed_at_a_prompt_runs(quick: starscope.Model) -> None:
    console = code.InteractiveConsole({"model": quick, "prompt": PROMPT})
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        for line in (
            "with model.trace(prompt) as t:",
            "    out = model.layers[1].layer_output",
            "    model.layers[2].layer_output[:] = 0",
            "",
            "tuple(out.shape)",
            "t.result.logits.shape[1]",
            "with model.trace(prompt): 1 / 0",
            "",
            "model.logits",
        ):
            console.push(line)
    text = out.getvalue()
    assert f"(1, {len(PROMPT)}, {quick.hidden_size})" in text
    assert "ZeroDivisionError" in text
    assert "OutsideTrace" in text


def test_a_body_from_standard_input_runs(opened: Any) -> None:
    script = (
        "import starscope\n"
        f"model = starscope.load({str(opened('numpy', 'q8_0').path)!r}, engine='numpy')\n"
        "with model.trace([1, 2, 3]):\n"
        "    shape = model.layers[0].layer_output.shape\n"
        "print(tuple(shape))\n"
        "with model.trace([1, 2, 3]):\n"
        "    model.layers[9]\n"
    )
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(1, 3, 64)"
    assert done.returncode == 1
    assert 'File "<stdin>", line 7' in done.stderr
    assert "layer 9 is out of range; this model has layers 0 to 2." in done.stderr


def test_return_break_and_continue_leave_a_body_as_they_leave_any_block(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)
    traces = []

    def first_output() -> Any:
        with quick.trace(PROMPT) as t:
            traces.append(t)
            return quick.layers[0].layer_output

    assert first_output().shape[1] == len(PROMPT)
    for _ in range(2):
        with quick.trace(PROMPT) as t:
            traces.append(t)
            _ = quick.layers[0].layer_output
            continue
    for _ in range(2):
        with quick.trace(PROMPT) as t:
            traces.append(t)
            break
    assert len(traces) == 4
    assert all(same(t.result.logits, plain) for t in traces)
    with pytest.raises(OutsideTrace):
        quick.logits  # noqa: B018


def test_errors_caught_inside_a_body_let_it_go_on(quick: starscope.Model) -> None:
    with quick.trace(PROMPT) as t:
        try:
            quick.layers[0].layer_output = torch.zeros(3)
        except ValueError as error:
            caught = error
        try:
            raise KeyError
        except KeyError:
            value = quick.layers[1].layer_output
        finally:
            quick.layers[1].layer_output[:, -1] *= 1
    assert "expected" in str(caught)
    assert value.any()
    assert same(t.result.logits, logits_of(quick, PROMPT))


def test_traces_of_two_models_in_one_another_keep_apart(opened: Any) -> None:
    for first, second in (("numpy", "torch"), ("native", "numpy"), ("native", "native")):
        one, other = opened(first, "f32"), opened(second, "q8_0")
        expected = logits_of(one, PROMPT), logits_of(other, OTHER)
        with one.trace(PROMPT) as outer:
            stream = one.layers[0].layer_output
            with other.trace(OTHER) as inner:
                one.layers[1].layer_output[:, -1] += 0  # of the outer one, from inside
                assert other.layers[0].layer_output.shape[1] == len(OTHER)
                other.layers[1].layer_input[:, -1] = stream[:, -1]
                moved = other.logits
            assert one.layers[1].layer_output.shape[1] == len(PROMPT)
        assert same(outer.result.logits, expected[0])
        assert same(inner.result.logits, moved)
        assert not same(moved, expected[1])


def test_a_trace_is_of_the_thread_that_entered_it(quick: starscope.Model) -> None:
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(quick.logits)
        except OutsideTrace as error:
            found.append(error)

    with quick.trace(PROMPT):
        _ = quick.layers[0].layer_output
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(ask,))  # handed over on purpose
        thread.start()
        thread.join()
        logits = quick.logits
    assert isinstance(found[0], OutsideTrace)
    assert same(found[1], logits)


def test_traces_in_many_threads_have_each_their_own_numbers(quick: starscope.Model) -> None:
    prompts = [PROMPT, OTHER, PROMPT[:5], [*OTHER, *PROMPT]]
    expected = []
    for prompt in prompts:
        with quick.trace(prompt):
            expected.append({name: read(quick, name) for name in value_names(quick)})

    def work(i: int) -> bool:
        which = i % len(prompts)
        with quick.trace(prompts[which]) as t:
            for name in value_names(quick):
                if not same(read(quick, name), expected[which][name]):
                    return False
            if i % 3 == 0:
                quick.logits[:] = 0
        return bool(t.result.logits.any()) == (i % 3 != 0)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(32)))


def test_tasks_that_take_turns_inside_their_traces_keep_apart(quick: starscope.Model) -> None:
    plain = {len(prompt): logits_of(quick, prompt) for prompt in (PROMPT, OTHER)}

    async def one(prompt: list[int]) -> bool:
        with quick.trace(prompt) as t:
            for block in quick.layers:
                if block.layer_output.shape[1] != len(prompt):
                    return False
                await asyncio.sleep(0)
        return same(t.result.logits, plain[len(prompt)])

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(one(prompt) for prompt in (PROMPT, OTHER, PROMPT, OTHER)))

    assert all(asyncio.run(all_of_them()))
    with pytest.raises(OutsideTrace):
        quick.logits  # noqa: B018


def test_a_trace_inside_a_generator_ends_with_it(quick: starscope.Model) -> None:
    traces = []

    def streams() -> Iterator[Any]:
        with quick.trace(PROMPT) as t:
            traces.append(t)
            for block in quick.layers:
                yield block.layer_output

    shapes = [tuple(stream.shape) for stream in streams()]
    assert shapes == [(1, len(PROMPT), quick.hidden_size)] * 3
    assert same(traces[0].result.logits, logits_of(quick, PROMPT))
    left = streams()
    next(left)
    left.close()
    with pytest.raises(OutsideTrace):
        quick.logits  # noqa: B018
    with pytest.raises(Stopped):
        traces[1].result  # noqa: B018
    one, other = streams(), streams()  # turn by turn
    pairs = list(zip(one, other, strict=True))
    assert all(same(a, b) for a, b in pairs)
    with pytest.raises(OutsideTrace):
        quick.logits  # noqa: B018


def test_a_trace_is_entered_once_and_by_its_block_alone(quick: starscope.Model) -> None:
    t = quick.trace(PROMPT)
    with pytest.raises(OutsideTrace):
        t.result  # noqa: B018
    with t:
        pass
    with pytest.raises(UsageError, match="twice"), t:
        pass
    t = quick.trace(PROMPT)  # never entered: nothing has run
    del t
    with pytest.raises(OutsideTrace):
        quick.logits  # noqa: B018


def test_values_can_be_pickled_copied_and_stored(quick: starscope.Model) -> None:
    with quick.trace(PROMPT) as t:
        value = quick.layers[0].layer_output
        for twin in (
            pickle.loads(pickle.dumps(value)),
            copy.copy(value),
            copy.deepcopy(value),
            stored(value),
            torch.from_numpy(np.asarray(value).copy()),
        ):
            assert same(twin, value)
        for private in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), stored(value)):
            private[:] = 0
    assert same(t.result.logits, logits_of(quick, PROMPT))
    assert value.any()


def stored(value: Any) -> Any:
    """Through torch.save and torch.load, which takes no unknown class."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_values_behave_as_plain_tensors_do(quick: starscope.Model) -> None:
    with quick.trace(PROMPT):
        value = quick.layers[0].layer_output
    plain = value.save()
    assert isinstance(value, torch.Tensor)
    assert value.tolist() == plain.tolist()
    assert torch.equal(value, plain)
    assert torch.equal(torch.stack([value, plain])[0], plain)
    assert np.array_equal(value.numpy(), plain.numpy())
    assert repr(value).startswith("Value(")
    assert (value == plain).all()
    assert float(value[0, 0, 0]) == float(plain[0, 0, 0])
    assert value.mean().item() == plain.mean().item()
    torch.nn.Linear(quick.hidden_size, 2)(value)


def test_a_debugger_that_follows_every_line_sees_the_same_run(quick: starscope.Model) -> None:
    plain, lines = logits_of(quick, PROMPT), []

    def follow(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_code.co_name == "body":
            lines.append(frame.f_lineno)
            for one in list(frame.f_locals.values()):
                repr(one)
                dir(one)
        return follow

    def body() -> Any:
        model = quick
        with model.trace(PROMPT) as t:
            block = model.layers[0]
            first = block.layer_input
            part = block.self_attn
            second = part.attention_scores
        return t, first, second

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        t, first, second = body()
    finally:
        sys.settrace(before)
    assert len(lines) >= 7
    assert same(t.result.logits, plain)
    assert first.any()
    assert second.any()


def test_a_class_a_lambda_and_a_comprehension_may_read(quick: starscope.Model) -> None:
    class Probe:
        def __init__(self, layer: int) -> None:
            self.value = quick.layers[layer].layer_output

    with quick.trace(PROMPT) as t:
        outputs = [Probe(i).value for i in range(2)]
        last = (lambda: quick.layers[2].layer_output)()
        by_name = {name: getattr(quick, name) for name in ("final_norm_output", "logits")}
    assert all(one.shape == last.shape for one in outputs)
    assert same(by_name["logits"], t.result.logits)


def test_inference_mode_around_a_trace_changes_nothing(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_output[:, -1] *= 2
    edited = t.result.logits
    with torch.inference_mode():
        assert same(logits_of(quick, PROMPT), plain)
        with quick.trace(PROMPT, max_new_tokens=2) as t:
            for step in t.steps():
                value = quick.layers[1].layer_output
                if step == 0:
                    value[:, -1] *= 2
                    assert same(quick.logits, edited)
        with pytest.raises(OutOfOrder, match="layer_output"), quick.trace(PROMPT):  # noqa: PT012
            value = quick.layers[1].layer_output
            _ = quick.layers[1].layer_output, quick.layers[2].layer_mid
            value[:] = 0
    with quick.trace(PROMPT) as t:
        with torch.inference_mode():
            quick.layers[1].layer_output[:, -1] *= 2
            assert same(quick.logits, edited)
        assert same(t.result.logits, edited)
