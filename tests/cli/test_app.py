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
from starscope.cli.common import ENGINE_NAMES

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
        (["run", "m", "--temprature", "1"], "Did you mean --temperature?"),
        (["run", "m", "--xyzzy"], "See: starscope run --help"),
        (["--verson"], "Did you mean --verbose or --version?"),
        (["run"], "See: starscope run --help"),
        (["run", "m", "p", "-n", "many"], "'many' is not a valid integer"),
        (["run", "m", "p", "--engine", "abacus"], "'auto', 'torch', 'numpy'"),
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
        (KeyboardInterrupt(), None, 130),
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
        assert plain.stderr.startswith("error: ")
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
        "Run it again with --traceback and report what it prints.\n"
    )
    second = cli("--traceback", "run")
    assert second.exit_code == 1
    assert "Traceback (most recent call last)" in second.stderr
    assert 'raise ZeroDivisionError("seven by zero")' in second.stderr


def test_an_error_keeps_its_hint():
    error = as_starscope_error(errors.InputError("it is not there.", hint="Look elsewhere."))
    assert (error.message, error.hint) == ("it is not there.", "Look elsewhere.")


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
        ("starscope t", {"tokenize"}),
        ("starscope run --te", {"--temperature"}),
        ("starscope completion z", {"zsh"}),
        ("starscope run --engine n", {"numpy"}),
    ],
)
def test_a_shell_completes_verbs_options_and_choices(words, found, cli, monkeypatch):
    monkeypatch.setenv("_STARSCOPE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert {line.partition(",")[2] for line in cli().stdout.splitlines()} == found
