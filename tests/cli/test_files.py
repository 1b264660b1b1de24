"""`show`, `graph`, `convert` and `quantize`: documents, lines, refusals, the bar."""

from __future__ import annotations

import json
import os
import pty
import shutil

import numpy as np
import pytest

import starscope
from starscope.cli.units import bytes_text, count_text
from starscope.recipes import ALIASES, RECIPES

SHOWN = [
    "path", "kind", "file_bytes", "architecture", "name", "license", "family", "size_class", "parameters",
    "vocabulary_only", "bytes_by_format", "context_length", "num_layers", "hidden_size", "intermediate_size",
    "num_heads", "num_kv_heads", "head_dim", "activation", "vocab_size", "tokenizer", "metadata", "problems",
]  # fmt: skip
REPORTED = ["out", "bytes", "seconds", "tensors", "parameters", "family", "format", "notes"]


@pytest.fixture
def vocabulary(tmp_path, folder, cli):
    """A file with the sizes of a released model and no weights."""
    copy = tmp_path / "named"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "n_layer": 24, "n_embd": 2048}))
    assert cli("convert", copy, "--vocab-only", "-q").exit_code == 0
    return copy / "ggml-vocab.gguf"


def test_show_tells_what_a_file_holds(cli, model):
    document = json.loads(cli("show", model, "--json").stdout)
    assert list(document) == SHOWN
    loaded = starscope.load(model)
    for name in ("context_length", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert document[name] == getattr(loaded, name)
    parameters = sum(s.parameters for n, s in loaded.weights.slots.items() if not loaded.weights.is_tied(n))
    assert document["parameters"] == parameters
    assert document["bytes_by_format"] == {"F32": 4 * parameters}
    assert document["size_class"] == count_text(parameters)
    assert (document["architecture"], document["family"], document["license"]) == (
        "starcoder",
        "gpt_bigcode",
        "apache-2.0",
    )
    assert document["tokenizer"]["fim"] == {"prefix": 1, "suffix": 3, "middle": 2, "pad": 4, "repo": 6, "separator": 5}
    assert (document["vocabulary_only"], document["problems"]) == (False, [])


def test_show_says_the_same_of_a_folder_and_of_the_file_made_from_it(cli, model, folder):
    file, source = (json.loads(cli("show", path, "--json").stdout) for path in (model, folder))
    assert list(source) == SHOWN
    differing = {"path", "kind", "file_bytes", "architecture", "name"}
    assert {k: v for k, v in file.items() if k not in differing} == {
        k: v for k, v in source.items() if k not in differing
    }


def test_show_prints_one_line_a_fact(cli, model):
    lines = dict(line.split(maxsplit=1) for line in cli("show", model).stdout.splitlines() if " " in line)
    assert lines["context_length"] == "4096"
    assert lines["weights"].startswith("F32 ")
    assert lines["architecture"] == "starcoder (gpt_bigcode)"


def test_show_lists_tensors_on_request(cli, model):
    listed = json.loads(cli("show", model, "--tensors", "--json").stdout)["tensors"]
    assert len(listed) == 2 + 2 * 12 + 2
    assert listed[0] == {
        "name": "token_embd.weight",
        "value": "embed_tokens.weight",
        "shape": [269, 32],
        "format": "F32",
        "bytes": 269 * 32 * 4,
    }
    assert "blk.1.attn_qkv.weight" in cli("show", model, "--tensors").stdout


def test_show_says_that_damaged_weights_are_unreadable(cli, folder, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    document = json.loads(cli("show", damaged, "--json").stdout)
    assert (document["vocabulary_only"], document["parameters"]) == (False, None)
    assert document["file_bytes"] == weights.stat().st_size
    assert document["problems"]
    assert "unreadable" in cli("show", damaged).stdout


def test_show_knows_the_size_class_of_a_vocabulary_alone(cli, vocabulary):
    document = json.loads(cli("show", vocabulary, "--json").stdout)
    assert (document["size_class"], document["vocabulary_only"], document["bytes_by_format"]) == ("1B", True, {})
    hidden, inner, qkv = 2048, 64, 2048 + 2 * 512
    block = 4 * hidden + qkv * (hidden + 1) + hidden * (hidden + 1) + inner * (hidden + 1) + hidden * (inner + 1)
    assert document["parameters"] == (269 + 4096) * hidden + 24 * block + 2 * hidden  # the head is the embedding
    assert "none (vocabulary only)" in cli("show", vocabulary).stdout


def test_show_prints_what_another_architectures_file_says(cli, model, tmp_path):
    from starscope.gguf import f32, read_gguf, string, u32, write_gguf

    keys = {"general.architecture": string("mamba"), "mamba.block_count": u32(64), "mamba.rate": f32(0.5)}
    with read_gguf(model) as file:
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        write_gguf(tmp_path / "other.gguf", {**keys, **tokenizer}, [])
    document = json.loads(cli("show", tmp_path / "other.gguf", "--json").stdout)
    assert (document["family"], document["num_layers"]) == (None, None)
    assert document["metadata"] == {"mamba.block_count": 64, "mamba.rate": 0.5}
    assert document["problems"] == ["general.architecture is 'mamba'; supported: starcoder, llama."]
    assert document["tokenizer"]["fim"]["prefix"] == 1
    text = cli("show", tmp_path / "other.gguf")
    assert text.exit_code == 0
    assert "mamba (not supported)" in text.stdout
    assert "supported: starcoder" in text.stdout


def test_show_takes_a_folder_without_weights_or_tokenizer(cli, folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    document = json.loads(cli("show", tmp_path, "--json").stdout)
    assert document["num_layers"] == 2
    assert len(document["problems"]) == 2


def test_show_does_not_let_a_file_draw_on_the_terminal(cli, model, tmp_path):
    from starscope.gguf import read_gguf, string, write_gguf

    with read_gguf(model) as file:
        write_gguf(tmp_path / "sly.gguf", {**file.metadata, "general.name": string("a\x1b[2J\nb")}, [])
    shown = cli("show", tmp_path / "sly.gguf").stdout
    assert "name               a\\x1b[2J\\nb\n" in shown


def test_tensor_names_of_a_folder_do_not_draw_on_the_terminal(cli, folder, tmp_path):
    from safetensors.numpy import save_file

    shutil.copy(folder / "config.json", tmp_path)
    save_file({"a\x1b[2J\nb": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    result = cli("show", tmp_path, "--tensors")
    assert result.exit_code == 0
    assert "\na\\x1b[2J\\nb  F32 " in result.stdout


def test_graph_prints_one_line_an_operation(cli, model):
    graph = starscope.load(model).graph
    title, *lines = cli("graph", model).stdout.splitlines()
    assert title.split()[:3] == ["#", "block", "op"]
    assert [int(line.split()[0]) for line in lines] == list(range(len(graph.ops)))
    [scores] = [line for line in lines if "-> layers.1.self_attn.attention_scores" in line]
    assert scores.split(maxsplit=2)[1] == "1"
    assert scores.endswith(
        "scores       self_attn.attention_queries, self_attn.attention_keys -> "
        "layers.1.self_attn.attention_scores [4 query key]"
    )
    text = "\n".join(lines)
    assert all(name in text for name in graph.names if name != "input_ids")
    assert "mlp.up_proj.weight .bias" in text


def test_the_document_of_graph_has_every_operation_and_value(cli, model, folder):
    document = json.loads(cli("graph", model, "--json").stdout)
    graph = starscope.load(model).graph
    assert list(document) == ["family", "ops", "values"]
    assert list(document["ops"][0]) == ["index", "layer", "op", "inputs", "weights", "outputs", "attributes"]
    assert [op["op"] for op in document["ops"]] == [op.kind for op in graph.ops]
    assert [value["names"] for value in document["values"]] == [list(edge.names) for edge in graph.edges]
    source = json.loads(cli("graph", folder, "--json").stdout)
    for op in (*document["ops"], *source["ops"]):
        op["attributes"].pop("epsilon", None)  # float32 in a file, float64 in a config
    assert document == source


def test_graph_needs_no_weights(cli, vocabulary):
    assert cli("graph", vocabulary).stdout.count("attention_scores [") == 24


def test_graph_shows_the_heads_that_run_where_copies_are_stored(cli, folder, model, tmp_path):
    assert cli("convert", folder, "--expand-mqa", "-o", tmp_path / "wide.gguf", "--to", "f32").exit_code == 0
    assert cli("graph", tmp_path / "wide.gguf").stdout == cli("graph", model).stdout


def test_graph_of_another_architecture_is_status_4(cli, tmp_path):
    from starscope.gguf import string, write_gguf

    write_gguf(tmp_path / "other.gguf", {"general.architecture": string("mamba")}, [])
    result = cli("graph", tmp_path / "other.gguf")
    assert result.exit_code == 4
    assert "supported: starcoder" in result.stderr


@pytest.mark.parametrize(
    ("args", "stored"),
    [
        ([], "F16"),
        (["0"], "F32"),
        (["1"], "F16"),
        (["f32"], "F32"),
        (["--to", "q8_0"], "Q8_0"),
        (["--to", "Q4_0"], "Q4_0"),
        (["--to", "bf16"], "BF16"),
        (["f32", "--to", "F32"], "F32"),
    ],
    ids=" ".join,
)
def test_convert_writes_the_type_that_was_asked_for(args, stored, cli, folder, tmp_path):
    out = tmp_path / "out.gguf"
    result = cli("convert", folder, *args, "-o", out, "--json", "--verify")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert list(report) == REPORTED
    assert (report["out"], report["bytes"], report["format"]) == (str(out), out.stat().st_size, stored)
    formats = json.loads(cli("show", out, "--json").stdout)["bytes_by_format"]
    assert set(formats) == {stored, "F32"}


def test_convert_says_one_line_on_stderr_and_nothing_on_stdout(cli, folder, tmp_path):
    result = cli("convert", folder, "--outfile", tmp_path / "out.gguf")
    assert (result.exit_code, result.stdout) == (0, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'out.gguf'}: gpt_bigcode, ")
    assert "parameters in 28 tensors, F16, " in line


@pytest.mark.parametrize(
    ("options", "said"), [(["--verify"], True), (["--vocab-only", "--verify"], False), ([], False)]
)
def test_verified_is_said_of_what_was(options, said, cli, folder, tmp_path):
    result = cli("convert", folder, "-o", tmp_path / "out.gguf", *options)
    assert result.exit_code == 0
    assert result.stderr.endswith(", verified\n") == said


def test_convert_writes_into_the_folder_by_default(cli, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert cli("convert", copy, "--to", "q8_0", "-q").exit_code == 0
    assert (copy / "ggml-model-q8_0.gguf").is_file()


def test_convert_takes_one_type(cli, folder, tmp_path):
    result = cli("convert", folder, "f16", "--to", "q8_0", "-o", tmp_path / "out.gguf")
    assert result.exit_code == 2
    assert "'f16' and --to 'q8_0'" in result.stderr


@pytest.mark.parametrize("options", [["--to", ""], [""], ["f16", "--to", ""]], ids=repr)
def test_an_empty_type_is_unknown_like_any_other(options, cli, folder, model, tmp_path):
    found = [cli("convert", folder, *options, "-o", tmp_path / "out.gguf")]
    if options[0] == "--to":
        found.append(cli("quantize", model, tmp_path / "out.gguf", *options))
    for result in found:
        assert result.exit_code == 2
        assert "''" in result.stderr
        assert "  " not in result.stderr
    assert not list(tmp_path.iterdir())


def test_help_names_every_type_and_alias(cli):
    for verb in ("convert", "quantize"):
        shown = " ".join(cli(verb, "--help").stdout.split())
        for name in RECIPES:
            assert name.lower() in shown
        for alias, name in ALIASES.items():
            assert f"{name.lower()} (or {alias.lower()})" in shown


def test_an_output_that_exists_is_kept_without_force(cli, folder, model, tmp_path):
    out = tmp_path / "out.gguf"
    for args in (["convert", folder, "-o", out], ["quantize", model, out, "--to", "q8_0"]):
        out.write_bytes(b"precious")
        result = cli(*args, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["error"]["code"] == "output_exists"
        assert out.read_bytes() == b"precious"
        assert cli(*args, "--force").exit_code == 0
        assert out.read_bytes()[:4] == b"GGUF"


def test_an_unknown_config_key_is_allowed_by_name(cli, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "twist": 3}))
    refused = cli("convert", copy, "-o", tmp_path / "out.gguf")
    assert refused.exit_code == 4
    assert "twist = 3" in refused.stderr
    assert "--allow-key" in refused.stderr
    assert cli("convert", copy, "-o", tmp_path / "out.gguf", "--allow-key", "twist").exit_code == 0


def test_quantize_stores_another_format(cli, model, tmp_path):
    out = tmp_path / "small.gguf"
    result = cli("quantize", model, out, "--to", "q8_0", "--json")
    assert list(json.loads(result.stdout)) == REPORTED
    assert set(json.loads(cli("show", out, "--json").stdout)["bytes_by_format"]) == {"Q8_0", "F32"}
    assert cli("run", out, "def", "-n", 2, "-q").exit_code == 0


def test_quantize_needs_a_type(cli, model, tmp_path):
    assert cli("quantize", model, tmp_path / "out.gguf").exit_code == 2


@pytest.mark.parametrize(("term", "moves"), [("xterm", True), ("dumb", False)])
def test_a_bar_with_bytes_moves_on_a_terminal_alone(term, moves, spawn, folder, tmp_path):
    ours, theirs = pty.openpty()
    process = spawn("convert", folder, "-o", tmp_path / "out.gguf", stderr=theirs, env={"TERM": term, "COLUMNS": "100"})
    out, _ = process.communicate(timeout=60)
    os.close(theirs)
    seen = os.read(ours, 1 << 16)
    os.close(ours)
    assert (process.returncode, out) == (0, b"")
    assert (b"converting" in seen) == moves
    assert (b"KiB" in seen.replace(b"KiB in", b"")) == moves
    assert b"\x1b" in seen or not moves


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 41, "6.0 TiB")],
)
def test_bytes_are_told_in_binary_units(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (116_288, "116K"), (999_999, "1M"), (1_137_207_296, "1.14B"), (15_517_456_384, "15.5B")],
)
def test_counts_are_told_in_three_digits(count, text):
    assert count_text(count) == text
