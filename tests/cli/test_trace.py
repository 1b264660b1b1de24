"""`trace`: values by their names, as text, as a document and as a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import starscope
from starscope.values import VALUES

PROMPT = "def a(in):\n"


@pytest.fixture(scope="module")
def loaded(model):
    return starscope.load(model)


def values_of(loaded, names, **options):
    return loaded.run_with_cache(PROMPT, names, **options)[1].to_numpy()


def test_each_value_is_told_with_layout_shape_and_numbers(cli, model, loaded):
    result = cli("trace", model, PROMPT, "--value", "layers.1.layer_output", "--value", "blocks.0.attn.hook_pattern")
    assert result.exit_code == 0
    array = values_of(loaded, "layers.1.layer_output")["layers.1.layer_output"]
    seq = array.shape[1]
    lines = result.stdout.splitlines()
    assert lines[0] == f"layers.1.layer_output  Residual [batch seq hidden_size] = [1 {seq} 32] float32"
    assert lines[1] == (
        f"  min {array.min():.4g}  mean {array.astype(float).mean():.4g}  max {array.max():.4g}"
        f"  norm {np.linalg.norm(array.astype(float)):.4g}"
    )
    assert lines[2] == f"  [0 -1 :] {' '.join(f'{one:.4g}' for one in array[0, -1, :6].tolist())} ..."
    assert lines[3] == f"blocks.0.attn.hook_pattern  Pattern [batch num_heads query key] = [1 4 {seq} {seq}] float32"
    assert len(lines) == 6


def test_what_is_masked_in_scores_does_not_count(cli, model, loaded):
    lines = cli(
        "trace", model, PROMPT, "--value", "layers.0.self_attn.attention_scores", "--rows", "0"
    ).stdout.splitlines()
    array = values_of(loaded, "layers.0.self_attn.attention_scores", rows=[0])["layers.0.self_attn.attention_scores"]
    seen = array[..., 0].astype(float)  # the first query sees itself alone
    assert lines[1] == (
        f"  min {seen.min():.4g}  mean {seen.mean():.4g}  max {seen.max():.4g}  norm {np.linalg.norm(seen):.4g}"
    )
    assert lines[2].startswith(f"  [0 0 -1 :] {array[0, 0, 0, 0]:.4g} masked masked")


def test_the_document_has_every_number_as_it_is(cli, model, loaded):
    names = ["layers.0.self_attn.attention_scores", "blk.1.attn_qkv.output", "next_token_probs", "input_ids"]
    result = cli("trace", model, PROMPT, *(arg for name in names for arg in ("--value", name)), "--json")
    document = json.loads(result.stdout)
    assert list(document) == ["prompt_ids", "rows", "values"]
    assert document["prompt_ids"] == [loaded.tokenizer.encode(PROMPT)]
    assert document["rows"] is None
    assert list(document["values"]) == names
    _, cache = loaded.run_with_cache(PROMPT, names)
    for name, value in document["values"].items():
        assert list(value) == ["name", "layout", "axes", "shape", "dtype", "data"]
        array = np.array(value["data"], value["dtype"])
        assert list(array.shape) == value["shape"]
        assert np.array_equal(array, cache.array(name)), name
    assert document["values"]["blk.1.attn_qkv.output"]["name"] == "layers.1.self_attn.qkv_proj.output"
    assert document["values"]["blk.1.attn_qkv.output"]["layout"] is None
    assert document["values"]["input_ids"]["axes"] == ["batch", "seq"]


def test_a_number_that_is_not_finite_is_null_in_the_document():
    from starscope.cli.trace import nested

    array = np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32)
    assert nested(array) == [[1.5, None], [None, None]]


def test_a_pattern_gives_the_standard_names_once_and_rows_some_positions(cli, model, loaded):
    args = ["--value", "layers.1.layer_mid", "--value", "layers[*].layer_mid", "--rows", "-1,0"]
    document = json.loads(cli("trace", model, PROMPT, *args, "--json").stdout)
    assert list(document["values"]) == ["layers.1.layer_mid", "layers.0.layer_mid"]
    seq = len(document["prompt_ids"][0])
    assert document["rows"] == [seq - 1, 0]
    assert document["values"]["layers.0.layer_mid"]["shape"] == [1, 2, 32]
    expected = values_of(loaded, "layers.0.layer_mid", rows=[-1, 0])["layers.0.layer_mid"]
    assert np.array_equal(np.array(document["values"]["layers.0.layer_mid"]["data"], np.float32), expected)
    sliced = cli("trace", model, PROMPT, "--value", "layers.0.layer_mid", "--rows", "1:3", "--json")
    assert json.loads(sliced.stdout)["rows"] == [1, 2]


def test_a_file_has_the_values_under_the_given_names_and_what_was_run(cli, model, loaded, tmp_path):
    out = tmp_path / "values.safetensors"
    args = ["trace", model, PROMPT, "--value", "blocks.1.hook_resid_post", "--value", "layers.*.layer_mid", "-o", out]
    result = cli(*args)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines()[-1] == f"3 values, {out.stat().st_size:,} bytes -> {out}"
    with safe_open(out, "np") as file:
        assert set(file.keys()) == {"blocks.1.hook_resid_post", "layers.0.layer_mid", "layers.1.layer_mid"}
        expected = values_of(loaded, "layers.1.layer_output")["layers.1.layer_output"]
        assert np.array_equal(file.get_tensor("blocks.1.hook_resid_post"), expected)
        metadata = file.metadata()
    assert json.loads(metadata["prompt_ids"]) == [loaded.tokenizer.encode(PROMPT)]
    assert json.loads(metadata["axes"])["layers.0.layer_mid"] == ["batch", "seq", "hidden_size"]
    data = out.read_bytes()
    again = cli(*args)
    assert again.exit_code == 2
    assert again.stderr.splitlines()[-2:] == [
        f"error: {out} exists.",
        "Use --force to replace it (from Python, force=True).",
    ]
    out.write_bytes(b"old")
    assert cli(*args, "--force").exit_code == 0
    assert out.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_a_prompt_on_stdin_is_taken_as_it_is(dash, cli, model, loaded):
    text = "\n\tdef a(é😀):\r\n  \n\n"
    result = cli("trace", model, *dash, "--value", "input_ids", "--json", stdin=text.encode())
    assert json.loads(result.stdout)["prompt_ids"] == [loaded.tokenizer.encode(text)]


@pytest.mark.parametrize("engine", ["numpy", "torch", "native"])
def test_every_engine_gives_the_value(engine, cli, model):
    result = cli("trace", model, PROMPT, "--value", "layers.1.mlp.mlp_neurons", "--json", "--engine", engine)
    assert json.loads(result.stdout)["values"]["layers.1.mlp.mlp_neurons"]["shape"][2] == 64


def test_the_list_has_every_standard_value_by_a_pattern_that_can_be_asked_for(cli, model):
    result = cli("trace", model, "--list", "--json")
    listed = json.loads(result.stdout)["values"]
    assert {one["name"].rpartition(".")[2] for one in listed} == VALUES.keys()
    assert all(list(one) == ["name", "layout", "axes", "meaning"] for one in listed)
    lines = cli("trace", model, "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [one["name"] for one in listed]
    args = [arg for one in listed for arg in ("--value", one["name"])]
    assert cli("trace", model, PROMPT, *args).exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--value", "layers.1.layer_outptu"], "Near: layers.1.layer_output"),
        (["--value", "layers.7.layer_output"], "This model has layers 0 to 1."),
        (["--value", "layers.*.nothing"], "no value fits 'layers.*.nothing'"),
        ([], "--value is missing; expected at least one name.\nUse --list to see the names."),
        (["--list"], "--list was given with a prompt or --value; expected neither."),
        (["--value", "logits", "--rows", "first"], "--rows is 'first'; expected positions such as -1, 0,3,-1 or 4:8."),
        (["--value", "logits", "--rows", ""], "--rows is ''"),
        (["--value", "logits", "--rows", "99"], "row 99 is out of range; the prompt has"),
        (["--value", "logits", "--json", "-o", "x.safetensors"], "--json and -o both write the values"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_status_2(args, said, cli, model):
    result = cli("trace", model, PROMPT, *args)
    assert result.exit_code == 2
    assert said in (result.stderr if "--json" not in args else json.loads(result.stdout)["error"]["message"])


def test_a_wrong_name_is_told_before_the_weights_are_read(cli, model, monkeypatch):
    from starscope.cli import trace

    monkeypatch.setattr(trace, "load_model", lambda *_: pytest.fail("the weights were read"))
    assert cli("trace", model, PROMPT, "--value", "nothing").exit_code == 2
    existing = Path(model)
    assert cli("trace", model, PROMPT, "--value", "logits", "-o", existing).exit_code == 2


def test_what_is_behind_the_last_value_does_not_run(loaded, monkeypatch):
    model = starscope.load(loaded.path, engine="numpy")
    ran = []
    for kind, kernel in type(model.engine).kernels.items():

        def noted(engine, batch, op, inputs, kernel=kernel):
            ran.append(op)
            return kernel(engine, batch, op, inputs)

        monkeypatch.setitem(type(model.engine).kernels, kind, noted)
    model.keep_values(PROMPT, "layers.0.layer_mid")
    assert {op.layer for op in ran} == {None, 0}
    assert max(op.index for op in ran) + 1 == model.scope.edges.facts[model.graph.names["layers.0.layer_mid"]].made
    ran.clear()
    model.keep_values(PROMPT, "next_token_probs")
    assert sum(op.kind == "linear" and op.layer is None for op in ran) == 1  # the last row alone


def test_a_file_of_the_model_is_never_replaced(cli, model, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(Path(model).read_bytes())
    (tmp_path / "link").symlink_to(file)
    for out in (file, tmp_path / "link"):
        result = cli("trace", file, PROMPT, "--value", "logits", "-o", out, "--force")
        assert result.exit_code == 2
        assert (
            result.stderr.splitlines()[-1]
            == f"error: {out} is one of the model's own files; expected another output file."
        )
    assert file.read_bytes() == Path(model).read_bytes()
