"""Signals: the command unwinds once, leaves nothing half-written, and says with --json why there is no result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

# The command, stopped for good at the first tensor; what it left is removed slowly, so that signals meet it there.
STALLED = """
    import os, sys, time
    import starscope.convert, starscope.quantize
    from starscope.cli import main

    def stall(*_):
        print("ready", file=sys.stderr, flush=True)
        time.sleep(30)

    def slow_unlink(*args, unlink=os.unlink, **options):
        time.sleep(0.3)
        unlink(*args, **options)

    starscope.convert.encode_checked = starscope.quantize.encode_checked = stall
    os.unlink = slow_unlink
    main()
"""


@pytest.fixture
def stalled(folder, model, tmp_path):
    """Start `convert` or `quantize` into tmp_path and wait until it writes."""

    def start(verb, *options, ignored=()):
        paths = [folder, "-o", tmp_path / "out.gguf"] if verb == "convert" else [model, tmp_path / "out.gguf"]

        def prepare():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STALLED), verb, *map(str, paths), "--to", "f16", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
        )
        assert process.stderr.readline() == b"ready\n"
        [temporary] = os.listdir(tmp_path)
        assert temporary.startswith(".starscope-")
        return process

    return start


@pytest.mark.parametrize("verb", ["convert", "quantize"])
@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_a_signal_leaves_nothing_and_is_quiet(verb, sent, status, stalled, tmp_path):
    process = stalled(verb)
    process.send_signal(sent)
    assert process.communicate() == (b"", b"")
    assert process.returncode == status
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_follow_the_first_do_not_break_its_work(first, stalled, tmp_path):
    process = stalled("convert")
    process.send_signal(first)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        time.sleep(0.002)
        process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 128 + first
    assert os.listdir(tmp_path) == []


def test_a_signal_that_was_ignored_from_the_beginning_stays_so(stalled, tmp_path):
    process = stalled("convert", ignored=[signal.SIGHUP])
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    assert len(os.listdir(tmp_path)) == 1
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(), process.returncode) == ((b"", b""), 143)


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "terminated")]
)
def test_with_json_a_signal_has_its_document(sent, code, stalled):
    process = stalled("quantize", "--json")
    process.send_signal(sent)
    out, err = process.communicate()
    assert (process.returncode, err) == (128 + sent, b"")
    error = json.loads(out)["error"]
    assert list(error) == ["code", "message", "hint"]
    assert error["code"] == code
    assert signal.Signals(sent).name in error["message"]


def test_a_document_that_was_printed_is_the_only_one(cli, monkeypatch):
    def interrupted(self, _text):
        raise KeyboardInterrupt

    monkeypatch.setattr("starscope.cli.common.Session.detail", interrupted)
    result = cli("tokenize", "demo", "def", "--json")
    assert result.exit_code == 130
    assert list(json.loads(result.stdout)) == ["ids", "pieces"]


def test_a_command_is_not_deaf_after_a_signal_that_python_could_not_pass_on():
    program = """
        import signal
        from starscope.cli.signals import stop_on_signals

        class Swallowing:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop_on_signals()
        swallowing = Swallowing()
        del swallowing
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("heard")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"heard\n", b"")
