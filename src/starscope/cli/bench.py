"""`bench`: how fast a model runs on this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from starscope.cli.adapting import LoraArguments, lora_options
from starscope.cli.common import MODEL, Session, everywhere, json_option
from starscope.cli.engines import EngineArguments, engine_options, load_model, placement
from starscope.cli.units import bytes_text
from starscope.errors import UsageError

if TYPE_CHECKING:
    from starscope.bench import BenchResult
    from starscope.model import Model

NUMBERS = re.compile(r"-?[0-9]{1,18}(,-?[0-9]{1,18})*")
ERASE_LINE = "\r\x1b[K"


def numbers(_ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """The list in a text such as "0,2048", each number once."""
    if not NUMBERS.fullmatch(value):
        raise UsageError(f"{parameter.opts[0]} is {value!r}; expected whole numbers separated by commas, such as 1,8.")
    return tuple(dict.fromkeys(map(int, value.split(","))))


@click.command()
@click.argument("model", type=MODEL)
@click.option("-p", "--prompt", type=int, default=512, show_default=True, metavar="N", help="Prompt tokens to prefill.")
@click.option("-n", "--steps", type=int, default=64, show_default=True, metavar="N", help="Tokens to decode.")
@click.option(
    "-d",
    "--depths",
    callback=numbers,
    default="0,2048",
    show_default=True,
    metavar="N,N...",
    help="Cache depths to measure at, in tokens.",
)
@click.option(
    "-b",
    "--batches",
    callback=numbers,
    default="1,8",
    show_default=True,
    metavar="N,N...",
    help="Numbers of sequences to decode together.",
)
@click.option(
    "--repeat", type=int, default=3, show_default=True, metavar="N", help="Repetitions; the median is reported."
)
@lora_options
@engine_options
@json_option
@everywhere
@click.pass_context
def bench(
    ctx: click.Context,
    model: str,
    prompt: int,
    steps: int,
    depths: tuple[int, ...],
    batches: tuple[int, ...],
    repeat: int,
    adapters: LoraArguments,
    where: EngineArguments,
) -> None:
    """Measure a model's speed on this machine.

    Runs random tokens, without sampling. Prefill and decode are measured at each depth, with that many tokens already
    in the cache. Sequences decoded together start from empty caches, and their speed is the total of all of them.

    The share of the read bandwidth counts the stored weights, which decoding reads once per token. Results vary with
    what else the machine is doing: compare figures from the same run only.
    """
    session: Session = ctx.obj

    from starscope.bench import bench as measure
    from starscope.bench import check_sizes

    check_sizes(prompt, steps, depths, batches, repeat)
    loaded = load_model(session, model, where, **adapters)
    default = click.core.ParameterSource.DEFAULT
    if ctx.get_parameter_source("prompt") is default:
        prompt = min(prompt, loaded.context_length)
    if ctx.get_parameter_source("steps") is default:
        steps = min(steps, loaded.context_length)
    if ctx.get_parameter_source("depths") is default:
        room = loaded.context_length - max(prompt, steps)
        for depth in [depth for depth in depths if depth > max(room, 0)]:
            session.note(f"note: depth {depth} is skipped: the context has only {loaded.context_length} positions.")
        depths = tuple(depth for depth in depths if depth <= max(room, 0))
    with progress_line(session) as progress:
        found = measure(loaded, prompt, steps, depths, batches, repeat, progress=progress)
    if session.json:
        session.document({**as_document(found, loaded, prompt, steps, repeat), **placement(loaded)})
    else:
        session.write(as_text(found, prompt, steps))


@contextmanager
def progress_line(session: Session) -> Iterator[Callable[[str], None] | None]:
    """Gives a function that shows what is being measured, where somebody sees it. It draws between measurements alone:
    a line that moves by itself would take time from what is measured.
    """
    if not session.shows_progress:
        yield None
        return

    def show(text: str) -> None:
        sys.stderr.write(f"{ERASE_LINE}{text}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        show("")


def as_document(found: BenchResult, model: Model, prompt: int, steps: int, repeat: int) -> dict[str, Any]:
    """The JSON document; JSON's keys are texts, so depths and batch sizes are too."""
    from starscope.hub import title

    measured = {
        name: {str(key): number for key, number in value.items()} if isinstance(value, dict) else value
        for name, value in asdict(found).items()
    }
    about = {
        "model": title(model.path),
        "engine": model.engine.name,
        "isa": getattr(model.engine, "isa", None),  # of the engine that has a choice
        "device": model.engine.device,
        "threads": model.engine.threads,
        "prompt": prompt,
        "steps": steps,
        "repeat": repeat,
    }
    return {**measured, **about}


def as_text(found: BenchResult, prompt: int, steps: int) -> str:
    """One line a figure, its number aligned with the others'."""
    rows = [(f"prefill {prompt} at depth {depth}", speed, "tok/s") for depth, speed in found.prefill_tok_s.items()]
    for depth, speed in found.decode_tok_s.items():
        share = found.decode_read_share and f", reads weights at {found.decode_read_share[depth]:.0%} of the bandwidth"
        rows.append((f"decode {steps} at depth {depth}", speed, f"tok/s{share or ''}"))
    rows += [(f"decode {count} together", speed, "tok/s") for count, speed in found.batch_tok_s.items()]
    rows.append(("load", found.load_s, "s"))
    if found.peak_rss_bytes is not None:
        number, _, unit = bytes_text(found.peak_rss_bytes).partition(" ")
        rows.append(("peak memory", float(number), unit))
    if found.read_gb_s is not None:
        rows.append(("read bandwidth", found.read_gb_s, "GB/s"))
    texts = [(name, number_text(number), unit) for name, number, unit in rows]
    names, digits = (max(len(row[i]) for row in texts) for i in (0, 1))
    return "".join(f"{name:<{names}}  {number:>{digits}} {unit}\n" for name, number, unit in texts)


def number_text(number: float) -> str:
    """Two places below ten, one above."""
    return f"{number:.2f}" if number < 10 else f"{number:.1f}"
