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
@click.option("-o", "--output", "out", type=PATH, metavar="OUT", help="The GGUF file to write.")
@click.option("--to", metavar="TYPE", help="Its type, as of quantize (default: each tensor's own; of a folder, f16).")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
@everywhere
@click.pass_context
def merge(
    ctx: click.Context, model: str, adapters: LoraArguments, out: str | None, to: str | None, force: bool
) -> None:
    """Merge adapters (LoRA) into a model, as one GGUF file.

    MODEL is a GGUF file or a Hugging Face folder. Each --lora is a PEFT folder or a GGUF adapter, with a scale if one
    follows behind a colon. Weights that no adapter changes are copied as they are. The file's logits are compared with
    those of the model and its adapters before it takes its name.
    """
    from starscope.merge import merge as run

    session: Session = ctx.obj
    if not adapters["lora"]:
        raise UsageError("there is no --lora; expected an adapter to merge.")
    if out is None:
        raise UsageError("there is no -o; expected the name of a file to write.")
    with byte_progress(session, "merging") as progress:
        report = run(model, out, to=to, force=force, progress=progress, **adapters)
    tell(session, report, verified=True)
