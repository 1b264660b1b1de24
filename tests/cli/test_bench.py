"""`bench`: its document, its lines, its refusals, its progress line."""

from __future__ import annotations

import json
import os
import pty
import signal
import time

import pytest

FAST = ("-p", 8, "-n", 2, "--repeat", 1)
FIXED = ("prefill_tok_s", "decode_tok_s", "batch_tok_s", "load_s", "peak_rss_bytes")


def test_the_document_has_the_fixed_keys_and_texts_for_depths_and_sizes(cli, model):
    result = cli("bench", model, *FAST, "-d", "0,64", "-b", "1,3", "--json")
    document = json.loads(result.stdout)
    assert tuple(document)[:5] == FIXED
    assert list(document["prefill_tok_s"]) == list(document["decode_tok_s"]) == ["0", "64"]
    assert list(document["batch_tok_s"]) == ["1", "3"]
    assert all(speed > 0 for key in FIXED[:3] for speed in document[key].values())
    assert document["load_s"] > 0
    assert document["peak_rss_bytes"] > 1 << 20
    assert document["weight_bytes"] > 0
    assert document["read_gb_s"] > 0
    assert list(document["decode_read_share"]) == ["0", "64"]
    about = ("model", "device", "prompt", "steps", "repeat")
    assert {name: document[name] for name in about} == {
        "model": "tiny.gguf", "device": "cpu", "prompt": 8, "steps": 2, "repeat": 1
    }  # fmt: skip


def test_lines_have_one_figure_each_aligned(cli, model):
    lines = cli("bench", model, *FAST, "-d", "0,64", "-b", "3").stdout.splitlines()
    names = [
        "prefill 8 at depth 0", "prefill 8 at depth 64", "decode 2 at depth 0", "decode 2 at depth 64",
        "decode 3 together", "load", "peak memory", "read bandwidth",
    ]  # fmt: skip
    assert [line.partition("  ")[0] for line in lines] == names
    width = max(map(len, names)) + 2
    numbers = [line[width:].lstrip().partition(" ")[0] for line in lines]
    assert all(float(number) >= 0 for number in numbers)
    assert len({line.index(number, width) + len(number) for line, number in zip(lines, numbers, strict=True)}) == 1


def test_defaults_that_the_context_has_no_room_for_are_left_out_and_said(cli, model):
    result = cli("bench", model, "--ctx", 40, "--repeat", 1, "--json")
    document = json.loads(result.stdout)
    assert list(document["prefill_tok_s"]) == ["0"]
    assert (document["prompt"], document["steps"]) == (40, 40)
    assert "note: depth 2048 is skipped: the context has only 40 positions.\n" in result.stderr


def test_the_engine_is_the_one_asked_for(cli, model):
    document = json.loads(
        cli("bench", model, *FAST, "-d", "0", "-b", "1", "--engine", "torch", "-t", 1, "--json").stdout
    )
    assert (document["engine"], document["threads"]) == ("torch", 1)


@pytest.mark.parametrize(("args", "said"), [
    (["-d", "0,x"], "-d is '0,x'; expected whole numbers separated by commas, such as 1,8."),
    (["-b", ""], "-b is ''; expected whole numbers"),
    (["-b", "1,,2"], "-b is '1,,2'; expected whole numbers"),
    (["-d", "1.5"], "-d is '1.5'; expected whole numbers"),
    (["-d", "-1"], "a depth is -1; expected a whole number, 0 or more."),
    (["-b", "1,0"], "a batch size is 0; expected a whole number, 1 to 1024."),
    (["-p", "0"], "the prompt is 0; expected a whole number, 1 or more."),
    (["-n", "-3"], "the number of steps is -3; expected a whole number, 1 or more."),
    (["--repeat", "0"], "repeat is 0; expected a whole number, 1 to 1000."),
    (["-p", "x"], "invalid value for '-p'"),
])  # fmt: skip
def test_a_wrong_number_is_status_2_before_the_model_is_loaded(args, said, cli, tmp_path):
    result = cli("bench", tmp_path / "none.gguf", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {said}")


def test_a_depth_over_the_context_is_status_4(cli, model):
    result = cli("bench", model, "-d", "4000", "--json")
    assert result.exit_code == 4
    document = json.loads(result.stdout)
    assert document["error"]["code"] == "context_length_exceeded"
    assert document["error"]["message"] == (
        "depth 4000 and a prompt of 512 tokens need 4512 positions; the context has 4096."
    )


def test_no_such_model_is_status_3(cli, tmp_path):
    assert cli("bench", tmp_path / "none.gguf").exit_code == 3


def test_stderr_has_no_progress_where_it_is_no_terminal(cli, model):
    assert "\r" not in cli("bench", model, *FAST, "-d", "0", "-b", "1").stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_on_a_terminal_a_line_says_what_is_measured_and_is_gone_at_the_end(quiet, spawn, model):
    ours, theirs = pty.openpty()
    process = spawn("bench", model, *FAST, "-d", "0", "-b", "1", *(["-q"] if quiet else []), stderr=theirs)
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    out = process.communicate()[0]
    assert process.returncode == 0
    assert b"prefill 8 at depth 0" in out
    assert (b"prefill at depth 0, 1 of 1" in seen) is not quiet
    if not quiet:
        assert seen.endswith(b"\r\x1b[K")


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


def test_ctrl_c_ends_it_with_130_and_says_nothing(spawn, model):
    process = spawn("bench", model, "-n", 4000, "-d", "0", "-b", "1", "--repeat", 1000)
    assert b"tiny" in process.stderr.readline()  # the model is loaded
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")
