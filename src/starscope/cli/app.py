"""The command `starscope`: the table of verbs, and how every error ends: one sentence, a hint, a status.

0 done · 1 internal error · 2 usage · 3 input or output · 4 unsupported or invalid content
5 does not fit · 6 offline · 7 verification failed · 129 hung up · 130 interrupted · 143 terminated
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from starscope import __version__
from starscope.cli.common import Session, discard_stdout, everywhere
from starscope.cli.signals import Stopped
from starscope.errors import DoesNotFitError, InputError, OutputError, StarscopeError, UsageError

# section -> verb -> (module and its function, what it does in a few words)
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Run a model": {
        "demo": ("demo:demo", "Complete code with the bundled demo model."),
        "run": ("run:run", "Complete a prompt, or fill in the middle of one."),
        "tokenize": ("run:tokenize", "Split text into a model's tokens."),
        "perplexity": ("perplexity:perplexity", "Measure how well a model predicts text files."),
        "trace": ("trace:trace", "Print values from the forward pass of a prompt."),
        "plan": ("plan:plan", "Show how a model would be split across devices."),
        "bench": ("bench:bench", "Measure a model's speed on this machine."),
    },
    "Convert and inspect files": {
        "convert": ("convert:convert", "Convert a Hugging Face folder to a GGUF file."),
        "quantize": ("convert:quantize", "Convert a GGUF file's weights to another format."),
        "show": ("show:show", "Describe a model file or folder."),
        "graph": ("show:graph", "Print a model's forward pass, one operation per line."),
        "merge": ("merge:merge", "Merge LoRA adapters into a model, as one GGUF file."),
        "export": ("export:export", "Convert a GGUF file to a Hugging Face folder."),
    },
    "Train a model": {
        "train": ("train:train", "Train a small model from scratch on plain text or code."),
        "finetune": ("finetune:finetune", "Train a LoRA adapter for a model on plain text or code."),
    },
    "Installation": {
        "doctor": ("doctor:doctor", "Check versions, hardware and optional packages."),
        "completion": ("completion:completion", "Print a shell completion script."),
    },
}
PROGRAM, COMPLETE = "starscope", "_STARSCOPE_COMPLETE"
SYNONYMS = {
    "generate": "run",
    "complete": "run",
    "infer": "run",
    "info": "show",
    "inspect": "show",
    "export-lora": "merge",
}
NEAR_VERB, NEAR_OPTION = 0.65, 0.75  # how alike a name must be to be meant; a verb of three letters has room for less
TAKE_TEXT = ("run", "tokenize", "trace")  # verbs with a text among their arguments
OPTION = re.compile(r"--?[a-z][a-z-]*(=.*)?", re.DOTALL | re.IGNORECASE)  # what somebody may have taken for one
TARGETS = {verb: target for section in VERBS.values() for verb, (target, _) in section.items()}


class App(click.Group):
    """The group of all verbs: imports the one that is called, and turns whatever it raises into an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the table's order."""
        return list(TARGETS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, its module imported now."""
        if cmd_name not in TARGETS:
            return None
        module, _, function = TARGETS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"starscope.cli.{module}"), function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest verb for one that does not exist."""
        verb = args[0]
        if verb not in TARGETS and not verb.startswith("-") and not ctx.resilient_parsing:
            near = [SYNONYMS[verb]] if verb in SYNONYMS else difflib.get_close_matches(verb, TARGETS, 1, NEAR_VERB)
            hint = f"Did you mean {near[0]}?" if near else "See: starscope --help"
            raise UsageError(f"unknown command {verb!r}; expected one of {', '.join(TARGETS)}.", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of verbs, without importing them."""
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl([(verb, text) for verb, (_, text) in verbs.items()], col_max=12)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Verbs and options that begin so, without importing the verbs."""
        from click.shell_completion import CompletionItem

        rows = [(verb, text) for verbs in VERBS.values() for verb, (_, text) in verbs.items()]
        verbs = [CompletionItem(verb, help=text) for verb, text in rows if verb.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        obj: Session | None = None,
        **extra: Any,
    ) -> NoReturn:
        """Run one command line and exit with its status."""
        args = list(sys.argv[1:] if args is None else args)
        session = obj or Session()
        session.look_at(args)
        try:
            try:
                complete_if_asked(self)
                with self.make_context(PROGRAM, args, obj=session) as ctx:
                    self.invoke(ctx)
            finally:
                if session.signals is not None:
                    session.signals.check()
        except BaseException as error:
            sys.exit(end(session, error))
        sys.exit(0)


def complete_if_asked(command: click.Command) -> None:
    """Answer a shell that completes a line, and exit; nothing otherwise."""
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(command, {}, PROGRAM, COMPLETE, instruction))


def end(session: Session, error: BaseException) -> int:
    """Say what went wrong and give the exit status for it."""
    if isinstance(error, SystemExit):  # shell completion
        return int(error.code or 0)
    if isinstance(error, click.exceptions.Exit):  # --help, --version
        return error.exit_code
    if isinstance(error, Stopped):
        tell_in_json(session, "terminated", f"terminated by {signal.Signals(error.number).name}.")
        return 128 + error.number
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        tell_in_json(session, "interrupted", "interrupted by SIGINT.")
        return 130
    if isinstance(error, OSError) and error.filename is None:  # a stream, not a file
        discard_stdout()
    if isinstance(error, BrokenPipeError):  # whoever read the output has what it wanted
        return 0
    if session.traceback and not isinstance(error, click.ClickException):
        import traceback

        session.error(*"".join(traceback.format_exception(error)).rstrip().split("\n"))
    known = as_starscope_error(error, session.args)
    session.error(f"error: {known.message}", *([known.hint] if known.hint else []))
    tell_in_json(session, known.code, known.message, known.hint)
    return known.exit_status


def tell_in_json(session: Session, code: str, message: str, hint: str = "") -> None:
    """The document of an error, where one was asked for and stdout does not hold another, whole or in part."""
    if session.json and not session.has_written:
        with contextlib.suppress(OSError, OutputError):  # stdout is what failed
            session.document({"error": {"code": code, "message": message, "hint": hint}})


def as_starscope_error(error: BaseException, args: Sequence[str] = ()) -> StarscopeError:
    """An error of the command line, of the system or of ours as one of ours; anything else as an internal error."""
    if isinstance(error, StarscopeError):
        return error
    if isinstance(error, click.NoSuchOption):
        return UsageError(f"unknown option {error.option_name}.", hint=option_hint(error, args))
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else PROGRAM
        return UsageError(_sentence(" ".join(error.format_message().split())), hint=f"See: {path} --help")
    if isinstance(error, click.ClickException):
        return UsageError(_sentence(" ".join(error.format_message().split())))
    if isinstance(error, MemoryError):
        return DoesNotFitError(
            "out of memory.", hint="Use a smaller model, a smaller weight format (see quantize) or a smaller --ctx."
        )
    if isinstance(error, OSError):
        if error.filename is None:
            return OutputError(f"the output cannot be written: {error.strerror}.")
        return InputError(f"{os.fsdecode(error.filename)}: {error.strerror}.")
    return StarscopeError(
        f"internal error: {type(error).__name__}: {error}",
        hint="Run the command again with --traceback and report its output.",
    )


def option_hint(error: click.NoSuchOption, args: Sequence[str]) -> str:
    """What was meant by an option that does not exist: one whose name is near, or a text that begins as options do."""
    command = error.ctx.command if error.ctx else None
    names = [name for param in (command.params if command else ()) for name in (*param.opts, *param.secondary_opts)]
    asked = error.option_name.lstrip("-")
    by_word = {name.lstrip("-"): name for name in names if name.startswith("-")}
    begun = [word for word in by_word if len(asked) > 2 and word.startswith(asked)]
    near = begun or difflib.get_close_matches(asked, by_word, 2, NEAR_OPTION)
    if asked in by_word:  # --n for -n
        near = [asked]
    if near:
        return f"Did you mean {' or '.join(sorted(by_word[word] for word in near))}?"
    given = next((arg for arg in args if arg.startswith(error.option_name)), error.option_name)
    path = error.ctx.command_path if error.ctx else PROGRAM
    if command is not None and command.name in TAKE_TEXT and not OPTION.fullmatch(given):
        return f"Put text that starts with - after --, as in: {path} MODEL -- '- a list'"
    return f"See: {path} --help"


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:]


@click.group(
    cls=App,
    invoke_without_command=True,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@everywhere
@click.version_option(__version__, message="starscope %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Convert, run, train and inspect code models of the StarCoder and LLaMA families.

    MODEL is a .gguf file, a Hugging Face folder, "demo" (the bundled model), or a model on the Hugging Face Hub:
    owner/name[@revision][:TYPE].
    """
    if ctx.invoked_subcommand is None:
        session: Session = ctx.obj
        session.write(ctx.get_help() + "\n")
