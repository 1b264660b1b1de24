"""`run_with_cache`: exactly what was asked for, of the positions that were asked for, planned before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import starscope
from starscope.engine.base import ENGINES
from starscope.engine.torch_pass import TorchPass
from starscope.errors import ContextOverflowError, DoesNotFitError, OutputExistsError, UnsupportedError, UsageError
from starscope.microscope import Edit, cached
from starscope.values import VALUES
from support.numbers import TOLERANCE, ulps

PROMPTS = ["def add(a, b):\n    return a", "x = 1"]
ROWS = [-1, 0, 3]
BEHIND_HEADS = ("Queries", "Keys", "Values", "Pattern")  # layouts with positions on axis 2


@pytest.fixture(scope="module", params=list(ENGINES))
def model(request: pytest.FixtureRequest) -> starscope.Model:
    return starscope.load("demo", engine=request.param)


@pytest.fixture(scope="module")
def plain() -> starscope.Model:
    return starscope.load("demo", engine="numpy")


def traced(model: starscope.Model, prompt: Any, name: str) -> Any:
    with model.trace(prompt):
        return model.scope.get(name)


def seen(value: Any, name: str) -> Any:
    """A value without what is masked, whose size would hide every difference."""
    return value.clamp(min=-1e30) * (value > -1e30) if name.endswith("scores") else value


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS], ids=["one", "two lengths"])
def test_every_value_is_that_of_a_trace(model: starscope.Model, prompt: Any) -> None:
    logits, cache = model.run_with_cache(prompt)
    with model.trace(prompt):
        for name in cache:
            value = model.scope.get(name)
            assert value.shape == cache[name].shape
            assert value.dtype == cache[name].dtype
            if name == "next_token_probs":
                torch.testing.assert_close(value, cache[name])
            else:
                assert torch.equal(value, cache[name]), name
        assert torch.equal(model.logits, logits)
    assert {name.rpartition(".")[2] for name in cache} == VALUES.keys()
    assert cache["logits"] is logits


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS], ids=["one", "two lengths"])
def test_rows_are_those_positions_of_every_value(model: starscope.Model, prompt: Any) -> None:
    logits, cache = model.run_with_cache(prompt)
    some, kept = model.run_with_cache(prompt, rows=ROWS)
    assert kept.keys() == cache.keys()
    assert ulps(some, logits[:, ROWS]) <= TOLERANCE
    for name in kept:
        layout, _ = kept.layout(name)
        expected = cache[name][:, :, ROWS] if layout in BEHIND_HEADS else cache[name][:, ROWS]
        expected = cache[name] if name == "next_token_probs" else expected
        assert kept[name].shape == expected.shape
        assert ulps(seen(kept[name], name), seen(expected, name)) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("rows", "positions"),
    [(-1, [-1]), ([2, 1], [2, 1]), (slice(1, None, 2), [1, 3, 5, 7, 9]), (slice(-2, None), [8, 9])],
)
def test_rows_may_be_a_number_a_list_or_a_slice(plain: starscope.Model, rows: Any, positions: list[int]) -> None:
    _, whole = plain.run_with_cache(PROMPTS[0], "layers.1.layer_mid")
    _, cache = plain.run_with_cache(PROMPTS[0], "layers.1.layer_mid", rows=rows)
    assert torch.equal(cache["layers.1.layer_mid"], whole["layers.1.layer_mid"][:, positions])
    assert cache.rows == [one % 10 for one in positions]


def test_torch_computes_the_patterns_of_those_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = starscope.load("demo", engine="torch")
    names = ["layers.*.self_attn.attention_probabilities", "layers.2.self_attn.attention_scores"]
    _, whole = model.run_with_cache(PROMPTS, names)
    monkeypatch.setattr(TorchPass, "_pattern", None)  # of all queries
    _, cache = model.run_with_cache(PROMPTS, names, rows=ROWS)
    for name in cache:
        assert ulps(seen(cache[name], name), seen(whole[name][:, :, ROWS], name)) <= TOLERANCE


def test_exactly_what_was_asked_for_is_kept(plain: starscope.Model) -> None:
    _, cache = plain.run_with_cache(PROMPTS[0], ["blocks.3.attn.hook_pattern", "layers.*.layer_mid"])
    assert list(cache) == ["layers.3.self_attn.attention_probabilities", *(f"layers.{i}.layer_mid" for i in range(6))]
    assert len(cache) == 7
    with pytest.raises(KeyError, match=r"layers.1.layer_output was not kept. Name it when the model runs"):
        cache["layers.1.layer_output"]
    with pytest.raises(KeyError, match=r"no value is called 'layers.1.layer_outptu'. Near: "):
        cache["layers.1.layer_outptu"]
    assert "logits" not in cache
    assert cache.get("logits") is None


def bytes_behind(array: Any) -> int:
    """What an array keeps alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.nbytes)


@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "some"])
def test_nothing_larger_stays_behind_a_value(model: starscope.Model, rows: Any) -> None:
    _, cache = model.run_with_cache(PROMPTS, ["*", "layers.*.self_attn.c_attn.output"], rows=rows)
    for name, array in cache.to_numpy().items():
        assert bytes_behind(array) == array.nbytes, name


def test_a_value_has_all_of_its_names(plain: starscope.Model) -> None:
    _, cache = plain.run_with_cache(
        PROMPTS[0], ["blocks.3.attn.hook_pattern", "layers.*.layer_output", "layers.4.layer_input"]
    )
    pattern = cache["layers.3.self_attn.attention_probabilities"]
    assert cache["blocks.3.attn.hook_pattern"] is pattern
    assert cache["KQ_soft_max-3"] is pattern
    assert cache["model.layers[3].self_attn.attention_probabilities"] is pattern
    assert cache["layers.3.layer_output"] is cache["layers.4.layer_input"]


def test_module_reads_are_kept_as_the_modules_give_them(plain: starscope.Model) -> None:
    names = ["transformer.h.1.attn.c_attn.output", "layers.1.self_attn.o_proj.input", "transformer.wpe.output"]
    _, cache = plain.run_with_cache(PROMPTS, names)
    for name in names:
        assert torch.equal(cache[name], traced(plain, PROMPTS, name))
    assert cache.layout(names[0]) == (None, ("batch", "seq", "features"))


@pytest.fixture
def ran(plain: starscope.Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The operations that a NumPy engine has run."""
    done: list[int] = []

    def noted(kernel: Any) -> Any:
        def run(engine: Any, batch: Any, op: Any, inputs: Any) -> Any:
            done.append(op.index)
            return kernel(engine, batch, op, inputs)

        return run

    kernels = {kind: noted(kernel) for kind, kernel in type(plain.engine).kernels.items()}  # type: ignore[attr-defined]
    monkeypatch.setattr(type(plain.engine), "kernels", kernels)
    return done


@pytest.mark.parametrize(("layer", "blocks"), [(0, 0), (2, 2), (-1, 5), (6, 6)])
def test_stop_at_layer_runs_the_blocks_before_it_and_nothing_else(
    plain: starscope.Model, ran: list[int], layer: int, blocks: int
) -> None:
    logits, cache = plain.run_with_cache(PROMPTS[0], "layers.*.layer_input", stop_at_layer=layer)
    assert logits is None
    # The input of the block after the last one is there too: what the last one gives.
    assert list(cache) == [f"layers.{i}.layer_input" for i in range(min(blocks + 1, 6))]
    ran.clear()
    plain.run_with_cache(PROMPTS[0], stop_at_layer=layer)
    assert {plain.graph.ops[i].layer for i in ran} == {None, *range(blocks)}
    assert not {plain.graph.ops[i].kind for i in ran if plain.graph.ops[i].layer is None} - {"embed", "add"}


def test_what_comes_after_the_stop_is_left_out_of_patterns_and_refused_by_name(plain: starscope.Model) -> None:
    _, cache = plain.run_with_cache(PROMPTS[0], "layers.*.layer_mid", stop_at_layer=2)
    assert list(cache) == ["layers.0.layer_mid", "layers.1.layer_mid"]
    for name in ("layers.2.layer_mid", "logits", "next_token_probs"):
        with pytest.raises(UsageError, match=f"{name} is made after the run has stopped"):
            plain.run_with_cache(PROMPTS[0], name, stop_at_layer=2)
    with pytest.raises(UsageError, match="nothing that was asked for is made before the run stops"):
        plain.run_with_cache(PROMPTS[0], "layers.[45].layer_mid", stop_at_layer=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": [10]}, r"row 10 is out of range; the prompt has 10 positions, -10 to 9"),
        ({"rows": -11}, r"row -11 is out of range"),
        ({"rows": []}, r"rows selects no position"),
        ({"rows": slice(4, 4)}, r"rows selects no position"),
        ({"rows": [True]}, r"rows has True; expected positions"),
        ({"rows": ["last"]}, r"rows has 'last'; expected positions"),
        ({"stop_at_layer": 7}, r"stop_at_layer is 7; expected a block, -6 to 6"),
        ({"stop_at_layer": "2"}, r"stop_at_layer is '2'"),
    ],
    ids=str,
)
def test_what_selects_nothing_is_refused(plain: starscope.Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plain.run_with_cache(PROMPTS[0], "layers.0.layer_mid", **options)


@pytest.fixture
def no_run(model: starscope.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any) -> None:
        pytest.fail("something ran")

    monkeypatch.setattr(model.engine, "begin", begin)


def test_too_much_to_keep_is_an_error_before_anything_runs(
    model: starscope.Model, no_run: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "free_memory", lambda: 30_000_000)
    ids = [1] * 500
    kept = 6 * 4 * 500 * 500 * 4 + 2 * 500 * 2560 * 4  # patterns; the logits, and what they are put together from
    said = rf"what is kept of 500 tokens takes {kept:,} bytes, and the run [\d,]+; 30,000,000 bytes are free"
    with pytest.raises(DoesNotFitError, match=said) as error:
        model.run_with_cache(ids, "layers.*.self_attn.attention_probabilities")
    assert error.value.hint == "Ask for fewer values, or only for some positions, as in rows=[-1]."
    monkeypatch.setattr(cached, "free_memory", lambda: 1_000_000)  # for what is kept, but not for what runs
    with pytest.raises(DoesNotFitError, match="what is kept of 500 tokens takes 21,504 bytes"):
        model.run_with_cache(ids, "layers.0.layer_mid", rows=[-1])
    with pytest.raises(ContextOverflowError, match="the context is 512 tokens"):
        model.run_with_cache([1] * (model.context_length + 1))


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_with_rows_alone_it_fits(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = starscope.load("demo", engine=engine)
    monkeypatch.setattr(cached, "free_memory", lambda: 30_000_000)
    _, cache = model.run_with_cache([1] * 500, "layers.*.self_attn.attention_probabilities", rows=[-1])
    assert cache["layers.5.self_attn.attention_probabilities"].shape == (1, 4, 1, 500)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_run_whose_scores_are_changed_needs_room_for_all_of_them(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = starscope.load("demo", engine=engine)
    monkeypatch.setattr(cached, "free_memory", lambda: 0)

    def needed() -> int:
        with pytest.raises(DoesNotFitError) as error:
            model.run_with_cache([1] * 500, "layers.0.layer_mid")
        return int(error.value.message.split("the run ")[1].split(";")[0].replace(",", ""))

    plain = needed()
    with model.editing(Edit("layer_mid", "scale", factor=2.0)):
        assert needed() == plain
    with model.editing(Edit("attention_scores", "scale", layers=2, factor=2.0)):
        assert needed() > 2 * model.num_heads * 500 * 500 * 4 > plain


def test_embeddings_have_every_value_but_ids(model: starscope.Model) -> None:
    ids = model.tokenizer.encode(PROMPTS[0])
    expected, _ = model.run_with_cache(PROMPTS[0], "logits")
    logits, cache = model.run_with_cache(model.weights["embed_tokens.weight"][ids])
    assert ulps(logits, expected) <= TOLERANCE
    assert "input_ids" not in cache
    assert cache.prompt_ids is None
    with pytest.raises(UnsupportedError, match="there are no input_ids"):
        model.run_with_cache(np.zeros((2, model.hidden_size), np.float32), "input_ids")


def test_the_cache_is_saved_with_what_it_is_and_the_same_run_gives_the_same_bytes(
    plain: starscope.Model, tmp_path: Path
) -> None:
    from safetensors import safe_open

    _, cache = plain.run_with_cache(PROMPTS, ["blocks.0.hook_mlp_out", "input_ids"], rows=[-2, -1])
    size = cache.save(tmp_path / "a.safetensors")
    plain.run_with_cache(PROMPTS, ["blocks.0.hook_mlp_out", "input_ids"], rows=[-2, -1])[1].save(
        tmp_path / "b.safetensors"
    )
    data = (tmp_path / "a.safetensors").read_bytes()
    assert data == (tmp_path / "b.safetensors").read_bytes()
    assert len(data) == size
    assert int.from_bytes(data[:8], "little") % 8 == 0  # the numbers begin at a multiple of 8
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert set(file.keys()) == set(cache)
        for name in cache:
            assert np.array_equal(file.get_tensor(name), cache.to_numpy()[name])
            assert file.get_tensor(name).dtype == cache.to_numpy()[name].dtype
        metadata = file.metadata()
    assert json.loads(metadata["prompt_ids"]) == [plain.tokenizer.encode(one) for one in PROMPTS]
    assert json.loads(metadata["rows"]) == [8, 9]
    assert json.loads(metadata["axes"])["layers.0.mlp.mlp_output"] == ["batch", "seq", "hidden_size"]
    with pytest.raises(OutputExistsError, match="exists"):
        cache.save(tmp_path / "a.safetensors")
    assert cache.save(tmp_path / "a.safetensors", force=True) == size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_without_torch_values_are_numpy_arrays(plain: starscope.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from starscope.microscope import tensors

    _, expected = plain.run_with_cache(PROMPTS[0])
    monkeypatch.setattr(tensors, "_from_numpy", lambda: None)
    logits, cache = plain.run_with_cache(PROMPTS[0])
    assert isinstance(logits, np.ndarray)
    for name in cache:
        assert isinstance(cache[name], np.ndarray)
        assert np.array_equal(cache[name], expected[name])


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS], ids=["one", "two lengths"])
def test_under_edits_values_and_the_logits_of_every_row_are_those_of_a_trace(
    model: starscope.Model, prompt: Any
) -> None:
    edits = [
        Edit("layer_output", "scale", layers=1, positions=[0, -2], factor=3.0),
        Edit("logits", "add", positions=[0, 2, -2, -1], tensor=np.arange(model.vocab_size, dtype=np.float32)),
    ]
    plainly, _ = model.run_with_cache(prompt, "logits")
    with model.editing(edits):
        logits, cache = model.run_with_cache(prompt, ["layers.*.layer_output"])
        some, _ = model.run_with_cache(prompt, "logits", rows=[-1, 2, 1, 2])
        with model.trace(prompt):
            outputs = [model.layers[i].layer_output for i in range(model.num_layers)]
            expected = model.logits
    assert torch.equal(logits, expected)
    assert ulps(some, expected[:, [-1, 2, 1, 2]]) <= TOLERANCE
    assert not torch.equal(logits, plainly)
    for i, output in enumerate(outputs):
        assert torch.equal(cache[f"layers.{i}.layer_output"], output)
