"""`run` and `tokenize`: text in, text or tokens out."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from starscope.cli.adapting import LoraArguments, lora_options
from starscope.cli.common import MODEL, Session, everywhere, json_option, load_tokenizer, text_argument, text_or_stdin
from starscope.cli.editing import Source, edit_options, with_edits
from starscope.cli.engines import EngineArguments, engine_options, load_model, placement
from starscope.cli.infilling import infill_options
from starscope.cli.sampling import sampling_options
from starscope.cli.units import plural

if TYPE_CHECKING:
    from starscope.generate import Completion
    from starscope.infill import InfillArguments
    from starscope.sampling import SamplingArguments, SamplingOptions


@click.command()
@click.argument("model", type=MODEL)
@click.argument("prompt", required=False)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    default=128,
    show_default=True,
    metavar="N",
    help="Maximum number of tokens to generate.",
)
@click.option(
    "--suffix", metavar="TEXT", help="Fill in the text between PROMPT and this suffix; print only the middle."
)
@infill_options
@click.option("--heal", is_flag=True, help="Re-generate the prompt's last token, for prompts that end mid-word.")
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text, taken literally. May be repeated.")
@click.option(
    "--logprobs", type=int, default=0, metavar="N", help="With --json, list the N most likely tokens at each step."
)
@edit_options
@lora_options
@engine_options
@json_option
@everywhere
@click.pass_context
def run(
    ctx: click.Context,
    model: str,
    prompt: str | None,
    max_new_tokens: int,
    suffix: str | None,
    hole: InfillArguments,
    heal: bool,
    sampling: SamplingArguments,
    stop: tuple[str, ...],
    logprobs: int,
    edits: list[Source],
    adapters: LoraArguments,
    where: EngineArguments,
) -> None:
    r"""Complete a prompt, or fill in the middle of one.

    PROMPT is read from stdin if absent or "-", as UTF-8 and unchanged. Only the completion goes to stdout, as it is
    generated; the model, the engine and the speed go to stderr.

    Stop texts are literal: for line feeds, use your shell's escapes, as in --stop $'\n\n'.

    Sampling applies logit biases, then penalties, temperature, top_k, typical_p, top_p and min_p (--samplers changes
    these steps), and then draws a token.
    """
    from starscope.generate import check_limits, first_id
    from starscope.infill import check_there_is_a_hole
    from starscope.sampling import SamplingOptions, describe

    session: Session = ctx.obj
    stops = [text_argument(text, "a stop text") for text in stop]
    # Refused before a model is loaded for nothing.
    options = SamplingOptions(**sampling)
    check_limits(max_new_tokens, stops, logprobs)
    if logprobs and not session.json:
        raise click.UsageError("--logprobs was given without --json; expected both.", ctx)
    before = text_or_stdin(ctx, prompt, "prompt")
    after = None if suffix is None else text_argument(suffix, "the suffix")
    if after is None:
        check_there_is_a_hole(**hole)

    loaded = with_edits(load_model(session, model, where, **adapters), edits)
    session.detail(f"sampling: {describe(options)}")
    if idle := idle_options(ctx, options):
        session.note(f"note: no effect at temperature 0: {', '.join(idle)}.")
    if not before and after is None:
        first = first_id(loaded.tokenizer)
        session.note(f"note: the prompt is empty; generation starts from {loaded.tokenizer.piece(first)} ({first}).")
    completion = None
    for piece in loaded.generate(
        before,
        after,
        max_new_tokens=max_new_tokens,
        stop=stops,
        logprobs=logprobs,
        heal=heal,
        stream=True,
        **sampling,
        **hole,
    ):
        if piece.text and not session.json:
            session.write(piece.text)
        completion = piece.completion
    assert completion is not None, "the last piece has the completion"
    if session.json:
        session.document({**as_document(completion, fills=after is not None), **placement(loaded)})
    warn_of_cut(session, completion)
    session.note(summary(completion))


def idle_options(ctx: click.Context, options: SamplingOptions) -> list[str]:
    """The options that were given and choose among tokens, where nothing is chosen."""
    if not options.is_greedy:
        return []
    given = click.core.ParameterSource.COMMANDLINE
    return [
        f"--{name.replace('_', '-')}"
        for name in ("top_k", "top_p", "min_p", "typical_p", "seed")
        if ctx.get_parameter_source(name) is given
    ]


def as_document(completion: Completion, *, fills: bool) -> dict[str, object]:
    """The JSON document of a completion; with `dropped_tokens` when it `fills` a hole, `logprobs` when asked for."""
    timings = completion.timings
    document: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        **({"dropped_tokens": completion.dropped_tokens} if fills else {}),
        "timings": {
            "load_s": timings.load_s,
            "prefill_tok_s": timings.prefill_tok_s,
            "decode_tok_s": timings.decode_tok_s,
        },
    }
    if completion.logprobs is not None:
        document["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    return document


def summary(completion: Completion) -> str:
    """Tokens and speeds in one line."""
    timings = completion.timings
    parts = [f"prompt {plural(completion.prompt_tokens, 'token')}"]
    if timings.prefill_tok_s:
        parts[0] += f", {timings.prefill_tok_s:.0f} tok/s"
    parts.append(plural(len(completion.token_ids), "new token"))
    if timings.decode_tok_s:
        parts[1] += f", {timings.decode_tok_s:.1f} tok/s"
    return " · ".join([*parts, f"loaded in {timings.load_s:.2f} s", f"ended by {completion.finish_reason}"])


def warn_of_cut(session: Session, completion: Completion) -> None:
    """Say it when text around the hole was left out: nothing is cut silently."""
    if completion.dropped_tokens:
        session.note(
            f"note: {completion.dropped_tokens} tokens around the hole were dropped to fit the context; kept: the end "
            "of the prompt, the start of the suffix, and the nearest of the context files."
        )


@click.command()
@click.argument("model", type=MODEL)
@click.argument("text", required=False)
@click.option("--special", is_flag=True, help="Parse special tokens such as <fim_prefix> in the text.")
@json_option
@everywhere
@click.pass_context
def tokenize(ctx: click.Context, model: str, text: str | None, special: bool) -> None:
    """Split text into a model's tokens.

    TEXT is read from stdin if absent or "-". Prints one token per line: its id, a tab, and its text, quoted.
    """
    session: Session = ctx.obj
    content = text_or_stdin(ctx, text, "text")
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(content, special=special)
    pieces = [tokenizer.piece(token) for token in ids]
    if session.json:
        session.document({"ids": ids, "pieces": pieces})
    else:
        session.write("".join(f"{token}\t{piece!r}\n" for token, piece in zip(ids, pieces, strict=True)))
    session.detail(f"{len(ids)} tokens, {len(content.encode())} bytes")
