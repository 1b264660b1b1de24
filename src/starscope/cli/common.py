"""What the verbs share: where output goes, texts that come in as bytes, and the options of more than one verb."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeVar

import click

from starscope.cli.units import one_line
from starscope.errors import InputError, InvalidContentError, OutputError, UsageError

if TYPE_CHECKING:
    from starscope.cli.signals import Signals
    from starscope.tokenizer import Tokenizer

F = TypeVar("F", bound=Callable[..., Any])


class PathName(click.Path):
    """The name of a file or folder, which a shell completes. Whether it can be read is for the library to say."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=str)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The name as it is; an empty one would stand for the current folder."""
        if not os.fspath(value):
            self.fail("the name is empty; expected a file or folder.", param, ctx)
        return super().convert(value, param, ctx)


PATH = PathName()
MODEL = PATH  # "demo" and hub names too


@dataclass
class Session:
    """One command line: how much it says, and where. stdout takes data alone, always as UTF-8."""

    quiet: bool = False
    verbose: bool = False
    traceback: bool = False
    json: bool = False
    args: Sequence[str] = ()  # those before "--"
    has_written: bool = False  # to stdout
    is_mid_line: bool = False  # stdout: what was written there last does not end with a line feed
    signals: Signals | None = None  # those that may end it, in a process of its own

    def look_at(self, args: Sequence[str]) -> None:
        """Take what an error in the rest of the command line depends on, before it is parsed."""
        self.args = args[: args.index("--")] if "--" in args else args
        self.json = "--json" in self.args
        self.traceback = "--traceback" in self.args

    def write(self, text: str) -> None:
        """Data to stdout, at once. OutputError when it cannot be written; BrokenPipeError when nobody reads."""
        self.write_bytes(text.encode("utf-8", "surrogateescape"))

    def write_bytes(self, data: bytes) -> None:
        """As `write`, for what is bytes already."""
        if sys.stdout is None:
            raise OutputError("stdout is closed; expected somewhere to write the output.")
        if data:
            self.has_written, self.is_mid_line = True, not data.endswith(b"\n")
        try:
            stdout: BinaryIO = sys.stdout.buffer
            stdout.write(data)
            stdout.flush()
        except OSError as error:
            discard_stdout()
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"stdout cannot be written: {error.strerror}.") from None

    def document(self, document: Mapping[str, Any]) -> None:
        """The one JSON document of a command. A lone surrogate, as in a path that is not UTF-8, is written escaped."""
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        self.write_bytes(text.encode("utf-8", "backslashreplace") + b"\n")

    def note(self, text: str) -> None:
        """A line for the person, unless -q."""
        if not self.quiet:
            self.error(text)

    def detail(self, text: str) -> None:
        """A line for the person, only with -v."""
        if self.verbose and not self.quiet:
            self.error(text)

    def error(self, *lines: str) -> None:
        """Lines for the person, always; without control characters, which a file's name may hold.

        Where stdout leads to the same place, they do not go on in the middle of its last line.
        """
        if sys.stderr is None:
            return
        text = "".join(one_line(line) + "\n" for line in lines)
        if self.is_mid_line and are_one_place(sys.stdout, sys.stderr):
            text = "\n" + text
        self.is_mid_line = False
        with contextlib.suppress(OSError):  # nobody is there to be told
            stderr: BinaryIO = sys.stderr.buffer
            stderr.write(text.encode("utf-8", "backslashreplace"))
            stderr.flush()

    @property
    def shows_progress(self) -> bool:
        """Whether a moving line would be seen: stderr is a terminal that can move, and nobody asked for quiet."""
        return not self.quiet and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def discard_stdout() -> None:
    """Send what Python still flushes at its end nowhere: the pipe is closed or the disk is full."""
    with contextlib.suppress(OSError, ValueError):  # not a real file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is at the other end; None is a stream that was closed before the process began."""
    return stream is not None and stream.isatty()


def are_one_place(one: TextIO | None, other: TextIO | None) -> bool:
    """Whether two streams end in one terminal, pipe or file, so that what they carry is seen as one text."""
    if one is None or other is None:
        return False
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # not real files, as in tests
        return False


def everywhere(function: F) -> F:
    """-q, -v and --traceback, before the verb or after it."""

    def switch(field: str) -> Callable[[click.Context, click.Parameter, bool], None]:
        def set_field(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
            if value:
                setattr(ctx.find_root().obj, field, True)

        return set_field

    for flags, field, text in (
        (("--traceback",), "traceback", "Print the Python traceback on errors."),
        (("-v", "--verbose"), "verbose", "Print more details."),
        (("-q", "--quiet"), "quiet", "Print only errors."),
    ):
        option = click.option(*flags, is_flag=True, expose_value=False, callback=switch(field), help=text)
        function = option(function)
    return function


def json_option(function: F) -> F:
    """--json; the session knows of it before anything is parsed."""
    option = click.option("--json", "as_json", is_flag=True, expose_value=False, help="Print the result as JSON.")
    return option(function)


def check_threads(_ctx: click.Context, _parameter: click.Parameter, value: int | None) -> int | None:
    """The engines' own limit, before a model is loaded for nothing."""
    if value is not None:
        from starscope.engine.base import MAX_THREADS

        if not 1 <= value <= MAX_THREADS:
            raise UsageError(f"threads is {value}; expected 1 to {MAX_THREADS}.")
    return value


def load_tokenizer(name: str) -> Tokenizer:
    """MODEL's tokenizer alone: a file without weights or of another architecture will do."""
    from starscope.family import all_families
    from starscope.gguf import read_gguf
    from starscope.model import find_model
    from starscope.tokenizer import Tokenizer

    path = find_model(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    with read_gguf(path) as file:
        defaults = {family.gguf_architecture: family.default_pre_tokenizer for family in all_families().values()}
        return Tokenizer.from_gguf(file, defaults.get(str(file.get("general.architecture")), "gpt-2"))


def text_argument(value: str, what: str) -> str:
    """An argument's bytes, as the shell gave them, read as UTF-8 whatever the locale is."""
    return utf8(os.fsencode(value), what)


def utf8(data: bytes, what: str) -> str:
    """Bytes as text, unchanged. InvalidContentError with the offset of the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidContentError(
            f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; expected UTF-8 text."
        ) from None


def read_file(path: str) -> bytes:
    """All bytes of a regular file. InputError for one that cannot be read, and for what is none: a device or a pipe
    may have no end.
    """
    try:
        # O_NONBLOCK: a pipe would wait for its other end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{path} is not a regular file; expected a text file.")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be read: {reason}.") from error


def text_or_stdin(ctx: click.Context, value: str | None, what: str) -> str:
    """An argument's text, or stdin as it is when the argument is absent or "-"."""
    if value is not None and value != "-":
        return text_argument(value, what)
    if sys.stdin is None or (value is None and is_terminal(sys.stdin)):
        raise click.UsageError(f"the {what} is missing; expected an argument or text on stdin.", ctx)
    return utf8(sys.stdin.buffer.read(), what)
