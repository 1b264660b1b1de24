"""`trace`: values of the forward pass of a prompt, by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from starscope.cli.adapting import LoraArguments, lora_options
from starscope.cli.common import MODEL, PATH, Session, everywhere, json_option, text_or_stdin
from starscope.cli.engines import EngineArguments, engine_options, load_model, placement
from starscope.cli.units import plural
from starscope.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from starscope.microscope.cached import ActivationCache
    from starscope.microscope.names import Names

POSITIONS = re.compile(r"(-?\d+)?:(-?\d+)?|-?\d+(,-?\d+)*")
SHOWN = 6  # numbers of a preview


@click.command()
@click.argument("model", type=MODEL)
@click.argument("prompt", required=False)
@click.option(
    "--value", "values", multiple=True, metavar="NAME", help="Value to print, by any of its names. May be repeated."
)
@click.option("--rows", metavar="ROWS", help="Positions to print, such as -1, 0,3,-1 or 4:8 (default: all).")
@click.option(
    "-o", "--output", "out", type=PATH, metavar="FILE", help="Write the values to a safetensors file instead."
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option("--list", "lists", is_flag=True, help="List the names and layouts of all values, and exit.")
@lora_options
@engine_options
@json_option
@everywhere
@click.pass_context
def trace(
    ctx: click.Context,
    model: str,
    prompt: str | None,
    values: tuple[str, ...],
    rows: str | None,
    out: str | None,
    force: bool,
    lists: bool,
    adapters: LoraArguments,
    where: EngineArguments,
) -> None:
    """Print values from the forward pass of a prompt.

    PROMPT is read from stdin if absent or "-". NAME is a standard name (layers.3.layer_output), a name from the
    checkpoint, GGUF, llama.cpp or TransformerLens, or a pattern (layers.*.layer_output). The model runs only as far
    as the last value requires.

    Each value is printed with its layout and shape, its minimum, mean, maximum and norm, and the first numbers at the
    last position; masked scores are not counted. --json prints
    {"prompt_ids", "rows", "values": {NAME: {"name", "layout", "axes", "shape", "dtype", "data"}}}: "name" is the
    standard name, and "data" is nested lists with null for numbers that are not finite. A safetensors file stores the
    values under the names given, with prompt_ids, rows and axes in its metadata.
    """
    session: Session = ctx.obj
    if lists:
        if values or prompt is not None:
            raise click.UsageError("--list was given with a prompt or --value; expected neither.", ctx)
        tell_names(session, model)
        return
    if not values:
        raise UsageError("--value is missing; expected at least one name.", hint="Use --list to see the names.")
    if out is not None and session.json:
        raise click.UsageError("--json and -o both write the values; expected only one of them.", ctx)
    positions = read_positions(rows)
    text = text_or_stdin(ctx, prompt, "prompt")

    from starscope.cli.show import read_graph
    from starscope.convert import check_output
    from starscope.microscope.names import Names

    if out is not None:
        check_output(Path(out), force, ())
        if any(os.path.exists(out) and file.samefile(out) for file in files_of(model)):
            raise UsageError(f"{out} is one of the model's own files; expected another output file.")
    chosen = named(Names(read_graph(model)), values)  # a wrong name is told before the weights are read
    loaded = load_model(session, model, where, **adapters)
    cache = loaded.keep_values(text, chosen, rows=positions)
    if out is not None:
        size = cache.save(out, chosen, force=force)
        session.note(f"{plural(len(chosen), 'value')}, {size:,} bytes -> {out}")
    elif session.json:
        session.document({**as_document(cache, chosen), **placement(loaded)})
    else:
        session.write("".join(f"{line}\n" for name in chosen for line in describe(cache, name)))


def files_of(model: str) -> Iterator[Path]:
    """The files that a model is read from, which no output may replace."""
    from starscope.gguf import read_gguf
    from starscope.model import find_model

    path = find_model(model)
    if path.is_dir():
        yield from path.iterdir()
        return
    with read_gguf(path) as file:
        yield from file.paths


def read_positions(rows: str | None) -> list[int] | slice | None:
    """--rows as positions."""
    if rows is None:
        return None
    if not POSITIONS.fullmatch(rows):
        raise UsageError(f"--rows is {rows!r}; expected positions such as -1, 0,3,-1 or 4:8.")
    if ":" in rows:
        first, _, stop = rows.partition(":")
        return slice(int(first) if first else None, int(stop) if stop else None)
    return [int(one) for one in rows.split(",")]


def named(names: Names, values: Sequence[str]) -> list[str]:
    """Names as they were given, and the standard ones that patterns stand for; each value once."""
    from starscope.microscope.asked import choose

    found: dict[str, str] = {}  # by standard name
    for value in values:
        for reading, is_named in choose(names, value):
            found.setdefault(reading.name, value if is_named else reading.name)
    return list(found.values())


def describe(cache: ActivationCache, name: str) -> list[str]:
    """A value in three lines."""
    import numpy as np

    from starscope.engine.base import MASKED

    array = cache.array(name)
    layout, axes = cache.layout(name)
    shape = " ".join(map(str, array.shape))
    lines = [f"{name}  {layout + ' ' if layout else ''}[{' '.join(axes)}] = [{shape}] {array.dtype}"]
    if array.dtype.kind == "f":
        seen = array[array > MASKED].astype(np.float64) if (array == MASKED).any() else array.astype(np.float64)
        facts = {"min": seen.min(), "mean": seen.mean(), "max": seen.max(), "norm": np.sqrt(np.square(seen).sum())}
        lines.append("  " + "  ".join(f"{fact} {number:.4g}" for fact, number in facts.items()))
    at = tuple(-1 if axis in ("seq", "query") else 0 for axis in axes[:-1])
    numbers = array[at]
    shown = " ".join(f"{number:.4g}" if number != MASKED else "masked" for number in numbers[:SHOWN].tolist())
    more = " ..." if len(numbers) > SHOWN else ""
    lines.append(f"  [{' '.join(map(str, at))} :] {shown}{more}")
    return lines


def as_document(cache: ActivationCache, chosen: Sequence[str]) -> dict[str, Any]:
    """The JSON document of the values."""
    values = {}
    for name in chosen:
        array, (layout, axes) = cache.array(name), cache.layout(name)
        values[name] = {
            "name": cache.standard_name(name),
            "layout": layout,
            "axes": list(axes),
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "data": nested(array),
        }
    return {"prompt_ids": cache.prompt_ids, "rows": cache.rows, "values": values}


def nested(array: np.ndarray[Any, Any]) -> Any:
    """Nested lists; a number has the digits that tell it from its neighbours, and None is for what is not finite."""
    if array.ndim > 1:
        return [nested(one) for one in array]
    numbers = array.tolist()
    if array.dtype.kind != "f":
        return numbers
    digits = 9 if array.dtype.itemsize == 4 else 17
    return [float(f"{number:.{digits}g}") if abs(number) < float("inf") else None for number in numbers]


def tell_names(session: Session, model: str) -> None:
    """The names of all values, those of every block as one pattern, in the order in which they are made."""
    from starscope.cli.show import read_graph
    from starscope.values import BESIDE_THE_GRAPH, VALUES

    names = ["attention_mask", *read_graph(model).names, "next_token_probs"]
    assert set(names) >= BESIDE_THE_GRAPH
    patterns = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.*.", name) for name in names))
    rows = [(pattern, VALUES[pattern.rpartition(".")[2]]) for pattern in patterns]
    if session.json:
        keys = [
            {"name": pattern, "layout": value.layout, "axes": list(value.axes), "meaning": value.meaning}
            for pattern, value in rows
        ]
        session.document({"values": keys})
        return
    wide = max(map(len, patterns))
    layouts = [f"{value.layout} [{' '.join(value.axes)}]" for _, value in rows]
    broad = max(map(len, layouts))
    lines = zip(rows, layouts, strict=True)
    session.write("".join(f"{name:<{wide}}  {layout:<{broad}}  {value.meaning}\n" for (name, value), layout in lines))
