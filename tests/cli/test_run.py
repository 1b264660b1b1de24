"""`run` and `tokenize`: streams, bytes, options, signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess

import pytest

import starscope

PROMPT = "def a(in):\n"


@pytest.fixture(scope="module")
def loaded(model):
    return starscope.load(model)


def test_stdout_is_the_completion_alone_and_stderr_says_what_ran(cli, model, loaded):
    result = cli("run", model, PROMPT, "-n", 20)
    assert result.exit_code == 0
    assert result.stdout_bytes == loaded.generate(PROMPT, max_new_tokens=20).text.encode()
    first, last = result.stderr.splitlines()
    assert first.startswith("tiny.gguf (starcoder F32) · native engine · cpu · ")
    assert first.endswith((" thread", " threads"))
    assert "20 new tokens" in last
    assert "tok/s" in last
    assert "ended by length" in last


def test_a_folder_and_the_torch_engine_give_the_same_text(cli, model, folder):
    texts = {
        cli("run", source, PROMPT, "-n", 30, "--engine", engine, "-q").stdout_bytes
        for source in (model, folder)
        for engine in ("numpy", "torch")
    }
    assert len(texts) == 1


def test_the_document_of_run_has_exactly_these_keys(cli, model, loaded):
    result = cli("run", model, PROMPT, "-n", 8, "--json")
    document = json.loads(result.stdout)
    assert list(document) == ["text", "token_ids", "finish_reason", "prompt_tokens", "timings"]
    assert list(document["timings"]) == ["load_s", "prefill_tok_s", "decode_tok_s"]
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in document["timings"].values())
    expected = loaded.generate(PROMPT, max_new_tokens=8)
    assert document["text"] == expected.text
    assert document["token_ids"] == expected.token_ids
    assert document["finish_reason"] == "length"
    assert document["prompt_tokens"] == len(loaded.tokenizer.encode(PROMPT))


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_a_prompt_on_stdin_is_taken_as_it_is(dash, cli, model, loaded):
    text = "\n\tdef a(é😀):\r\n  \n\n"
    result = cli("run", model, *dash, "-n", 5, "--json", stdin=text.encode())
    assert json.loads(result.stdout)["prompt_tokens"] == len(loaded.tokenizer.encode(text))


def test_a_prompt_that_is_not_utf8_is_refused_with_its_offset(cli, model):
    result = cli("run", model, stdin=b"abc\xff\n")
    assert result.exit_code == 4
    assert result.stderr == "error: prompt is not UTF-8: byte 0xff at offset 3; expected UTF-8 text.\n"


def test_an_empty_stdin_begins_with_the_end_token(cli, model):
    assert json.loads(cli("run", model, "-n", 1, "--json", stdin=b"").stdout)["prompt_tokens"] == 1


def test_an_empty_prompt_is_told_with_the_token_that_stands_for_it(cli, model):
    told = "note: the prompt is empty; generation starts from <|endoftext|> (0)."
    for args in (["run", model, "", "-n", 1], ["run", model, "", "-n", 1, "--json"]):
        assert told in cli(*args).stderr.splitlines()
    assert "note" not in cli("run", model, "", "-n", 1, "-q").stderr
    assert "note" not in cli("run", model, "", "--suffix", "x", "-n", 1).stderr
    assert "note" not in cli("run", model, "x", "-n", 1).stderr


def test_sampling_options_reach_the_sampler(cli, model, loaded):
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    expected = loaded.generate(PROMPT, max_new_tokens=30, **options)
    result = cli("run", model, PROMPT, "-n", 30, "-q", *flags)
    assert result.stdout_bytes == expected.text.encode()
    others = {
        name: cli(
            "run", model, PROMPT, "-n", 30, "-q", *(f for f in flags if not f.startswith(f"--{name}"))
        ).stdout_bytes
        for name in ("temperature", "top-k", "top-p", "seed")
    }
    assert result.stdout_bytes not in others.values()


def test_a_stop_text_ends_it_and_is_taken_literally(cli, model, loaded):
    whole = loaded.generate(PROMPT, max_new_tokens=60).text
    stop = whole[20:23]
    result = cli("run", model, PROMPT, "-n", 60, "--stop", "\\n", "--stop", stop, "--json")
    document = json.loads(result.stdout)
    assert document["text"] == whole[: whole.index(stop)]
    assert document["finish_reason"] == "stop"


def test_with_a_suffix_stdout_is_the_middle_alone(cli, model, loaded):
    result = cli("run", model, PROMPT, "--suffix", "\nreturn", "-n", 12, "-q")
    assert result.stdout_bytes == loaded.generate(PROMPT, "\nreturn", max_new_tokens=12).text.encode()
    assert result.stdout_bytes != loaded.generate(PROMPT, max_new_tokens=12).text.encode()


def test_a_suffix_without_infilling_tokens_is_unsupported(cli, model_without_fim):
    result = cli("run", model_without_fim, PROMPT, "--suffix", "x")
    assert result.exit_code == 4
    assert "fill-in-the-middle" in result.stderr
    assert "Leave the suffix out" in result.stderr


def test_text_around_a_hole_that_is_cut_is_said_so(cli, model):
    result = cli("run", model, "x" * 500, "--suffix", "y" * 500, "--ctx", 64, "-n", 10)
    assert result.exit_code == 0
    assert "949 tokens around the hole were dropped to fit the context" in result.stderr
    document = json.loads(cli("run", model, "x" * 500, "--suffix", "y" * 500, "--ctx", 64, "-n", 10, "--json").stdout)
    assert document["dropped_tokens"] == 949
    assert json.loads(cli("run", model, "x", "--suffix", "y", "-n", 1, "--json").stdout)["dropped_tokens"] == 0


def test_a_prompt_over_the_context_is_status_4_with_both_numbers(cli, model):
    result = cli("run", model, "x" * 70, "--ctx", 64, "--json")
    assert result.exit_code == 4
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "70" in error["message"]
    assert "64" in error["message"]


def test_the_end_of_the_context_is_no_error(cli, model):
    document = json.loads(cli("run", model, "x" * 60, "--ctx", 64, "-n", 50, "--json").stdout)
    assert document["finish_reason"] == "length"
    assert 1 <= len(document["token_ids"]) <= 5


def test_zero_tokens_evaluate_the_prompt_alone(cli, model):
    document = json.loads(cli("run", model, PROMPT, "-n", 0, "--json").stdout)
    assert (document["text"], document["token_ids"], document["finish_reason"]) == ("", [], "length")
    assert document["timings"]["prefill_tok_s"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["-n", -1],
        ["--temperature", -1],
        ["--top-p", 2],
        ["--min-p", -0.1],
        ["--top-k", -1],
        ["--seed", -1],
        ["--stop", ""],
        ["--threads", 0],
    ],
)
def test_an_option_out_of_range_is_status_2(wrong, cli, model):
    result = cli("run", model, PROMPT, *wrong)
    assert result.exit_code == 2
    assert "expected" in result.stderr


def test_wrong_options_are_refused_before_the_model_is_looked_for(cli, tmp_path):
    assert cli("run", tmp_path / "none.gguf", PROMPT, "--temperature", -1).exit_code == 2


@pytest.mark.parametrize("name", ["none.gguf", "nö/such.gguf", "x" * 300])
def test_a_model_that_is_not_there_is_status_3(name, cli, tmp_path):
    result = cli("run", tmp_path / name, PROMPT)
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")


def test_a_file_that_is_no_model_is_status_4(cli, tmp_path):
    path = tmp_path / "not.gguf"
    path.write_text("this is no model, but it is long enough to be one")
    assert cli("run", path, PROMPT).exit_code == 4


def test_output_is_utf8_whatever_the_locale(spawn, model, loaded):
    process = spawn(
        "run", model, "é", "-n", 40, "-q", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    )
    out, err = process.communicate()
    expected = loaded.generate("é", max_new_tokens=40).text
    assert not expected.isascii()
    assert (out, err) == (expected.encode(), b"")


def test_text_comes_while_it_is_generated(spawn, model, loaded):
    process = spawn("run", model, PROMPT, "-n", 4000, "-q")
    first = process.stdout.read(1)
    assert process.poll() is None, "the first byte is there before the last is generated"
    process.kill()
    process.communicate()
    assert first == loaded.generate(PROMPT, max_new_tokens=1).text.encode()[:1]


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_quietly_and_keeps_what_was_printed(sent, status, spawn, model, loaded):
    process = spawn("run", model, PROMPT, "-n", 4000, "-q")
    got = process.stdout.read(20)
    process.send_signal(sent)
    rest, err = process.communicate()
    assert process.returncode == status
    assert err == b""
    printed = (got + rest).decode(errors="ignore").rstrip("\ufffd")
    enough = loaded.generate(PROMPT, max_new_tokens=4 * len(printed) + 8).text  # a character has four bytes at most
    assert enough.startswith(printed)


def test_the_last_line_stands_alone_where_both_streams_are_one(spawn, model, loaded, tmp_path):
    expected = loaded.generate(PROMPT, max_new_tokens=5).text
    assert not expected.endswith("\n")
    process = spawn("run", model, PROMPT, "-n", 5, stderr=subprocess.STDOUT)
    out, _ = process.communicate()
    assert f"{expected}\nprompt " in out.decode()
    with open(tmp_path / "log", "wb") as log:
        spawn("run", model, PROMPT, "-n", 5, stdout=log, stderr=log).wait()
    assert f"{expected}\nprompt " in (tmp_path / "log").read_text()
    process = spawn("run", model, PROMPT, "-n", 0, stderr=subprocess.STDOUT)
    out, _ = process.communicate()
    assert b"\n\n" not in out


def test_a_reader_that_goes_away_ends_it_quietly(spawn, model):
    process = spawn("run", model, PROMPT, "-n", 4000, "-q")
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_status_3(spawn, model):
    with open("/dev/full", "wb") as full:
        process = spawn("run", model, PROMPT, "-n", 4, "-q", stdout=full)
        _, err = process.communicate()
    assert process.returncode == 3
    assert err == b"error: stdout cannot be written: No space left on device.\n"


def test_without_a_prompt_a_terminal_gets_a_short_answer(spawn, model):
    ours, theirs = pty.openpty()
    process = spawn("run", model, stdin=theirs)
    out, err = process.communicate(timeout=30)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, out) == (2, b"")
    assert err == (b"error: the prompt is missing; expected an argument or text on stdin.\nSee: starscope run --help\n")


def test_the_document_of_tokenize_has_exactly_these_keys(cli, model, loaded):
    text = "def é in a"
    document = json.loads(cli("tokenize", model, text, "--json").stdout)
    assert list(document) == ["ids", "pieces"]
    assert document["ids"] == loaded.tokenizer.encode(text)
    assert document["pieces"] == [loaded.tokenizer.piece(token) for token in document["ids"]]
    assert "def" in document["pieces"]


def test_tokenize_prints_one_line_a_token(cli, folder, loaded):
    result = cli("tokenize", folder, "-", stdin=b"def\n")
    ids = loaded.tokenizer.encode("def\n")
    assert result.stdout == f"{ids[0]}\t'def'\n{ids[1]}\t'\\n'\n"


def test_special_tokens_are_parsed_on_request_alone(cli, model):
    as_text = json.loads(cli("tokenize", model, "<fim_prefix>", "--json").stdout)["ids"]
    as_token = json.loads(cli("tokenize", model, "<fim_prefix>", "--special", "--json").stdout)["ids"]
    assert as_token == [1]
    assert 1 not in as_text


def test_tokenize_works_on_a_vocabulary_alone(cli, folder, tmp_path):
    assert cli("convert", folder, "--vocab-only", "-o", tmp_path / "v.gguf").exit_code == 0
    assert cli("tokenize", tmp_path / "v.gguf", "def").exit_code == 0


def test_other_files_and_names_are_read_before_the_hole(cli, model, loaded, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    names = {"repository": "r", "filename": "a.py", "fim_order": "spm"}
    options = ["--context-file", other, "--repository", "r", "--filename", "a.py", "--fim-order", "spm"]
    result = cli("run", model, PROMPT, "--suffix", "y", *options, "-n", 8, "--json")
    expected = loaded.generate(PROMPT, "y", files=[(str(other), "x = 1\n")], max_new_tokens=8, **names)
    document = json.loads(result.stdout)
    assert document["text"] == expected.text
    assert document["prompt_tokens"] == expected.prompt_tokens
    assert document["prompt_tokens"] > loaded.generate(PROMPT, "y", max_new_tokens=8).prompt_tokens


@pytest.mark.parametrize("option", ["--context-file", "--repository", "--filename", "--fim-order"])
def test_what_is_for_a_hole_needs_a_suffix(cli, model, tmp_path, option):
    (tmp_path / "a.py").write_text("a")
    value = {"--context-file": tmp_path / "a.py", "--fim-order": "spm"}.get(option, "a")
    result = cli("run", model, PROMPT, option, value)
    assert result.exit_code == 2
    assert "needs a suffix" in result.stderr


def test_a_context_file_that_cannot_be_read_is_status_3(cli, model, tmp_path):
    result = cli("run", model, PROMPT, "--suffix", "y", "--context-file", tmp_path / "missing.py")
    assert result.exit_code == 3
    assert "missing.py" in result.stderr


def test_context_files_that_are_cut_are_said_so(cli, model, tmp_path):
    (tmp_path / "big.py").write_text("z" * 500)
    result = cli("run", model, "ab", "--suffix", "cd", "--context-file", tmp_path / "big.py", "--ctx", 300, "-n", 10)
    assert result.exit_code == 0
    assert "tokens around the hole were dropped to fit the context" in result.stderr
    assert "prompt 290 tokens" in result.stderr


def test_with_healing_the_text_goes_on_from_the_prompt(cli, model, loaded):
    result = cli("run", model, PROMPT, "--heal", "-n", 12, "-q")
    assert result.stdout_bytes == loaded.generate(PROMPT, max_new_tokens=12, heal=True).text.encode()
