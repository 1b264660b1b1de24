"""Traces leave nothing behind: no memory, no state, no difference in what the model does afterwards."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import starscope
from starscope.errors import StarscopeError
from support.traces import logits_of, read, same, value_names, write

PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
TEXT = "def add(a, b):\n    return a"
PAGE = 4096


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def look(model: starscope.Model, i: int) -> None:
    """A trace of one kind or another; some of them end in an error."""
    kind = i % 5
    if kind == 0:
        with model.trace(PROMPT):
            for block in model.layers:
                _ = block.self_attn.attention_probabilities, block.layer_output
    elif kind == 1:
        with model.trace(PROMPT, max_new_tokens=3) as t:
            for _ in t.steps():
                model.layers[1].layer_output[:, -1] *= 2
                _ = model.logits
    elif kind == 2:
        with pytest.raises(KeyError), model.trace(PROMPT):  # noqa: PT012
            model.layers[1].self_attn.attention_scores[:, 0] = 0
            _ = model.layers[2].mlp.mlp_neurons
            raise KeyError
    elif kind == 3:
        with model.trace(PROMPT) as t:
            t.keep(["layers.0.layer_output"])
            model.skip_layer(1)
            _ = model.logits
            _ = t.result.logits
    else:
        with pytest.raises(StarscopeError), model.trace([PROMPT, PROMPT[:2]]):
            model.layers[0].layer_output = model.layers[0].layer_output[:, :1]


def test_a_thousand_traces_take_no_more_memory_than_a_few(quick: starscope.Model) -> None:
    for i in range(200):
        look(quick, i)
    gc.collect()
    objects, before = len(gc.get_objects()), resident()
    gc.disable()  # what is only freed by the collector would grow
    try:
        for i in range(1000):
            look(quick, i)
        grown = resident() - before
        left = len(gc.get_objects()) - objects
    finally:
        gc.enable()
    assert grown <= 8 << 20, f"{grown / 2**20:.1f} MiB"
    assert left <= 200
    assert len(quick.scope._parts) < 100


def test_what_a_trace_held_goes_with_it(quick: starscope.Model) -> None:
    gc.disable()
    try:
        with quick.trace(PROMPT) as t:
            forward = weakref.ref(t._running())
            kept = quick.layers[0].layer_output
            value = weakref.ref(quick.layers[1].layer_output)
        del t
        assert forward() is None
        assert value() is None
        with quick.trace(PROMPT, max_new_tokens=2) as t:
            caches = [weakref.ref(one) for one in t._running().caches]
        assert all(one() is None for one in caches)
        with pytest.raises(KeyError), quick.trace(PROMPT) as t:  # noqa: PT012
            forward = weakref.ref(t._running())
            raise KeyError
        del t
        gc.collect()  # the exception held its frames
        assert forward() is None
    finally:
        gc.enable()
    assert kept.any()


def test_after_any_error_the_next_run_has_the_same_bits(model: starscope.Model) -> None:
    plain, never = logits_of(model, PROMPT), dict.fromkeys(model.tokenizer.stop_ids, -1e9)
    for name in value_names(model):
        with pytest.raises(ZeroDivisionError), model.trace(PROMPT, max_new_tokens=2, logit_bias=never) as t:  # noqa: PT012
            for step in t.steps():
                value = read(model, name)
                value[:] = 0
                write(model, name, value.clone() + 1)
                if step == 1:
                    1 / 0  # noqa: B018
        assert same(logits_of(model, PROMPT), plain), name


def test_after_an_edited_run_plain_generation_is_that_of_a_fresh_process(opened: Any) -> None:
    texts = [TEXT, TEXT + " + b\n", TEXT + " + b\n\nfor i in self:\n    print", "x"]
    engines = ["native", "numpy", "torch"]
    code = (
        "import json, sys, starscope\n"
        "made, texts = {}, json.load(sys.stdin)\n"
        "for engine in sys.argv[2:]:\n"
        "    model = starscope.load(sys.argv[1], engine=engine, threads=1)\n"
        "    made[engine] = [model.generate(text, max_new_tokens=12).token_ids for text in texts]\n"
        "print(json.dumps(made))\n"
    )
    path = str(opened("numpy", "q8_0").path)
    done = subprocess.run(
        [sys.executable, "-c", code, path, *engines],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(done.stdout)
    for engine in engines:
        model = opened(engine, "q8_0")
        for text, ids in zip(texts, expected[engine], strict=True):
            with model.trace(TEXT, max_new_tokens=4) as t:
                for _ in t.steps():
                    model.layers[0].self_attn.attention_keys[:] = 3
                    model.layers[0].self_attn.attention_values[:] *= -2
                    model.layers[1].layer_output[:] += 5
                    model.logits[:, -1] *= -1
            assert model.generate(text, max_new_tokens=12).token_ids == ids, engine


def test_a_trace_in_the_midst_of_a_streamed_generation_disturbs_neither(model: starscope.Model) -> None:
    plain = logits_of(model, PROMPT)
    expected = model.generate(TEXT, max_new_tokens=8).token_ids
    pieces = model.generate(TEXT, max_new_tokens=8, stream=True)
    completion = None
    for piece in pieces:
        with model.trace(PROMPT) as t:
            model.layers[0].self_attn.attention_keys[:] += 0
            _ = model.logits
        assert same(t.result.logits, plain)
        completion = piece.completion or completion
    assert completion is not None
    assert completion.token_ids == expected
    with model.trace(PROMPT):
        _ = model.layers[0].layer_output
        assert model.generate(TEXT, max_new_tokens=8).token_ids == expected
        assert same(model.forward(PROMPT)[:, -1], plain[:, -1]) or model.engine.name != "native"
        assert same(model.logits, plain)
