"""`run` under edits from files and control vectors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from starscope import load
from starscope.gguf import read_gguf
from starscope.microscope import Edit
from starscope.microscope.control_vectors import steering_to_gguf
from starscope.microscope.edit_files import write_edits

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def loaded(model):
    return load(model)


@pytest.fixture
def vector(tmp_path):
    path = tmp_path / "happy.gguf"
    steering_to_gguf(path, {1: np.random.default_rng(3).normal(0, 2, 32).astype(np.float32)}, "gpt_bigcode")
    return path


def test_a_text_under_edits_is_that_of_the_model_with_them(cli, model, loaded, tmp_path, vector):
    edit = Edit("layer_output", "scale", layers=0, factor=-1.0, positions="new")
    write_edits(tmp_path / "edits.json", [edit])
    steer = Edit("layer_output", "add", layers=1, tensor=read_vector(vector), factor=0.5)
    for options, edits in (
        (["--edits", tmp_path / "edits.json"], [edit]),
        (["--control-vector", f"{vector}:0.5"], [steer]),
        (["--control-vector", f"{vector}:0.5", "--edits", tmp_path / "edits.json"], [edit, steer]),
        (["--control-vector", f"{vector}:0.25", "--control-vector", f"{vector}:0.25"], [steer]),
    ):
        result = cli("run", model, PROMPT, "-n", 12, "-q", *options)
        assert result.exit_code == 0
        expected = loaded.with_edits(edits).generate(PROMPT, max_new_tokens=12).text
        assert result.stdout_bytes == expected.encode()
        assert expected != loaded.generate(PROMPT, max_new_tokens=12).text


def read_vector(path):
    return np.array(read_gguf(path).array("direction.1"))


def test_a_scale_is_what_follows_the_last_colon_unless_the_file_is_called_so(cli, model, loaded, tmp_path, vector):
    odd = tmp_path / "a:2"
    odd.write_bytes(vector.read_bytes())
    plain = cli("run", model, PROMPT, "-n", 8, "-q", "--control-vector", vector)
    assert plain.exit_code == 0
    assert cli("run", model, PROMPT, "-n", 8, "-q", "--control-vector", odd).stdout_bytes == plain.stdout_bytes
    zero = cli("run", model, PROMPT, "-n", 8, "-q", "--control-vector", f"{vector}:0")
    assert zero.stdout_bytes == loaded.generate(PROMPT, max_new_tokens=8).text.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not valid JSON"),
        ('[{"value": "layer_output"}]', "edits[0]: an edit has no op"),
        ('[{"value": "layer_output", "op": "zero", "layers": 2}]', "edits[0]: layers has 2; there are 0 to 1"),
        ('[{"value": "hidden", "op": "zero"}]', "no value is called 'hidden'"),
        ('[{"value": "layer_output", "op": "add", "tensor": [1, 2]}]', "broadcasts to [32]"),
    ],
)
def test_edits_that_cannot_be_are_status_4(cli, model, tmp_path, content, message):
    (tmp_path / "edits.json").write_text(content)
    result = cli("run", model, PROMPT, "--edits", tmp_path / "edits.json", "--json")
    assert result.exit_code == 4
    assert message in json.loads(result.stdout)["error"]["message"]
    assert "edits.json" in json.loads(result.stdout)["error"]["message"]


def test_files_that_are_not_there_are_status_3_and_a_scale_that_is_no_number_status_2(cli, model, tmp_path, vector):
    assert cli("run", model, PROMPT, "--edits", tmp_path / "none.json").exit_code == 3
    assert cli("run", model, PROMPT, "--control-vector", tmp_path / "none.gguf").exit_code == 3
    assert cli("run", model, PROMPT, "--control-vector", f"{vector}:nan").exit_code == 2
    assert cli("run", model, PROMPT, "--control-vector", ":1").exit_code == 2
    assert cli("run", model, PROMPT, "--control-vector", model).exit_code == 4
    steering_to_gguf(tmp_path / "wide.gguf", {1: np.ones(48)}, "gpt_bigcode")
    result = cli("run", model, PROMPT, "--control-vector", tmp_path / "wide.gguf")
    assert result.exit_code == 4
    assert "wide.gguf" in result.stderr
