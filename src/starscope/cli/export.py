"""`export`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import click

from starscope.cli.common import MODEL, PATH, Session, everywhere, json_option
from starscope.cli.progress import byte_progress
from starscope.cli.units import bytes_text


@click.command()
@click.argument("source", metavar="IN", type=MODEL)
@click.argument("out", metavar="OUT_DIR", type=PATH)
@click.option("--to", default="f32", show_default=True, metavar="TYPE", help="Weight format: f32, f16 or bf16.")
@click.option("--force", is_flag=True, help="Overwrite OUT_DIR if it contains a model.")
@json_option
@everywhere
@click.pass_context
def export(ctx: click.Context, source: str, out: str, to: str, force: bool) -> None:
    """Convert a GGUF file to a Hugging Face folder.

    transformers and vLLM can load the folder: it contains config.json, model.safetensors and the tokenizer files.
    Quantized weights are decoded; f32 keeps their exact values.
    """
    from starscope.export import export_gguf

    session: Session = ctx.obj
    with byte_progress(session, "exporting") as progress:
        report = export_gguf(source, out, to=to, force=force, progress=progress)
    for note in report.notes:
        session.note(f"note: {note}")
    if session.json:
        session.document({**vars(report), "out": str(report.out)})
    what = f"{report.family}, {report.parameters:,} parameters in {report.tensors} tensors, {report.format}"
    session.note(f"{report.out}: {what}, {bytes_text(report.bytes)} in {report.seconds:.1f} s")
