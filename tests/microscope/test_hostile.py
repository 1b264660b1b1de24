"""What odd uses of traces and edits come to: the numbers that were meant, or an error in words; never other numbers."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.errors import OutsideTrace, Stopped, UsageError, ValueShapeError
from starscope.microscope import Edit
from support.traces import logits_of, same

PROMPT = [40, 33, 250, 7, 61]
COUNT = torch.arange(1.0, 65).expand(1, len(PROMPT), 64)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: setattr(value, "data", COUNT.clone()), id="data"),
        pytest.param(lambda value: value.set_(COUNT.clone()), id="set_"),
        pytest.param(lambda value: value.share_memory_().copy_(COUNT.clone()), id="share"),
        pytest.param(lambda value: value.mul_(0).add_(torch.nn.Parameter(COUNT)), id="parameter"),
        pytest.param(lambda value: value.requires_grad_().data.copy_(COUNT), id="requires_grad"),
        pytest.param(lambda value: torch.add(value.mul(0), COUNT, out=value), id="out"),
        pytest.param(lambda value: np.copyto(value.numpy(), COUNT.numpy()), id="numpy"),
    ],
)
def test_other_numbers_put_into_a_value_by_any_means_are_used(quick: starscope.Model, change: Any) -> None:
    plain = logits_of(quick, PROMPT)
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_output = COUNT
    expected = t.result.logits
    assert not same(expected, plain)
    with quick.trace(PROMPT) as t:
        change(quick.layers[1].layer_output)
        assert same(quick.logits.detach(), expected)
    assert same(logits_of(quick, PROMPT), plain)


def test_a_pattern_that_is_turned_in_place_is_used_as_it_is_then(quick: starscope.Model) -> None:
    with quick.trace(PROMPT) as t:
        pattern = quick.layers[1].self_attn.attention_probabilities
        quick.layers[1].self_attn.attention_probabilities = pattern.transpose(2, 3).clone()
    expected = t.result.logits
    with quick.trace(PROMPT) as t:
        quick.layers[1].self_attn.attention_probabilities.transpose_(2, 3)
    assert same(t.result.logits, expected)


def test_a_value_in_another_shape_is_refused_when_it_is_used(quick: starscope.Model) -> None:
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_output.transpose_(1, 2).add_(torch.arange(5.0))
        with pytest.raises(ValueShapeError, match=r"is \[1, 64, 5\] now; expected \[1, 5, 64\]"):
            _ = quick.logits
        t.stop()


@pytest.mark.parametrize(
    "given",
    [
        None,
        "abc",
        ["a"],
        [[1.0], [1.0, 2.0]],
        {"a": 1},
        np.full((1, 5, 64), None),
        torch.empty(1, 5, 64, device="meta"),
        torch.ones(1, 5, 64, dtype=torch.complex64),
        np.ones((1, 5, 64), complex),
        torch.ones(1, 5, 64, dtype=torch.bool),
    ],
    ids=["None", "text", "texts", "ragged", "dict", "objects", "meta", "complex", "complex array", "bool"],
)
def test_what_is_no_tensor_of_numbers_is_refused_and_the_run_goes_on(quick: starscope.Model, given: Any) -> None:
    with quick.trace(PROMPT) as t, pytest.raises(ValueShapeError, match="layer_output was given"):
        quick.layers[1].layer_output = given
    assert same(t.result.logits, logits_of(quick, PROMPT))


@pytest.mark.parametrize(
    "given",
    [
        np.ones((1, 5, 64), np.float32)[:, ::-1],
        np.ones((1, 5, 64), ">f4"),
        np.ones((1, 5, 64), np.longdouble),
        torch.ones(1, 5, 64).to_sparse(),
    ],
    ids=["backwards", "big-endian", "long double", "sparse"],
)
def test_numbers_in_any_order_of_memory_are_taken(quick: starscope.Model, given: Any) -> None:
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_output = given
    made = t.result.logits
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_output = torch.ones(1, 5, 64)
    assert same(made, t.result.logits)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[starscope.Model, int], None]]:
    """interrupting(model, n): Ctrl-C comes in the n-th piece of work of the next pass, half done."""

    def interrupt(model: starscope.Model, number: int) -> None:
        engine: Any = model.scope.engine
        begin, left = engine.begin, [number]

        def begun(*given: Any, **options: Any) -> Any:
            made = begin(*given, **options)
            run = made.run

            def interrupted(stop: int) -> None:
                run((made.done + stop) // 2 if left[0] == 1 else stop)
                left[0] -= 1
                if not left[0]:
                    signal.raise_signal(signal.SIGINT)

            made.run = interrupted
            return made

        monkeypatch.setattr(engine, "begin", begun)

    yield interrupt
    monkeypatch.undo()


def test_a_run_that_was_interrupted_in_its_work_gives_no_more_values(
    quick: starscope.Model, interrupting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits_of(quick, PROMPT)
    interrupting(quick, 2)
    with quick.trace(PROMPT) as t:
        _ = quick.layers[0].layer_output
        with pytest.raises(KeyboardInterrupt):
            _ = quick.layers[2].layer_output
        with pytest.raises(Stopped):
            _ = quick.logits
    with pytest.raises(Stopped, match="no result"):
        _ = t.result
    monkeypatch.undo()
    assert same(logits_of(quick, PROMPT), plain)


def test_threads_that_share_a_trace_take_turns(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)
    for _ in range(10):
        with quick.trace(PROMPT), ThreadPoolExecutor(4) as pool:
            begun = threading.Barrier(4)

            def read(begun: threading.Barrier = begun) -> list[Any]:
                begun.wait()
                return [block.layer_output for block in quick.layers][-1:]

            asked = [pool.submit(copy_context().run, read) for _ in range(4)]
            first, *others = [future.result() for future in asked if future.exception() is None]
            assert all(one[0] is first[0] for one in others)
            assert same(quick.logits, plain)


ZERO = Edit("layer_output", "zero", layers=1)
TURN = Edit("layer_output", "scale", layers=0, factor=-1)


def test_blocks_of_edits_may_be_left_in_any_order(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)

    def generate() -> Generator[None]:
        with quick.editing(ZERO):
            yield

    generated = generate()
    next(generated)
    with quick.editing(TURN):
        generated.close()
        inside = logits_of(quick, PROMPT)
    assert same(inside, logits_of(quick.with_edits(TURN), PROMPT))
    assert same(logits_of(quick, PROMPT), plain)


def test_a_block_of_edits_may_be_left_in_another_context(quick: starscope.Model) -> None:
    plain, block = logits_of(quick, PROMPT), quick.editing(ZERO)
    entered = copy_context()
    entered.run(block.__enter__)
    block.__exit__(None, None, None)
    assert same(logits_of(quick, PROMPT), plain)


@pytest.mark.parametrize("given", [None, 3, "ab", {"value": "logits"}])
def test_edits_that_are_none_are_refused(quick: starscope.Model, given: Any) -> None:
    with pytest.raises(UsageError, match="expected an Edit or a list of them"):
        quick.editing(given).__enter__()
    with pytest.raises(UsageError, match="expected an Edit or a list of them"):
        quick.with_edits(given)


@pytest.mark.parametrize("names", [None, 5, [None], b"logits", [["logits"]]], ids=str)
def test_names_that_are_none_are_refused_and_the_run_goes_on(quick: starscope.Model, names: Any) -> None:
    with quick.trace(PROMPT) as t, pytest.raises(UsageError, match="for the name of a value"):
        t.keep(names)
    assert same(t.result.logits, logits_of(quick, PROMPT))
    if names is not None:
        with pytest.raises(UsageError, match="for the name of a value"):
            quick.run_with_cache(PROMPT, names)


@pytest.mark.parametrize("rows", [np.array(1), torch.tensor(1), np.int64(1)], ids=["array", "tensor", "number"])
def test_one_number_of_an_array_library_is_one(quick: starscope.Model, rows: Any) -> None:
    kept = [quick.run_with_cache(PROMPT, "layers.1.layer_output", rows=one)[1] for one in (rows, 1)]
    assert same(*(one["layers.1.layer_output"] for one in kept))
    assert Edit("layer_output", "zero", layers=rows) == Edit("layer_output", "zero", layers=1)
    with pytest.raises(UsageError, match="expected positions"):
        quick.run_with_cache(PROMPT, "layers.1.layer_output", rows=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["{x}", "{", "layers.{i}.{x}", "{0}"])
def test_braces_in_a_name_are_part_of_the_name(quick: starscope.Model, value: str) -> None:
    with pytest.raises(UsageError, match="no value is called"):
        quick.with_edits(Edit(value, "zero"))


@pytest.mark.parametrize("index", ["a", 1.0, None, (0, 1), 3, -4])
def test_a_layer_that_is_none_is_an_index_error_in_words(quick: starscope.Model, index: Any) -> None:
    for blocks in (quick.layers, quick.transformer.h, quick.blk):
        with pytest.raises(IndexError, match="this model has layers 0 to 2"):
            _ = blocks[index]
    with quick.trace(PROMPT) as t:
        with pytest.raises(IndexError, match="this model has layers 0 to 2"):
            quick.skip_layers(index, 2)
        with pytest.raises(IndexError, match="this model has layers 0 to 2"):
            quick.steer([index], np.ones(64, np.float32))
        t.stop()


@pytest.mark.parametrize("places", [None, -1, [-1, 0]], ids=str)
def test_a_parameter_steers_as_its_numbers_do(quick: starscope.Model, places: Any) -> None:
    vector = torch.randn(64)
    made = []
    for given in (vector, torch.nn.Parameter(vector)):
        with quick.trace(PROMPT) as t:
            quick.steer([0, 2], given, factor=2.0, token_positions=places)
        made.append(t.result.logits)
    assert same(*made)


def test_no_rows_have_no_logits(quick: starscope.Model) -> None:
    assert quick.project_on_vocab(torch.zeros(0, 64)).shape == (0, 320)
    assert quick.project_on_vocab(torch.zeros(2, 0, 64)).shape == (2, 0, 320)
    assert quick.get_topk_closest_tokens(torch.zeros(0, 64)) == []


def test_steps_of_a_trace_that_was_not_entered_are_refused(quick: starscope.Model) -> None:
    with pytest.raises(OutsideTrace, match="not been entered"):
        list(quick.trace(PROMPT, max_new_tokens=2).steps())


def test_sizes_can_be_copied_and_stored(quick: starscope.Model) -> None:
    for made in (copy.deepcopy(quick.hparams), copy.copy(quick.hparams), pickle.loads(pickle.dumps(quick.hparams))):
        assert dict(made) == dict(quick.hparams)
