"""What runs a model and where: the options that every verb has for it, and loading by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import click

from starscope.cli.common import Session, check_threads
from starscope.cli.units import plural
from starscope.errors import UsageError

if TYPE_CHECKING:
    from starscope.model import Model
    from starscope.placement import Layers

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_NAMES = ("auto", "native", "torch", "numpy")


def check_context(_ctx: click.Context, _parameter: click.Parameter, value: int | None) -> int | None:
    """At least one position; whether the model has so many is seen once it is loaded."""
    if value is not None and value < 1:
        raise UsageError(f"the context is {value} tokens; expected at least 1.")
    return value


class LayersType(click.ParamType):  # type: ignore[type-arg]
    """A number of layers, all or auto."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the word."""
        if isinstance(value, int) or value in ("all", "auto"):
            return value
        if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10):
            self.fail(f"{value!r} is not a number of layers; expected 0 or more, all or auto.", param, ctx)
        return int(value)


LAYERS = LayersType()


def read_shares(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> list[float] | None:
    """`3,1` -> shares of the devices."""
    if value is None:
        return None
    try:
        return [float(part) for part in value.replace("/", ",").split(",")]
    except ValueError:
        raise UsageError(f"the split is {value!r}; expected numbers separated by commas, such as 3,1.") from None


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
            f"--isa selects the native engine's instruction set, but the {engine} engine would run; "
            "omit --isa, or use --engine native."
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

    decorated: Any = place_options(MTEST_OPTION(gathered))
    for option in reversed(ENGINE_OPTIONS):
        decorated = option(decorated)
    return cast(F, decorated)


def place_options(function: F) -> F:
    """The options that place a model on devices, each as a parameter of its own."""
    decorated: Any = function
    for option in reversed(PLACE_OPTIONS):
        decorated = option(decorated)
    return cast(F, decorated)


CONTEXT_OPTION = click.option(
    "--ctx",
    "ctx_length",
    type=int,
    callback=check_context,
    metavar="N",
    help="Context length in tokens (default: the model's maximum).",
)
ENGINE_OPTIONS = (
    click.option("--engine", type=click.Choice(ENGINE_NAMES), default="auto", show_default=True, help="Engine to use."),
    click.option("--device", default="auto", show_default=True, help="Device to run on: auto, cpu, cuda, cuda:1, ..."),
    CONTEXT_OPTION,
    click.option(
        "-t",
        "--threads",
        type=int,
        callback=check_threads,
        metavar="N",
        help="CPU threads to use (default: all cores).",
    ),
    click.option(
        "--isa",
        metavar="NAME",
        help="Instruction set for the native engine (default: the best available; see doctor).",
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
        help="Layers to put on GPUs: the last N blocks, then the output head, values and keys; auto: as many as fit.",
    ),
    click.option(
        "-lv",
        "--low-vram",
        is_flag=True,
        help="Keep the KV cache and the final norm on the host, and use less scratch memory.",
    ),
    click.option(
        "--kv-offload/--no-kv-offload",
        default=True,
        help="Keep keys and values on the GPU with their layers (default), or on the host.",
    ),
    click.option(
        "-mg", "--main-gpu", type=int, metavar="N", help="GPU to put the output head on (default: the last block's)."
    ),
    click.option(
        "-ts",
        "--tensor-split",
        callback=read_shares,
        metavar="X,Y...",
        help="Proportion of the blocks to put on each GPU (default: by free memory).",
    ),
)
MTEST_OPTION = click.option(
    "--mtest", is_flag=True, help="Show what would go on which device, as `plan` does, and exit."
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
