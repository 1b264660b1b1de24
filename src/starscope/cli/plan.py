"""`plan`: what of a model would go where, and the bytes that each device would hold; nothing is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from starscope.cli.common import MODEL, Session, everywhere, json_option
from starscope.cli.engines import CONTEXT_OPTION, EngineArguments, place_options
from starscope.cli.units import bytes_text

if TYPE_CHECKING:
    from starscope.placement import Layers, Plan


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "--devices",
    metavar="NAME:BYTES,...",
    help="Devices to plan for, present or not: cuda:24GiB, or cuda:0:24GiB,cuda:1:12GiB (default: those present).",
)
@CONTEXT_OPTION
@place_options
@json_option
@everywhere
@click.pass_context
def plan(
    ctx: click.Context,
    model: str,
    devices: str | None,
    ctx_length: int | None,
    gpu_layers: Layers,
    low_vram: bool,
    kv_offload: bool,
    main_gpu: int | None,
    tensor_split: list[float] | None,
) -> None:
    """Show how a model would be split across devices.

    Loads no weights, and the devices need not be present. -ngl N counts layers as early llama.cpp did: the last N
    blocks, then one more for the final norm and output, one for the values and one for the keys. Sizes cover the
    weights as stored on each device, keys and values for the whole context, and scratch memory for one step.

    --json prints {"repeating_layers", "non_repeating", "v_cache", "k_cache", "offloaded", "max_offloadable", "bytes":
    {"weights", "kv", "scratch", "total"}, "tensors": {NAME: DEVICE}, "devices", "report", "fallback", ...}.
    """
    where = EngineArguments(
        engine="auto",
        device="auto",
        context_length=ctx_length,
        threads=None,
        gpu_layers=gpu_layers,
        low_vram=low_vram,
        kv_offload=kv_offload,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
    )
    tell_plan(ctx.obj, model, where, devices)


def tell_plan(session: Session, model: str, where: EngineArguments, devices: str | None = None) -> None:
    """Print the plan for a model, on named devices or on those that are there."""
    from starscope.engine.split.choose import Placing, find_devices
    from starscope.errors import UnsupportedError
    from starscope.model import open_graph
    from starscope.placement import parse_devices

    named = None if devices is None else parse_devices(devices)
    graph, formats = open_graph(model, where["context_length"])
    shares = where["tensor_split"]
    placing = Placing(
        where["gpu_layers"],
        where["low_vram"],
        where["kv_offload"],
        where["main_gpu"],
        None if shares is None else tuple(shares),
    )
    found = find_devices(where["device"], placing) if named is None else named
    for device in named or ():
        if device.free is None and ":" in device.name:
            session.note(
                f"note: {device.name} is a GPU number, taken to have unlimited memory; "
                f"for a GPU with that much free memory, use {device.name}GiB."
            )
    if not found and placing.asks_for_a_gpu:
        raise UnsupportedError(
            f"-ngl asks for {where['gpu_layers']} layers on a GPU, but none was found.",
            hint="To plan for a GPU that is not present, use --devices cuda:24GiB.",
        )
    made = placing.plan(graph, formats, found, where["context_length"])
    if session.json:
        session.document(made.as_document())
        return
    session.write("".join(f"{line}\n" for line in (*made.report(), *table(made))))
    if made.shortfall:
        session.note(made.shortfall)
    elif not found:
        session.note(
            "no GPU found: everything runs on the host. To plan for a GPU that is not present, use "
            "--devices cuda:24GiB."
        )


def table(made: Plan) -> list[str]:
    """The bytes of each device in columns."""
    free = {device.name: device.free for device in made.devices}
    rows: list[tuple[str, ...]] = [("", "weights", "keys, values", "scratch", "total", "free")]
    for name, one in made.bytes.items():
        has = free.get(name)
        counts = (one.weights, one.kv, one.scratch, one.total)
        rows.append((name, *map(bytes_text, counts), "" if has is None else bytes_text(has)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
