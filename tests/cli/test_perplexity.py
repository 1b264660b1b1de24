"""`perplexity`: its document, its lines, its refusals."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

import starscope
from starscope.perplexity import Perplexity, measure_texts

TEXT = "def a(in):\n    return é\n" * 10


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / "a.py", tmp_path / "b.py"]
    for path, text in zip(made, (TEXT, "x = 1\r\n"), strict=True):
        path.write_bytes(text.encode())
    return made


def test_the_document_has_exactly_these_keys_and_the_librarys_numbers(cli, model, files):
    document = json.loads(cli("perplexity", model, *files, "--json").stdout)
    loaded = starscope.load(model)
    expected = measure_texts(loaded.engine, loaded.tokenizer, [TEXT, "x = 1\r\n"])
    assert document == {
        "perplexity": expected.perplexity,
        "bits_per_byte": expected.bits_per_byte,
        "tokens": expected.tokens,
        "bytes": sum(path.stat().st_size for path in files),
    }
    assert list(document) == ["perplexity", "bits_per_byte", "tokens", "bytes"]


def test_stdout_is_one_line_a_number_and_stderr_states_window_and_stride(cli, model, files):
    result = cli("perplexity", model, files[0], "--ctx", 64, "--stride", 16)
    lines = dict(line.split() for line in result.stdout.splitlines())
    assert list(lines) == ["perplexity", "bits_per_byte", "tokens", "bytes"]
    assert lines["bytes"] == str(len(TEXT.encode()))
    bits = int(lines["tokens"]) * math.log2(float(lines["perplexity"])) / int(lines["bytes"])
    assert float(lines["bits_per_byte"]) == pytest.approx(bits, abs=1e-3)
    assert "1 file, windows of 64 tokens, 16 apart, " in result.stderr


def test_a_perplexity_past_every_float_is_infinite_in_lines_and_null_in_json(cli, model, files, monkeypatch):
    found = Perplexity(nats=1e6, tokens=100, bytes=200, window=64, stride=32)
    assert math.isinf(found.perplexity)
    monkeypatch.setattr("starscope.perplexity.measure_texts", lambda *_, **__: found)
    lines = cli("perplexity", model, files[0]).stdout.splitlines()
    assert lines[0].split() == ["perplexity", "infinite"]
    assert lines[1].split() == ["bits_per_byte", f"{found.bits_per_byte:.4f}"]
    document = json.loads(cli("perplexity", model, files[0], "--json").stdout, parse_constant=pytest.fail)
    assert (document["perplexity"], document["bits_per_byte"]) == (None, found.bits_per_byte)


def test_window_and_stride_change_what_is_measured(cli, model, files):
    options = ([], ["--ctx", 64], ["--ctx", 64, "--stride", 1])
    found = [json.loads(cli("perplexity", model, files[0], *more, "--json").stdout) for more in options]
    assert len({one["bits_per_byte"] for one in found}) == 3
    assert len({one["tokens"] for one in found}) == 1


@pytest.mark.parametrize(("data", "status", "said"), [
    (None, 3, "No such file or directory"),
    (b"", 4, "there is no text in"),
    (b"ab\xff", 4, "is not UTF-8: byte 0xff at offset 2"),
])  # fmt: skip
def test_a_file_that_cannot_be_measured_is_refused_before_the_model_is_loaded(data, status, said, cli, tmp_path):
    path = tmp_path / "text.py"
    if data is not None:
        path.write_bytes(data)
    result = cli("perplexity", tmp_path / "none.gguf", path)
    assert result.exit_code == status
    assert str(path) in result.stderr
    assert said in result.stderr


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_regular_file_is_refused_at_once(kind, spawn, model, tmp_path):
    path = tmp_path / "text" if kind != "device" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    process = spawn("perplexity", model, path)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (3, b"")
    assert err.startswith(f"error: {path} ".encode())
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("args", [[], ["--stride", 0], ["--stride", 5000]])
def test_a_wrong_command_line_is_status_2(args, cli, model, files):
    assert cli("perplexity", model, *(files if args else []), *args).exit_code == 2
