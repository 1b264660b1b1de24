"""`convert` and `quantize`: GGUF files from Hugging Face folders and from other GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from starscope.cli.common import PATH, Session, everywhere, json_option
from starscope.cli.progress import byte_progress
from starscope.cli.units import bytes_text
from starscope.errors import UsageError

if TYPE_CHECKING:
    from starscope.convert import ConversionReport

FIRST_TYPES = {"0": "f32", "1": "f16"}  # how the first converter for this family numbered its types
DEFAULT_TYPE = "f16"
TYPES = (
    "f32, f16, bf16, q8_0, q6_k, q5_k_m (or q5_k), q5_k_s, q5_1, q5_0, q4_k_m (or q4_k), q4_k_s, q4_1, q4_0"
    " (in upper or lower case)"
)


@click.command()
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("type_", metavar="[TYPE]", required=False)
@click.option("-o", "--out", "--outfile", type=PATH, metavar="OUT", help="Output file.")
@click.option(
    "--to",
    "--outtype",
    "to",
    metavar="TYPE",
    help=f"Weight format: {TYPES}. Default: f16.",
)
@click.option("--vocab-only", is_flag=True, help="Write only the model's sizes and vocabulary, no weights.")
@click.option("--expand-mqa", is_flag=True, help="Repeat the single key/value head for every query head.")
@click.option("--verify", is_flag=True, help="Read the file back and compare every value with the source.")
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@click.option(
    "--allow-key", multiple=True, metavar="KEY", help="Ignore this unknown key of config.json. May be repeated."
)
@json_option
@everywhere
@click.pass_context
def convert(
    ctx: click.Context,
    source: str,
    type_: str | None,
    out: str | None,
    to: str | None,
    vocab_only: bool,
    expand_mqa: bool,
    verify: bool,
    force: bool,
    allow_key: tuple[str, ...],
) -> None:
    """Convert a Hugging Face folder to a GGUF file.

    SRC is a folder, or a model on the Hub: owner/name[@revision]. The default output is ggml-model-TYPE.gguf in that
    folder or, for a model on the Hub, name-TYPE.gguf in the current directory. TYPE can also follow SRC instead of
    --to, and may then be 0 (f32) or 1 (f16).
    """
    from starscope.convert import check_output
    from starscope.convert import convert as run
    from starscope.hub import fetch_folder, find_name
    from starscope.recipes import find_recipe

    session: Session = ctx.obj
    chosen = chosen_type(type_, to)
    folder = Path(source)
    if (name := find_name(source)) is not None:
        out = out or f"{name.repo.rpartition('/')[2]}-{'vocab' if vocab_only else chosen.lower()}.gguf"
        find_recipe(chosen)
        check_output(Path(out), force, inputs=())  # before anything is downloaded
        folder = fetch_folder(name, weights=not vocab_only)
    with byte_progress(session, "converting") as progress:
        report = run(
            folder,
            out,
            to=chosen,
            vocab_only=vocab_only,
            expand_mqa=expand_mqa,
            verify=verify,
            force=force,
            allow_unknown=allow_key,
            progress=progress,
        )
    tell(session, report, verified=verify and report.tensors > 0)  # a vocabulary alone has nothing to verify


def chosen_type(positional: str | None, option: str | None) -> str:
    """The one type that was asked for; UsageError for two that differ."""
    if positional is not None:
        positional = FIRST_TYPES.get(positional, positional)
    if positional is not None and option is not None and positional.lower() != option.lower():
        raise UsageError(f"two types were given, {positional!r} and --to {option!r}; expected one.")
    given = positional if option is None else option
    return DEFAULT_TYPE if given is None else given


@click.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option("--to", required=True, metavar="TYPE", help=f"Weight format: {TYPES}.")
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@json_option
@everywhere
@click.pass_context
def quantize(ctx: click.Context, source: str, out: str, to: str, force: bool) -> None:
    """Convert a GGUF file's weights to another format.

    Norms, biases and position embeddings stay F32, and metadata is kept. Types such as q4_k_m are llama.cpp's
    mixtures, which use more bits for some of the matrices.
    """
    from starscope.model import find_model
    from starscope.quantize import quantize as run

    session: Session = ctx.obj
    with byte_progress(session, "quantizing") as progress:
        report = run(find_model(source), out, to=to, force=force, progress=progress)
    tell(session, report, verified=False)


def tell(session: Session, report: ConversionReport, *, verified: bool) -> None:
    """The document, or one line; what the person should know, a line each."""
    for note in report.notes:
        session.note(f"note: {note}")
    if session.json:
        session.document(as_document(report))
    speed = f", {bytes_text(int(report.bytes / report.seconds))}/s" if report.seconds > 0 else ""
    what = f"{report.family}, {report.parameters:,} parameters in {report.tensors} tensors, {report.format}"
    done = f"{bytes_text(report.bytes)} in {report.seconds:.1f} s{speed}" + (", verified" if verified else "")
    session.note(f"{report.out}: {what}, {done}")


def as_document(report: ConversionReport) -> dict[str, Any]:
    """The JSON document of a conversion."""
    return {
        "out": str(Path(report.out)),
        "bytes": report.bytes,
        "seconds": report.seconds,
        "tensors": report.tensors,
        "parameters": report.parameters,
        "family": report.family,
        "format": report.format,
        "notes": list(report.notes),
    }
