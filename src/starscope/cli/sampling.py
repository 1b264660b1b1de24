"""The options that say how the next token is chosen, and what they gather: keywords for SamplingOptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def read_biases(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """ID=ADDEND, each token once."""
    biases: dict[int, float] = {}
    for value in values:
        token, _, addend = value.partition("=")
        try:
            pair = int(token), float(addend)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is not a logit bias; expected a token id, =, and a number or -inf, such as 13=-inf."
            ) from None
        if pair[0] in biases:
            raise click.BadParameter(f"token {pair[0]} has two biases; expected one per token.")
        biases[pair[0]] = pair[1]
    return biases


# The defaults are SamplingOptions' own; a test holds the two together.
OPTIONS = (
    click.option(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        metavar="T",
        help="Sampling temperature (0: greedy).",
    ),
    click.option("--top-k", type=int, default=0, metavar="K", help="Sample from the K most likely tokens (0: all)."),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="Sample from the most likely tokens whose probabilities sum to P (1: all).",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="Sample from tokens at least P times as likely as the best (0: all).",
    ),
    click.option(
        "--typical-p",
        type=float,
        default=1.0,
        metavar="P",
        help="Sample from the most typical tokens whose probabilities sum to P (1: all).",
    ),
    click.option(
        "--mirostat",
        type=int,
        default=0,
        metavar="0|1|2",
        help="Keep the text's surprise constant (0: off); always samples.",
    ),
    click.option(
        "--mirostat-tau",
        type=float,
        default=5.0,
        show_default=True,
        metavar="BITS",
        help="Mirostat's target surprise per token.",
    ),
    click.option(
        "--mirostat-eta", type=float, default=0.1, show_default=True, metavar="RATE", help="Mirostat's learning rate."
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="Make tokens already used less likely (1: off).",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="Subtracted from the logit of every token already used.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="Subtracted once for every time a token was used.",
    ),
    click.option(
        "--penalty-window",
        type=int,
        default=64,
        show_default=True,
        metavar="N",
        help="Apply penalties to the last N tokens, including the prompt.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=read_biases,
        metavar="ID=ADDEND",
        help="Add to a token's logit; -inf bans the token. May be repeated.",
    ),
    click.option("--samplers", metavar="NAMES", help="Order of the sampling steps, comma-separated; -v shows it."),
    click.option("--seed", type=int, metavar="N", help="Random seed, for reproducible text (default: random)."),
)


def sampling_options(function: F) -> F:
    """Every option of SamplingOptions; the function gets them as `sampling`, the keywords that it takes."""

    @functools.wraps(function)
    def gathered(*args: Any, **parameters: Any) -> Any:
        from starscope.sampling import SAMPLERS, SamplingArguments

        sampling = {name: parameters.pop(name) for name in SamplingArguments.__annotations__}
        if sampling["samplers"] is None:
            sampling["samplers"] = SAMPLERS
        return function(*args, sampling=sampling, **parameters)

    for option in reversed(OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]
