"""`perplexity`: how well a model predicts the text of files."""

from __future__ import annotations

import math
import time

import click

from starscope.cli.adapting import LoraArguments, lora_options
from starscope.cli.common import MODEL, PATH, Session, everywhere, json_option, read_file, utf8
from starscope.cli.editing import Source, edit_options, with_edits
from starscope.cli.engines import EngineArguments, engine_options, load_model, placement
from starscope.cli.progress import byte_progress
from starscope.cli.units import plural
from starscope.errors import InvalidContentError


@click.command()
@click.argument("model", type=MODEL)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--stride", type=int, metavar="N", help="Tokens from the start of one window to the next (default: half a window)."
)
@edit_options
@lora_options
@engine_options
@json_option
@everywhere
@click.pass_context
def perplexity(
    ctx: click.Context,
    model: str,
    files: tuple[str, ...],
    stride: int | None,
    edits: list[Source],
    adapters: LoraArguments,
    where: EngineArguments,
) -> None:
    """Measure how well a model predicts text files.

    Each file is one UTF-8 document, read unchanged. It is evaluated in windows of the full context (or --ctx) that
    start --stride tokens apart. Every token is predicted once and, after the first window, from at least
    window - stride preceding tokens.

    bits_per_byte is the total negative log2-likelihood divided by the bytes of all files; perplexity is per token.
    """
    session: Session = ctx.obj
    texts = [utf8(read_file(file), file) for file in files]
    if not any(texts):
        raise InvalidContentError(f"there is no text in {', '.join(files)}; expected at least one byte.")
    loaded = with_edits(load_model(session, model, where, **adapters), edits)

    from starscope.perplexity import measure_texts

    loaded.engine.prepare()
    began = time.perf_counter()
    with byte_progress(session, "measuring") as progress:
        found = measure_texts(loaded.engine, loaded.tokenizer, texts, stride=stride, progress=progress)
    seconds = time.perf_counter() - began
    measured = {
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "bytes": found.bytes,
    }
    if session.json:
        finite = {name: number if math.isfinite(number) else None for name, number in measured.items()}
        session.document({**finite, **placement(loaded)})  # JSON has no infinity
    else:
        session.write("".join(f"{name:<13}  {number_text(number)}\n" for name, number in measured.items()))
    session.note(
        f"{plural(len(files), 'file')}, windows of {found.window} tokens, {found.stride} apart, "
        f"{found.tokens / seconds:.0f} tok/s"
    )


def number_text(number: float) -> str:
    """A count as it is, anything else to four places."""
    if isinstance(number, int):
        return str(number)
    return f"{number:.4f}" if math.isfinite(number) else "infinite"
