"""What the verbs share: where output goes, texts that come in as bytes, and the options of more than one verb."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypedDict, TypeVar, cast

import click

from starscope.cli.units import one_line, plural
from starscope.errors import InputError, InvalidContentError, OutputError, UsageError

if TYPE_CHECKING:
    from starscope.cli.signals import Signals
    from starscope.model import Model
    from starscope.placement import Layers
    from starscope.tokenizer import Tokenizer

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_NAMES = ("auto", "native", "torch", "numpy")


class PathName(click.Path):
    """The name of a file or folder, which a shell completes. Whether it can be read is for the library to say."""

    def __init__(self) -> None:
        super().__init__(readable=False, path_type=str)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The name as it is; an empty one would stand for the current folder."""
        if not os.fspath(value):
            self.fail("the name is empty; expected that of a file or folder.", param, ctx)
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
            raise OutputError("stdout is closed; expected a place for the output.")
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
        (("--traceback",), "traceback", "Print the Python traceback of an error."),
        (("-v", "--verbose"), "verbose", "Say more."),
        (("-q", "--quiet"), "quiet", "Say nothing but errors."),
    ):
        option = click.option(*flags, is_flag=True, expose_value=False, callback=switch(field), help=text)
        function = option(function)
    return function


def json_option(function: F) -> F:
    """--json; the session knows of it before anything is parsed."""
    option = click.option("--json", "as_json", is_flag=True, expose_value=False, help="Print one JSON document.")
    return option(function)


def check_threads(_ctx: click.Context, _parameter: click.Parameter, value: int | None) -> int | None:
    """The engines' own limit, before a model is loaded for nothing."""
    if value is not None:
        from starscope.engine.base import MAX_THREADS

        if not 1 <= value <= MAX_THREADS:
            raise UsageError(f"threads is {value}; expected 1 to {MAX_THREADS}.")
    return value


def check_context(_ctx: click.Context, _parameter: click.Parameter, value: int | None) -> int | None:
    """At least one position; whether the model has so many is seen once it is loaded."""
    if value is not None and value < 1:
        raise UsageError(f"the context is {value}; expected a number of tokens, at least 1.")
    return value


class LayersType(click.ParamType):  # type: ignore[type-arg]
    """A number of layers, all or auto."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the word."""
        if isinstance(value, int) or value in ("all", "auto"):
            return value
        if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10):
            self.fail(f"{value!r} is no number of layers; expected one from 0 on, all or auto.", param, ctx)
        return int(value)


LAYERS = LayersType()


def read_shares(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> list[float] | None:
    """`3,1` -> shares of the devices."""
    if value is None:
        return None
    try:
        return [float(part) for part in value.replace("/", ",").split(",")]
    except ValueError:
        raise UsageError(f"the split is {value!r}; expected numbers with commas between, as 3,1.") from None


def use_isa(name: str, engine: str, device: str) -> None:
    """Have the compiled module use one instruction set from now on. UsageError where another engine would run, in
    which nothing but the decoding of weights would change.
    """
    from starscope import native
    from starscope.engine.base import choose_engine

    if engine == "auto":
        engine, _ = choose_engine(device)
    if engine != "native":
        raise UsageError(
            f"--isa is for the native engine, and here the {engine} engine would run; "
            "leave --isa out, or use --engine native."
        )
    native.use_isa(name)


class EngineArguments(TypedDict):
    """What `load` takes of the options of every verb that runs a model."""

    engine: str
    device: str
    context_length: int | None
    threads: int | None
    gpu_layers: Layers
    low_vram: bool
    kv_offload: bool
    main_gpu: int | None
    tensor_split: list[float] | None


def engine_options(function: F) -> F:
    """The options that say what runs a model and where, as `where` for `load`; and --isa, which has been heeded when
    the verb's function is called. With --mtest the plan is told and nothing runs.
    """

    @functools.wraps(function)
    def gathered(*args: Any, isa: str | None, mtest: bool, ctx_length: int | None, **options: Any) -> Any:
        given = {name: options.pop(name) for name in EngineArguments.__annotations__ if name in options}
        where = EngineArguments(context_length=ctx_length, **given)  # type: ignore[typeddict-item]
        if isa is not None:
            use_isa(isa, where["engine"], where["device"])
        if mtest:
            from starscope.cli.plan import tell_plan

            return tell_plan(click.get_current_context().obj, options.get("model", "demo"), where)
        return function(*args, where=where, **options)

    decorated: Any = gathered
    for option in (*reversed(PLACE_OPTIONS), *reversed(ENGINE_OPTIONS)):
        decorated = option(decorated)
    return cast(F, decorated)


CONTEXT_OPTION = click.option(
    "--ctx",
    "ctx_length",
    type=int,
    callback=check_context,
    metavar="N",
    help="Positions to use (default: all of the model's).",
)
ENGINE_OPTIONS = (
    click.option("--engine", type=click.Choice(ENGINE_NAMES), default="auto", show_default=True, help="What runs it."),
    click.option("--device", default="auto", show_default=True, help="Where to run: auto, cpu, cuda, cuda:1, ..."),
    CONTEXT_OPTION,
    click.option("-t", "--threads", type=int, callback=check_threads, metavar="N", help="Cores to use (default: all)."),
    click.option(
        "--isa",
        metavar="NAME",
        help="Instruction set, with the native engine alone (default: the best that this machine has; see doctor).",
    ),
)
PLACE_OPTIONS = (
    click.option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=LAYERS,
        default="auto",
        show_default=True,
        metavar="N|all|auto",
        help="Layers on a GPU: the last N blocks, then the head, values, keys; auto: as many as fit.",
    ),
    click.option(
        "-lv", "--low-vram", is_flag=True, help="Keys, values and the norm stay with the host, and little scratch."
    ),
    click.option("--kv-offload/--no-kv-offload", default=True, help="Keys and values on the GPU with their layers."),
    click.option(
        "-mg", "--main-gpu", type=int, metavar="N", help="Which GPU has the head (default: the last block's)."
    ),
    click.option(
        "-ts",
        "--tensor-split",
        callback=read_shares,
        metavar="X,Y...",
        help="Shares of the blocks for each GPU (default: by free memory).",
    ),
    click.option("--mtest", is_flag=True, help="Tell what would go where, as `plan` does, and run nothing."),
)


def load_model(
    session: Session,
    name: str,
    where: EngineArguments,
    *,
    lora: Sequence[tuple[str, float]] = (),
    lora_base: str | None = None,
) -> Model:
    """Load MODEL and say in one line what runs where; what was assumed on the way, a line each."""
    from starscope.model import load

    model = load(name, **where, lora=lora, lora_base=lora_base)
    session.note(headline(model))
    session.detail(f"{model.path}: {model.context_length} positions, loaded in {model.load_s:.2f} s")
    for note in model.notes:
        session.note(f"note: {note}")
    return model


def placement(model: Model) -> dict[str, Any]:
    """What a verb's JSON document says of where the model runs; nothing where a GPU never came into it."""
    placed = model.placed
    if placed.plan is None and placed.fallback is None:
        return {}
    plan = {} if placed.plan is None else placed.plan.as_document()
    return {"placement": {**{key: plan[key] for key in plan if key != "tensors"}, "fallback": placed.fallback}}


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


def headline(model: Model) -> str:
    """Model, engine, device and threads in one line."""
    from starscope.hub import title

    size = model.family.size_class(model.hparams)
    what = " ".join([model.family.gguf_architecture, *([size] if size else []), *formats_of(model)])
    cores = plural(model.engine.threads, "thread")
    return f"{title(model.path)} ({what}) · {model.engine.name} engine · {model.engine.device} · {cores}"


def formats_of(model: Model) -> list[str]:
    """The formats of the model's matrices, the one with the most parameters first."""
    parameters: dict[str, int] = {}
    for name, slot in model.weights.slots.items():
        if not slot.always_f32 and not model.weights.is_tied(name):
            kind = model.weights.format_name(name)
            parameters[kind] = parameters.get(kind, 0) + slot.parameters
    return sorted(parameters, key=lambda kind: -parameters[kind])


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
                raise InputError(f"{path} is no regular file; expected a file of text.")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be read: {reason}.") from error


def text_or_stdin(ctx: click.Context, value: str | None, what: str) -> str:
    """An argument's text, or stdin as it is when the argument is absent or "-"."""
    if value is not None and value != "-":
        return text_argument(value, what)
    if sys.stdin is None or (value is None and is_terminal(sys.stdin)):
        raise click.UsageError(f"there is no {what}: give it as an argument, or on stdin.", ctx)
    return utf8(sys.stdin.buffer.read(), what)
