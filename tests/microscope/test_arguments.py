"""What traces and their methods are given: prompts, modules' values, places to steer; and what of it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.engine import ENGINES
from starscope.errors import (
    ContextOverflowError,
    DoesNotFitError,
    InvalidContentError,
    OutOfOrder,
    TraceError,
    UsageError,
    ValueShapeError,
)
from starscope.microscope import forward
from starscope.microscope.names import HOOKS, NODES
from support.checkpoints import make_checkpoint
from support.traces import all_values, logits_of, multiplied, part_of, read, same, value_names, value_ulps

PROMPT = [40, 33, 250, 7, 61]
BATCH = [PROMPT, PROMPT[:2]]


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", UsageError, "empty"),
        ([], UsageError, "empty list"),
        ([[]], InvalidContentError, "no token"),
        ([[], [1]], InvalidContentError, "no token"),
        (["a", [1]], UsageError, "several kinds"),
        (b"abc", InvalidContentError, "bytes"),
        (3, InvalidContentError, "int was given"),
        ([1.5], UsageError, "integers"),
        ({1: 2}, UsageError, "dict"),
        ([10**9], InvalidContentError, "out of range; expected 0 to 319"),
        ([-1], InvalidContentError, "out of range"),
        ([[1], [10**9]], InvalidContentError, "out of range"),
        ([True, False], InvalidContentError, "bool"),
        (np.zeros((3, 5), np.float32), InvalidContentError, r"expected float \[n 64\]"),
        (np.zeros((0, 64), np.float32), InvalidContentError, "no token"),
        ([1] * 129, ContextOverflowError, "the context is 128"),
    ],
    ids=lambda one: str(one)[:12],
)
def test_a_prompt_that_is_none_is_refused_in_words(quick: starscope.Model, prompt: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match), quick.trace(prompt):
        _ = quick.logits
    assert same(logits_of(quick, PROMPT), logits_of(quick, np.array(PROMPT)))


def test_a_prompt_may_be_any_kind_of_list_of_ids(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)
    for one in (tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT), np.array(PROMPT, np.int32), [PROMPT]):
        assert same(logits_of(quick, one), plain)
    two = logits_of(quick, [PROMPT, PROMPT])
    for several in ((PROMPT, PROMPT), np.array([PROMPT] * 2), torch.tensor([PROMPT] * 2), [torch.tensor(PROMPT)] * 2):
        assert same(logits_of(quick, several), two)


@pytest.mark.parametrize("prompts", [[PROMPT], BATCH], ids=["alone", "batch"])
def test_what_goes_into_every_module_and_comes_out_is_read_and_written(quick: starscope.Model, prompts: Any) -> None:
    plain = logits_of(quick, prompts)
    for path, part in quick.scope.names.parts.items():
        for end in ("input", "output"):
            if (
                path == "layers"
                or (path.endswith("self_attn") and end == "output")
                or (part.kind, end)
                == (
                    "Embedding",
                    "input",
                )
            ):
                continue
            owner, _ = part_of(quick, f"{path}.x" if path else "x")
            if not path:
                continue
            with quick.trace(prompts) as t:
                value = getattr(owner, end)
                assert value.shape[:2] == (len(prompts), len(PROMPT)), (path, end)
                value *= 1.5
            changed = t.result.logits
            assert not same(changed, plain), (path, end)
            with quick.trace(prompts) as t:
                setattr(owner, end, value)
            assert same(t.result.logits, changed), (path, end)
            with quick.trace(prompts), pytest.raises(ValueShapeError):
                setattr(owner, end, value[:, 1:])


def test_modules_are_linear_layers_of_their_inputs(model: starscope.Model) -> None:
    for path in ("self_attn.c_attn", "self_attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        part, last = part_of(model, f"layers.1.{path}")
        module = getattr(part, last)
        with model.trace(PROMPT):
            x, y = module.input, module.output
        x = multiplied(model, x, f"{module.path}.weight")
        assert value_ulps(x @ module.weight.T + module.bias, y) <= 32
    with model.trace(PROMPT):
        x, y = model.layers[1].mlp.act_fn.input, model.layers[1].mlp.act_fn.output
    assert value_ulps(torch.nn.functional.gelu(x, approximate="tanh"), y) <= 32


def test_nodes_and_hooks_of_other_tools_are_the_same_values(quick: starscope.Model) -> None:
    with quick.trace(PROMPT):
        expected = all_values(quick)
    for node, name in NODES.items():
        path = name if name in expected else f"layers.1.self_attn.{name}"
        if name == "input_ids":
            continue
        owner = quick if name in expected else quick.transformer.h[1].attn
        with quick.trace(PROMPT):
            assert same(getattr(owner, node), expected[path]), node
        with quick.trace(PROMPT) as t:
            value = getattr(owner, node)
            setattr(owner, node, value * 2)
        assert not same(t.result.logits, expected["logits"]), node
    for hook, name in HOOKS.items():
        with quick.trace(PROMPT) as t:
            t.keep(hook.format(i=1))
            _ = quick.logits
            path = name.format(i=1)
            assert same(read(quick, path), expected.get(path, read(quick, path))), hook
    for wrong in ("layer_output", "layers.9.layer_output", "blocks.1.hook_nothing", "", "layers.1.layer_outptu"):
        with quick.trace(PROMPT) as t, pytest.raises(TraceError, match="no value is called"):
            t.keep(wrong)


def test_steering_takes_layers_and_places_of_every_kind(quick: starscope.Model) -> None:
    vector = torch.from_numpy(np.random.default_rng(0).normal(size=quick.hidden_size).astype(np.float32))

    def steered(*args: Any, **options: Any) -> Any:
        with quick.trace([PROMPT, PROMPT[::-1]]) as t:
            quick.steer(*args, **options)
        return t.result.logits

    def by_hand(layers: Any, rows: Any, cols: Any) -> Any:
        with quick.trace([PROMPT, PROMPT[::-1]]) as t:
            for layer in layers:
                for row in rows:
                    for col in cols:
                        quick.layers[layer].layer_output[row, col] += 2 * vector
        return t.result.logits

    every, both = range(len(PROMPT)), range(2)
    for layers in (1, np.int64(1), -2, [1], np.array([1])):
        assert same(steered(layers, vector, 2), by_hand([1], both, every))
    for layers in ([0, 2], [2, 0], [-1, 0], range(0, 3, 2), (2, 0)):
        assert same(steered(layers, vector, 2.0), by_hand([0, 2], both, every))
    for given in (vector.numpy(), vector.double(), vector.tolist()):
        assert same(steered(1, given, 2), by_hand([1], both, every))
    for cols, rows in (([0, -1], [0, 1]), (torch.tensor([0, 4]), [0, 1]), (np.array([0, -1]), torch.tensor([1, 0]))):
        assert same(steered(1, vector, 2, cols, rows), by_hand([1], both, [0, 4]))
    assert same(steered(1, vector, 2, slice(1, 3), 1), by_hand([1], [1], [1, 2]))
    assert same(steered(1, vector, 2, token_positions=-1), by_hand([1], both, [4]))
    assert same(steered(1, vector, 2, batch_index=[0]), by_hand([1], [0], every))


def test_steering_nowhere_or_with_another_vector_is_refused(quick: starscope.Model) -> None:
    plain = logits_of(quick, PROMPT)
    with quick.trace(PROMPT) as t:
        for wrong in (torch.zeros(5), torch.zeros(1, quick.hidden_size), 3.0):
            with pytest.raises(ValueShapeError, match=r"expected \[64\]"):
                quick.steer(0, wrong)
        vector = torch.ones(quick.hidden_size)
        with pytest.raises(IndexError, match="layer 3 is out of range"):
            quick.steer([0, 3], vector)
        with pytest.raises(IndexError):
            quick.steer(0, vector, token_positions=99)
    assert same(t.result.logits, plain)


def test_skipping_is_of_ranges_that_have_not_begun(quick: starscope.Model) -> None:
    with quick.trace(PROMPT):
        first = quick.layers[0].layer_output
        for wrong in ((2, 1), (-1, 0)):
            with pytest.raises(UsageError, match="not a range"):
                quick.skip_layers(*wrong)
        with pytest.raises(IndexError, match="out of range"):
            quick.skip_layers(0, 3)
        with pytest.raises(OutOfOrder, match="had begun"):
            quick.skip_layers(0, 1)
        with pytest.raises(ValueShapeError, match="skip_with"):
            quick.skip_layer(1, torch.zeros(len(PROMPT), quick.hidden_size))
        quick.skip_layer(1)
        quick.skip_layer(2)
        assert same(quick.layers[2].layer_output, first)
        assert same(quick.logits, quick.project_on_vocab(first))
    with quick.trace(PROMPT) as t:
        quick.layers[1].layer_input[:] *= -2  # before it is passed on
        before = quick.layers[1].layer_input.clone()
        quick.skip_layers(1, -1)
        quick.layers[2].layer_output[:, -1] *= 3  # and after
        after = quick.layers[2].layer_output.clone()
    assert same(after[:, :-1], before[:, :-1])
    assert same(t.result.logits, quick.project_on_vocab(after))


def test_projections_of_what_is_no_stream_are_refused(quick: starscope.Model) -> None:
    for wrong in (torch.zeros(3), torch.zeros(2, 3), torch.zeros(())):
        with pytest.raises(UsageError, match="hidden is"):
            quick.project_on_vocab(wrong)
    one = torch.randn(quick.hidden_size, generator=torch.Generator().manual_seed(0))
    assert quick.project_on_vocab(one).shape == (quick.vocab_size,)
    assert quick.project_on_vocab(one.expand(2, 1, 3, -1)).shape == (2, 1, 3, quick.vocab_size)
    [top] = quick.get_topk_closest_tokens(one, k=quick.vocab_size)
    assert len(top) == quick.vocab_size  # two tokens of one text have two names
    for k in (0, quick.vocab_size + 1):
        with pytest.raises(UsageError):
            quick.get_topk_closest_tokens(one, k=k)


@pytest.mark.parametrize("to", ["q4_k_m", "q5_k_s", "q4_0", "bf16", "f16", "q5_1"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_files_of_every_mixture_are_traced(tmp_path_factory: pytest.TempPathFactory, engine: str, to: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "wide"
    if not folder.exists():
        folder.mkdir()
        make_checkpoint(folder, hidden=256, heads=4, positions=64)
    file = folder / f"{to}.gguf"
    if not file.exists():
        convert(folder, file, to=to)
    model = starscope.load(file, engine=engine, threads=1)
    plain = logits_of(model, PROMPT)
    with model.trace(PROMPT) as t:
        values = all_values(model)
    assert same(t.result.logits, plain)
    assert all(torch.isfinite(value).all() for value in values.values())
    for name in value_names(model, [1]):
        with model.trace(PROMPT) as t:
            read(model, name)[:, -1:] *= 0.5
        assert torch.isfinite(t.result.logits).all()
        if "keys" not in name and "scores" not in name:
            assert not same(t.result.logits, plain) or "values" in name, name


def test_a_weight_changed_in_place_is_an_error_when_it_is_asked_for_again_and_then_whole() -> None:
    model = starscope.load("demo", engine="native")
    weight = model.layers[0].self_attn.c_attn.weight
    before = weight.clone()
    weight[0, 0] += 1
    with pytest.raises(TraceError, match=r"model.layers\[0\].self_attn.qkv_proj.weight was changed in place"):
        model.layers[0].self_attn.c_attn.weight  # noqa: B018
    assert torch.equal(model.layers[0].self_attn.c_attn.weight, before)


def test_a_value_of_a_blocks_part_may_be_named_by_the_block_alone() -> None:
    names = starscope.load("demo").scope.names
    assert names.reading("layers.3.attention_output").name == "layers.3.self_attn.attention_output"
    with pytest.raises(TraceError, match="a value's name is 3"):
        names.reading(3)


@pytest.mark.parametrize("engine", ENGINES)
def test_large_values_that_the_body_lets_go_of_are_let_go_and_those_that_do_not_fit_are_refused(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = starscope.load("demo", engine=engine)
    monkeypatch.setattr(forward, "LARGE", 100)
    with model.trace(PROMPT) as t:
        for block in model.layers:
            block.self_attn.attention_probabilities.sum()
        last = model.layers[-1].layer_output
        held = t._forward._served
        kept = {t.edges.facts[edge].name for edge in held}
        assert kept == {"layers.5.layer_output"}
        assert model.layers[-1].layer_output is last
    with model.trace(PROMPT):
        first = model.layers[0].layer_output
        first_again = model.layers[0].layer_output
        model.layers[2].layer_output  # noqa: B018
        assert model.layers[0].layer_output is first is first_again
    monkeypatch.setattr(forward, "free_memory", lambda: 5000)
    needs = "layers.0.layer_output needs 10.0 KiB of memory; 4.9 KiB are free"
    with pytest.raises(DoesNotFitError, match=needs), model.trace(PROMPT):
        model.layers[0].layer_output  # noqa: B018
