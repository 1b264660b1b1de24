"""GGUF control vectors, against the gguf package as their reader and writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import InputError, InvalidContentError, OutputExistsError, StarscopeError, UsageError
from starscope.microscope.control_vectors import steering_from_gguf, steering_to_gguf
from support.edited import make_model


def write(path: Path, tensors: dict[str, Any], architecture: str = "controlvector") -> Path:
    """A file as repeng writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "gpt_bigcode")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vectors(*layers: int, width: int = 64) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(4)
    return {layer: rng.normal(size=width).astype(np.float32) for layer in layers}


@given(st.sets(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from([1.0, -2.0, 0.3]))
def test_what_the_gguf_package_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, layers: set[int], scale: float
) -> None:
    made = vectors(*layers)
    path = write(tmp_path_factory.mktemp("cv") / "a.gguf", {f"direction.{layer}": v for layer, v in made.items()})
    edits = steering_from_gguf(path, scale)
    assert [edit.layers for edit in edits] == [(layer,) for layer in sorted(layers)]
    for edit in edits:
        assert (edit.value, edit.op, edit.positions) == ("layer_output", "add", None)
        assert edit.factor == float(np.float32(scale))
        np.testing.assert_array_equal(edit.tensor, made[edit.layers[0]])


def test_what_is_written_the_gguf_package_reads(tmp_path: Path) -> None:
    made, path = vectors(3, 1), tmp_path / "a.gguf"
    steering_to_gguf(path, made, "gpt_bigcode")
    reader = gguf.GGUFReader(path)
    texts = {
        key: bytes(reader.get_field(key).parts[-1]).decode()
        for key in ("general.architecture", "controlvector.model_hint")
    }
    assert texts == {"general.architecture": "controlvector", "controlvector.model_hint": "gpt_bigcode"}
    count = reader.get_field("controlvector.layer_count")
    assert (count.types, int(count.parts[-1][0])) == ([gguf.GGUFValueType.UINT32], 2)
    assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.3"]
    for tensor in reader.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensor.data, made[int(tensor.name[-1])])
    assert [edit.layers for edit in steering_from_gguf(path)] == [(1,), (3,)]
    with pytest.raises(OutputExistsError):
        steering_to_gguf(path, made, "gpt_bigcode")
    first = path.read_bytes()
    steering_to_gguf(path, {1: made[1].tolist(), 3: torch.from_numpy(made[3])}, "gpt_bigcode", force=True)
    assert path.read_bytes() == first


def test_direction_n_is_added_to_the_output_of_block_n(tmp_path: Path) -> None:
    model, made = make_model("numpy"), vectors(1)
    steering_to_gguf(tmp_path / "a.gguf", made, "gpt_bigcode")
    with model.trace([5, 6, 7]) as t:
        model.layers[1].layer_output += torch.from_numpy(made[1]) * 0.5
    with model.editing(steering_from_gguf(tmp_path / "a.gguf", 0.5)), model.trace([5, 6, 7]) as u:
        pass
    assert torch.equal(t.result.logits, u.result.logits)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (vectors(2), r"layers has 2; there are 0 to 1"),
        (vectors(1, width=32), r"a tensor \[32\]; expected one that broadcasts to \[64\]"),
    ],
)
def test_vectors_of_another_model_are_refused(tmp_path: Path, tensors: dict[int, Any], message: str) -> None:
    steering_to_gguf(tmp_path / "a.gguf", tensors, "gpt_bigcode")
    with pytest.raises(UsageError, match=message):
        make_model("numpy").with_edits(steering_from_gguf(tmp_path / "a.gguf"))


one = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"direction.0": one}, "has direction.0; expected only direction.1"),
        ({"direction.01": one}, "has direction.01"),
        ({"direction.1": one, "bias": one}, "has bias; expected only direction.1"),
        ({"direction.1": one, "direction.2": one[:4]}, "vectors of 4 and 8 numbers"),
        ({"direction.1": one.astype(np.float16)}, "is F16"),
        ({"direction.1": one.reshape(2, 4)}, r"is F32 \[2, 4\]"),
        ({"direction.1": one * np.nan}, "not finite"),
    ],
)
def test_a_file_that_is_no_control_vector_is_refused_in_words(
    tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidContentError, match=message):
        steering_from_gguf(write(tmp_path / "a.gguf", tensors))


def test_other_files_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidContentError, match="is of llama; expected controlvector"):
        steering_from_gguf(write(tmp_path / "a.gguf", {"direction.1": one}, "llama"))
    with pytest.raises(InvalidContentError, match="no vector"):
        steering_from_gguf(write(tmp_path / "b.gguf", {}))
    with pytest.raises(InputError):
        steering_from_gguf(tmp_path / "none.gguf")
    (tmp_path / "c.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:60])
    with pytest.raises(StarscopeError, match=r"c\.gguf"):
        steering_from_gguf(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("given_vectors", "message"),
    [
        ({0: one}, "for blocks 1 and up"),
        ({True: one}, "for blocks 1 and up"),
        ({"1": one}, "for blocks 1 and up"),
        ({1: one, 2: one[:4]}, "of several sizes"),
        ({}, "of several sizes or none"),
        ({1: one[None]}, r"expected \[hidden_size\]"),
        ({1: one * np.inf}, r"expected \[hidden_size\]"),
    ],
)
def test_vectors_that_the_format_has_no_place_for_are_refused(tmp_path: Path, given_vectors: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        steering_to_gguf(tmp_path / "a.gguf", given_vectors, "gpt_bigcode")
    assert not list(tmp_path.iterdir())
