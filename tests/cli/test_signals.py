"""Signals: the command unwinds once, leaves nothing half-written, and says with --json why there is no result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

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
    time.sleep(0.02)  # of two that wait together Python takes the one with the lower number
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


# A signal whose exception is lost on the way, as in an extension module's import, and a command that goes on.
LOST = """
    import signal, sys, time
    import starscope.cli.run as verbs
    from starscope.cli import main

    class Losing:
        def __del__(self):
            signal.raise_signal({sent})

    def lose(*_):
        losing = Losing()
        del losing
        {then}

    verbs.load_tokenizer = lose
    main()
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(30)",
        "while True: pass",
        "raise ImportError('initialization failed')",
        "sys.exit(0)",
        "signal.raise_signal(signal.SIGTERM); time.sleep(30)",
    ],
    ids=["sleeps", "computes", "another error", "ends well", "a second signal"],
)
def test_a_signal_whose_exception_was_lost_ends_the_command_all_the_same(then, sent, status):
    program = textwrap.dedent(LOST).format(sent=int(sent), then=then)
    began = time.monotonic()
    done = run_hearing([program, "tokenize", "demo", "x"])
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")
    assert time.monotonic() - began < 5


def run_hearing(arguments):
    """A Python program that hears Ctrl-C, even where the tests themselves ignore it."""
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        capture_output=True,
        timeout=20,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# The command, with all of its imports to come, that never gets further than the first piece of its output.
ENDLESS = """
    import contextlib, sys, time
    import starscope.cli.convert as verbs
    from starscope.cli import main
    from starscope.cli.signals import Signals

    @contextlib.contextmanager
    def endless(*_):
        yield lambda *_: time.sleep(30)

    verbs.byte_progress = endless
    listen = Signals.listen

    def listen_and_tell(self):
        listen(self)
        sys.stdout.write("heeds\\n")
        sys.stdout.flush()

    Signals.listen = listen_and_tell
    main()
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_signal_at_any_moment_ends_the_command_and_leaves_nothing(sent, folder, model, tmp_path):
    program, rng = textwrap.dedent(ENDLESS), random.Random(int(sent))

    def try_once(number):
        out = tmp_path / f"{number}.gguf"
        verb = ["quantize", model, out] if number % 2 else ["convert", folder, "-o", out]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, verb), "--to", "f16"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout.readline() == b"heeds\n"
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(sent)
        try:
            out, err = process.communicate(timeout=10)
        finally:
            process.kill()
        return process.returncode, out, err

    with ThreadPoolExecutor(2) as pool:
        ends = set(pool.map(try_once, range(24)))
    assert ends == {(128 + sent, b"", b"")}
    assert os.listdir(tmp_path) == []
