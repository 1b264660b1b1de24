"""`merge`: adapters into a model's weights, as one file."""

from __future__ import annotations

import click

from starscope.cli.adapting import LoraArguments, lora_options
from starscope.cli.common import MODEL, PATH, Session, everywhere, json_option
from starscope.cli.convert import tell
from starscope.cli.progress import byte_progress
from starscope.errors import UsageError


@click.command()
@click.argument("model", type=MODEL)
@lora_options
@click.option("-o", "--output", "out", type=PATH, metavar="OUT", help="GGUF file to write.")
@click.option(
    "--to", metavar="TYPE", help="Weight format, as for quantize (default: each tensor's own; for a folder, f16)."
)
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@json_option
@everywhere
@click.pass_context
def merge(
    ctx: click.Context, model: str, adapters: LoraArguments, out: str | None, to: str | None, force: bool
) -> None:
    """Merge LoRA adapters into a model, as one GGUF file.

    MODEL is a GGUF file or a Hugging Face folder. Weights that no adapter changes are copied unchanged. Before the
    file gets its final name, its logits are checked against those of the model with its adapters.
    """
    from starscope.merge import merge as run

    session: Session = ctx.obj
    if not adapters["lora"]:
        raise UsageError("--lora is missing; expected an adapter to merge.")
    if out is None:
        raise UsageError("-o is missing; expected the name of the file to write.")
    with byte_progress(session, "merging") as progress:
        report = run(model, out, to=to, force=force, progress=progress, **adapters)
    tell(session, report, verified=True)
