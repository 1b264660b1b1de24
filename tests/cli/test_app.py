"""The command as a whole: what it imports, how it completes, and how each kind of error ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import click
import pytest

from starscope import __version__, errors
from starscope.cli import app as app_module
from starscope.cli.app import VERBS, app, as_starscope_error
from starscope.cli.engines import ENGINE_NAMES
from starscope.cli.signals import Stopped
from support.users import ordinary_user, reachable_folder

HEAVY = {"numpy", "torch", "tokenizers", "rich", "transformers", "huggingface_hub"}
ALL_VERBS = [verb for verbs in VERBS.values() for verb in verbs]


def imported_by(*args: str) -> set[str]:
    """The top-level packages that a command line imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "starscope", *args], capture_output=True, text=True, check=True
    )
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("run", "--help"), ("completion", "bash")], ids=" ".join)
def test_help_version_and_completion_import_nothing_heavy(args):
    assert imported_by(*args) & HEAVY == set()


def test_show_imports_neither_torch_nor_tokenizers(model):
    assert imported_by("show", str(model)) & HEAVY == {"numpy"}


def test_running_on_the_cpu_does_not_import_torch(model):
    assert "torch" not in imported_by("run", str(model), "def f", "-n", "2")
    for engine in ("native", "numpy"):
        args = ("--value", "layers.*.layer_output", "--value", "next_token_probs", "--engine", engine)
        assert "torch" not in imported_by("trace", str(model), "def f", *args)


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_the_table_says_what_the_command_says_of_itself(verb, cli):
    command = app.get_command(None, verb)
    [text] = [verbs[verb][1] for verbs in VERBS.values() if verb in verbs]
    assert command.help.split("\n\n")[0].rstrip("\n") == text
    shown = cli(verb, "--help")
    assert shown.exit_code == 0
    assert text in shown.stdout


def test_help_lists_every_verb_and_stands_on_stdout(cli):
    for args in ([], ["--help"], ["-h"]):
        result = cli(*args)
        assert result.exit_code == 0
        assert result.stderr == ""
        assert all(f"  {verb} " in result.stdout for verb in ALL_VERBS)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_help_into_a_full_disk_is_status_3(spawn):
    with open("/dev/full", "wb") as full:
        process = spawn("--help", stdout=full)
        _, err = process.communicate()
    assert (process.returncode, err) == (3, b"error: the output cannot be written: No space left on device.\n")


def test_version(cli):
    assert cli("--version").stdout == f"starscope {__version__}\n"


def test_the_engines_on_offer_are_those_that_there_are():
    from starscope.engine.base import ENGINES

    assert set(ENGINE_NAMES) == {"auto", *ENGINES}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rnu"], "Did you mean run?"),
        (["tokenise"], "Did you mean tokenize?"),
        (["xyzzy"], "See: starscope --help"),
        (["generate"], "Did you mean run?"),
        (["complete", "demo", "x"], "Did you mean run?"),
        (["infer"], "Did you mean run?"),
        (["info"], "Did you mean show?"),
        (["inspect"], "Did you mean show?"),
        (["run", "m", "--temprature", "1"], "Did you mean --temperature?"),
        (["run", "m", "--xyzzy"], "See: starscope run --help"),
        (["--verson"], "Did you mean --version?"),
        (["run", "m", "--bogus"], "See: starscope run --help"),
        (["run", "m", "--n", "3"], "Did you mean -n?"),
        (["run", "m", "--temp=1"], "Did you mean --temperature?"),
        (["convert", "m", "--outt", "f16"], "Did you mean --outtype?"),
        (["run", "m", "- a list"], "Put text that starts with - after --"),
        (["run", "m", "--- a/file.py"], "Put text that starts with - after --"),
        (["tokenize", "m", "-1"], "Put text that starts with - after --"),
        (["perplexity", "m", "-1"], "See: starscope perplexity --help"),
        (["run", "m", "p", "-t", "4097"], "threads is 4097; expected 1 to 4096."),
        (["run", "m", "p", "-t", "9" * 20], f"threads is {'9' * 20}; expected 1 to 4096."),
        (["perplexity", "m", "f", "--ctx", "0"], "the context is 0 tokens; expected at least 1."),
        (["demo", "--ctx", "-1"], "the context is -1 tokens; expected at least 1."),
        (["run"], "See: starscope run --help"),
        (["run", "m", "p", "-n", "many"], "'many' is not a valid integer"),
        (["run", "m", "p", "--engine", "abacus"], "'auto', 'native', 'torch', 'numpy'"),
        (["run", "m", "p", "q"], "unexpected extra argument"),
        (["completion", "tcsh"], "'bash', 'zsh', 'fish'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(args, said, cli):
    result = cli(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("raised", "code", "status"),
    [
        (errors.UsageError("x"), "usage", 2),
        (errors.OutputExistsError("x"), "output_exists", 2),
        (errors.InputError("x"), "input", 3),
        (errors.OutputError("x"), "output", 3),
        (errors.UnsupportedError("x"), "unsupported", 4),
        (errors.GGUFError("x"), "invalid_gguf", 4),
        (errors.ContextOverflowError("x"), "context_length_exceeded", 4),
        (errors.DoesNotFitError("x"), "does_not_fit", 5),
        (errors.OfflineError("x"), "offline", 6),
        (errors.VerificationError("x"), "verification", 7),
        (MemoryError(), "does_not_fit", 5),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "input", 3),
        (OSError(errno.ENOSPC, "No space left on device"), "output", 3),
        (ZeroDivisionError("x"), "internal", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (Stopped(15), "terminated", 143),
        (BrokenPipeError(), None, 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_error_has_its_status_and_its_document(raised, code, status, cli, monkeypatch):
    @click.command()
    def broken():
        raise raised

    monkeypatch.setattr(app_module.App, "get_command", lambda self, ctx, name: broken)
    plain = cli("run")
    assert plain.exit_code == status
    assert plain.stdout == ""
    broken.params.append(click.Option(["--json"], is_flag=True, expose_value=False))
    document = cli("run", "--json")
    assert document.exit_code == status
    if code is None:
        assert (plain.stderr, document.stdout, document.stderr) == ("", "", "")
    else:
        assert plain.stderr.startswith("error: ") == isinstance(raised, Exception)
        error = json.loads(document.stdout)["error"]
        assert set(error) == {"code", "message", "hint"}
        assert error["code"] == code


def test_an_internal_error_says_how_to_get_the_traceback_and_traceback_gives_it(cli, monkeypatch):
    @click.command()
    def broken():
        raise ZeroDivisionError("seven by zero")

    monkeypatch.setattr(app_module.App, "get_command", lambda self, ctx, name: broken)
    first = cli("run")
    assert first.stderr == (
        "error: internal error: ZeroDivisionError: seven by zero\n"
        "Run the command again with --traceback and report its output.\n"
    )
    second = cli("--traceback", "run")
    assert second.exit_code == 1
    assert "Traceback (most recent call last)" in second.stderr
    assert 'raise ZeroDivisionError("seven by zero")' in second.stderr


def test_an_error_keeps_its_hint():
    error = as_starscope_error(errors.InputError("it is not there.", hint="Look elsewhere."))
    assert (error.message, error.hint) == ("it is not there.", "Look elsewhere.")


def test_an_error_does_not_draw_on_the_terminal(cli, monkeypatch):
    @click.command()
    def broken():
        raise errors.InputError("a\x1b[31m\nb\x9b\udcff.", hint="Look\r elsewhere.")

    monkeypatch.setattr(app_module.App, "get_command", lambda self, ctx, name: broken)
    expected = "error: a\\x1b[31m\\nb\\x9b\\udcff.\nLook\\r elsewhere.\n"
    assert cli("run").stderr == expected
    traced = cli("--traceback", "run").stderr
    assert traced.endswith(expected)
    assert all(letter.isprintable() or letter == "\n" for letter in traced)
    assert len(traced.splitlines()) > 5


@pytest.mark.parametrize("args", [
    ["show", "\x1b[31mred"], ["run", "a\nb"], ["rn\x07u"], ["run", "m", "--\x1b[2J"], ["convert", "a\x9bb"],
    ["run", "demo", "p", "--engine", "\x1b"], ["perplexity", "demo", "\x1b]0;x"],
])  # fmt: skip
def test_what_was_typed_is_escaped_in_the_error(args, cli):
    result = cli(*args)
    assert result.exit_code in (2, 3)
    assert all(letter.isprintable() or letter == "\n" for letter in result.stderr)
    assert len(result.stderr.splitlines()) <= 2


@pytest.mark.parametrize("args", [
    ["run", "", "p"], ["tokenize", "", "p"], ["show", ""], ["graph", ""], ["perplexity", "", "f"],
    ["perplexity", "demo", ""], ["convert", ""], ["convert", "m", "-o", ""], ["quantize", "", "o", "--to", "f16"],
    ["quantize", "demo", "", "--to", "f16"],
])  # fmt: skip
def test_an_empty_name_is_refused_in_words(args, cli):
    result = cli(*args)
    assert result.exit_code == 2
    assert "the name is empty; expected a file or folder." in result.stderr


@pytest.mark.parametrize("args", [
    ["run", "{}", "p"], ["tokenize", "{}", "p"], ["show", "{}"], ["graph", "{}"], ["perplexity", "{}", __file__],
    ["perplexity", "demo", "{}"], ["convert", "{}"], ["quantize", "{}", "o.gguf", "--to", "f16"],
])  # fmt: skip
@pytest.mark.parametrize("kind", ["file", "folder", "in a folder"])
def test_what_may_not_be_read_is_status_3(args, kind, cli):
    with reachable_folder() as outer:
        path = outer / "locked"
        if kind == "file":
            path.write_bytes(b"GGUF" + bytes(100))
        else:
            path.mkdir()
            (path / "config.json").write_text("{}")
        path.chmod(0)
        named = path / "model.gguf" if kind == "in a folder" else path
        with ordinary_user():
            result = cli(*(arg.format(named) for arg in args))
        path.chmod(0o700)
    assert result.exit_code == 3
    assert str(named) in result.stderr


@pytest.mark.parametrize("place", ["before", "after"])
def test_quiet_stands_before_or_after_the_verb(place, cli, model):
    args = ["run", str(model), "x", "-n", "1"]
    result = cli(*(["-q", *args] if place == "before" else [*args, "-q"]))
    assert (result.exit_code, result.stderr) == (0, "")


def test_json_after_two_dashes_is_text(cli, tmp_path):
    result = cli("run", tmp_path / "none.gguf", "--", "--json")
    assert result.exit_code == 3
    assert result.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_this_command(shell, cli):
    result = cli("completion", shell)
    assert result.exit_code == 0
    assert f"_STARSCOPE_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("starscope t", {"tokenize", "trace", "train"}),
        ("starscope run --tem", {"--temperature"}),
        ("starscope completion z", {"zsh"}),
        ("starscope run --engine nu", {"numpy"}),
    ],
)
def test_a_shell_completes_verbs_options_and_choices(words, found, cli, monkeypatch):
    monkeypatch.setenv("_STARSCOPE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert {line.partition(",")[2] for line in cli().stdout.splitlines()} == found
