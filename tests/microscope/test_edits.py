"""Edits as data: what can be said, what is refused, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import InputError, InvalidContentError, OutputExistsError, StarscopeError, UsageError
from starscope.microscope import Edit
from starscope.microscope.edit_files import edits_from_json, edits_to_json, read_edits, write_edits
from starscope.microscope.selections import count_of, is_relative, read_selection, stretches
from support.edited import given_edits, make_model, members, selections

EDITS = [
    Edit("layer_output", "add", layers=6, tensor=[0.1, -2.5, 3e-8], factor=4.0),
    Edit("attention_head_outputs", "zero", layers=[3, -1], heads=[0, 5], rows=0, steps=slice(1, None)),
    Edit("attention_scores", "mask", layers=range(8), positions="new", keys="0:4"),
    Edit("mlp_output", "replace", layers=0, positions=slice(2, 4), tensor=np.ones((2, 3))),
    Edit("blocks.{i}.hook_resid_post", "scale", factor=-0.25, positions=[0, -1]),
    Edit("logits", "set", tensor=7),
]


@given(st.booleans().flatmap(lambda mqa: given_edits(multi_query=mqa, shortest=3, batch=2)))
def test_an_edit_comes_back_from_json_as_it_was(one: Any) -> None:
    edit = one.edit
    again = Edit.from_json(json.loads(json.dumps(edit.to_json(), allow_nan=False)))
    assert again == edit
    assert hash(again) == hash(edit)
    assert again.to_json() == edit.to_json()


@pytest.mark.parametrize("tensors", [None, "numbers.safetensors"])
def test_edits_come_back_from_a_file_as_they_were(tmp_path: Path, tensors: str | None) -> None:
    path = tmp_path / "edits.json"
    write_edits(path, EDITS, tensors=tensors)
    assert read_edits(path) == EDITS
    assert [edit.tensor is None for edit in read_edits(path)] == [edit.tensor is None for edit in EDITS]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted({"edits.json", tensors} - {None})
    first = path.read_bytes()
    with pytest.raises(OutputExistsError):
        write_edits(path, EDITS, tensors=tensors)
    write_edits(path, EDITS, tensors=tensors, force=True)
    assert path.read_bytes() == first


def test_one_edit_need_not_be_in_a_list() -> None:
    assert edits_from_json(EDITS[1].to_json()) == [EDITS[1]]
    assert edits_from_json(edits_to_json(EDITS)) == EDITS


def test_an_edit_cannot_be_changed_through_what_it_was_made_of() -> None:
    array = np.ones(4, np.float32)
    edit = Edit("layer_output", "add", tensor=array)
    array[:] = 5
    assert edit.tensor.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        edit.tensor[0] = 2
    assert edit == Edit("layer_output", "add", tensor=torch.ones(4)) != Edit("layer_output", "add", tensor=np.zeros(4))


@given(selections(9, new=True), st.integers(9, 20))
def test_a_selection_is_what_python_selects(selection: Any, end: int) -> None:
    kept = read_selection(selection, "positions", new=True)
    found = [(n, number) for a, b, number in stretches(kept, end, "positions", last=60) for n, number in zip(
        range(a, min(b, 60)), range(number, number + b - a), strict=False)]  # fmt: skip
    expected = members(selection, end, 60)
    assert [n for n, _ in found] == expected
    if isinstance(selection, list):  # where two are one place, the first counts
        places = [one % end for one in selection]
        assert [number for _, number in found] == [places.index(n) for n in expected]
        assert count_of(kept) == len(selection)
    else:
        assert [number for _, number in found] == list(range(len(found)))
        assert count_of(kept) in (None, len(expected))
    at_other_ends = {tuple(members(selection, other, 60)) for other in (end, end + 1, end + 5)}
    assert is_relative(kept) or len(at_other_ends) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": 3}, "value is 3"),
        ({"op": "multiply"}, "op is 'multiply'; expected one of add, scale, set, zero, replace, mask"),
        ({"op": "add"}, "add needs a tensor"),
        ({"op": "zero", "tensor": 1.0}, "zero takes no tensor"),
        ({"factor": 2.0}, "zero takes no factor"),
        ({"op": "scale", "factor": "2"}, "factor is '2'; expected a number"),
        ({"op": "scale", "factor": True}, "factor is True; expected a number"),
        ({"op": "scale", "factor": 1e39}, "not a finite float32 number"),
        ({"op": "scale", "factor": float("nan")}, "not a finite float32 number"),
        ({"op": "add", "tensor": [[1.0], [1.0, 2.0]]}, "rows of several lengths"),
        ({"op": "add", "tensor": "abc"}, "tensor is str"),
        ({"op": "add", "tensor": []}, "expected numbers"),
        ({"op": "add", "tensor": [True]}, "tensor is bool"),
        ({"op": "add", "tensor": [1e39]}, "not finite in float32"),
        ({"layers": 1.5}, "layers has 1.5; expected a whole number"),
        ({"layers": [True]}, "layers has True"),
        ({"heads": "new"}, "heads is 'new'; expected a number, a list of them, a span"),
        ({"heads": [1, 1]}, "heads has 1 twice"),
        ({"positions": []}, "positions selects nothing"),
        ({"positions": "5:5"}, "selects nothing"),
        ({"positions": slice(0, 8, 2)}, "in steps of 2"),
        ({"positions": "all"}, 'a span as "2:5" or "new"'),
        ({"steps": -1}, "steps has -1; expected 0 or more"),
        ({"rows": "-2:"}, "expected 0 or more"),
        ({"op": "mask", "value": "attention_scores"}, "mask needs keys"),
        ({"op": "replace", "tensor": [1.0], "positions": "new"}, "a known number of positions"),
        ({"op": "replace", "tensor": [1.0], "positions": "-3:8"}, "a known number of positions"),
        ({"op": "replace", "tensor": [1.0], "positions": [0, 1]}, r"a tensor \[1\] for 2 positions"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Edit(**{"value": "layer_output", "op": "zero", **arguments})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "an edit is a JSON int"),
        ({"value": "logits", "op": "zero", "layer": 3}, "an edit has 'layer'; expected "),
        ({"op": "zero"}, "an edit has no value"),
        ({"value": "logits", "op": "set", "tensor": None}, "tensor is null"),
        ({"value": "logits", "op": "set", "tensor": {"file": "a.safetensors"}}, "the file and the name of a tensor"),
        ({"value": "logits", "op": "set", "tensor": {"file": "../a", "name": "x"}}, "the name of a file beside"),
        ({"value": "logits", "op": "set", "tensor": {"file": "/etc/a", "name": "x"}}, "the name of a file beside"),
        ({"value": "logits", "op": "zero", "positions": {"start": 1}}, "positions has"),
        ({"value": "logits", "op": "zero", "positions": [1, "2"]}, "positions has '2'"),
        ({"value": "logits", "op": "zero", "positions": 10**30}, "positions has"),
        ({"value": "logits", "op": "zero", "rows": False}, "rows has False"),
        ({"value": "logits", "op": "zer"}, "op is 'zer'"),
        ({"value": "logits", "op": ["zero"]}, "op is"),
        ({"value": "logits", "op": "add", "tensor": [10**400]}, "expected numbers"),
        ({"value": "logits", "op": "scale", "factor": 10**400}, "not a finite float32 number"),
    ],
)
def test_json_that_is_no_edit_is_refused_in_words(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidContentError, match=message):
        edits_from_json([{"value": "logits", "op": "zero"}, data], tmp_path)
    (tmp_path / "edits.json").write_text(json.dumps([data]))
    with pytest.raises(InvalidContentError, match=r"edits\.json: edits\[0\]: "):
        read_edits(tmp_path / "edits.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b'[{"value": "logits", "value": "logits", "op": "zero"}]', "a key twice"),
        (b'[{"value": "logits", "op": "scale", "factor": NaN}]', "NaN is not a JSON number"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_is_refused_in_words(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "edits.json").write_bytes(content)
    with pytest.raises(InvalidContentError, match=message):
        read_edits(tmp_path / "edits.json")


def test_a_file_or_a_tensor_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"edits\.json"):
        read_edits(tmp_path / "edits.json")
    path = tmp_path / "edits.json"
    write_edits(path, EDITS, tensors="a.safetensors")
    path.write_text(path.read_text().replace("edits.3", "edits.30"))
    with pytest.raises(InvalidContentError, match=r"edits\[3\]: .*a\.safetensors has no 'edits\.30'"):
        read_edits(path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(StarscopeError, match=r"a\.safetensors"):
        read_edits(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("layer_outptu", "zero"), "no value is called 'layer_outptu'"),
        (Edit("layer_output", "zero", layers=2), r"edits\[1\]: layers has 2; there are 0 to 1"),
        (Edit("layer_output", "zero", layers=-3), "layers has -3"),
        (Edit("layer_output", "zero", layers="0:9"), "there are 0 to 1"),
        (Edit("layer_output", "zero", layers=[1, -1]), "one of them twice"),
        (Edit("layers.0.layer_output", "zero", layers=0), "is one value; expected no layers"),
        (Edit("logits", "zero", layers=0), "is one value; expected no layers"),
        (Edit("input_ids", "zero"), "input_ids cannot be edited"),
        (Edit("attention_mask", "zero"), "attention_mask cannot be edited"),
        (Edit("next_token_probs", "zero"), "next_token_probs cannot be edited"),
        (Edit("layer_output", "zero", heads=0), "has no heads"),
        (Edit("attention_queries", "zero", heads=4), "heads has 4; there are 0 to 3"),
        (Edit("attention_keys", "zero", heads=1), "heads has 1; there are 0 to 0"),
        (Edit("layer_output", "zero", keys=0), "keys are for attention_scores and attention_probabilities"),
        (Edit("layer_output", "mask", keys=0), "mask is for attention_scores"),
        (Edit("attention_probabilities", "mask", keys=0), "mask is for attention_scores"),
        (Edit("layer_output", "add", tensor=[1.0, 2.0]), r"a tensor \[2\]; expected one that broadcasts to \[64\]"),
        (Edit("attention_queries", "set", tensor=np.zeros((3, 16))), r"broadcasts to \[4 16\]"),
        (Edit("layer_output", "replace", positions=[0, 1], tensor=np.zeros((2, 2))), r"to \[positions 64\]"),
        (Edit("attention_scores", "set", keys="2:", tensor=[1.0, 2.0]), "whose number is not known"),
        (Edit("attention_scores", "set", tensor=[1.0, 2.0]), r"broadcasts to \[4 1\]"),
        ("zero", "is str; expected an Edit"),
    ],
)
def test_an_edit_that_a_model_cannot_have_is_refused_before_anything_runs(edit: Any, message: str) -> None:
    model = make_model("numpy")
    for use in (model.with_edits, lambda edits: model.editing(edits).__enter__()):
        with pytest.raises(UsageError, match=message):
            use([Edit("logits", "scale", factor=2), edit])
    assert model.engine.edits is None


def test_a_position_before_the_prompt_is_refused_and_the_model_is_unharmed() -> None:
    model = make_model("numpy")
    expected = model.forward([1, 2, 3])
    with model.editing(Edit("layer_output", "zero", positions=-4)):
        with pytest.raises(UsageError, match=r"positions has -4; expected at least -3"):
            model.forward([1, 2, 3])
        with pytest.raises(UsageError, match="positions has -4"):
            model.generate([1, 2, 3], max_new_tokens=2)
        engine, cache = model.engine, model.engine.new_cache()
        with pytest.raises(UsageError, match="length of the prompt, which this cache does not know"):
            engine.forward([[1, 2, 3, 4]], [cache])
        assert cache.length == 0
    assert torch.equal(model.forward([1, 2, 3]), expected)


@pytest.mark.parametrize(
    ("name", "layers", "standard"),
    [
        ("blocks.1.hook_resid_post", None, "layer_output"),
        ("blocks.{i}.hook_resid_post", 1, "layer_output"),
        ("transformer.h.{i}.attn.output", 1, "attention_output"),
        ("blk.1.attn_output.output", None, "attention_output"),
        ("mlp.down_proj.output", 1, "mlp_output"),
        ("KQV_merged", 1, "attention_head_outputs"),
        ("KQV_merged-1", None, "attention_head_outputs"),
        ("model.layers[1].mlp.mlp_neurons", None, "mlp_neurons"),
        ("lm_head.input", None, "final_norm_output"),
    ],
)
def test_a_value_may_be_called_by_any_of_its_names(name: str, layers: int | None, standard: str) -> None:
    model, prompt = make_model("numpy"), [5, 6, 7, 8]
    of_model = standard == "final_norm_output"
    with model.editing(Edit(name, "scale", layers=layers, factor=0.5, positions=2)):
        found = model.forward(prompt)
    with model.editing(Edit(standard, "scale", layers=None if of_model else 1, factor=0.5, positions=2)):
        expected = model.forward(prompt)
    assert torch.equal(found, expected)
    assert not torch.equal(found, model.forward(prompt))
