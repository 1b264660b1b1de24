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
                f"{value!r} is no bias; expected a token's id, =, and a number or -inf, as in 13=-inf."
            ) from None
        if pair[0] in biases:
            raise click.BadParameter(f"token {pair[0]} comes twice; expected one addend a token.")
        biases[pair[0]] = pair[1]
    return biases


# The defaults are SamplingOptions' own; a test holds the two together.
OPTIONS = (
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, metavar="T", help="0: the likeliest token."
    ),
    click.option("--top-k", type=int, default=0, metavar="K", help="Draw from the K likeliest tokens (0: all)."),
    click.option("--top-p", type=float, default=1.0, metavar="P", help="From the likeliest that sum to P (1: all)."),
    click.option(
        "--min-p", type=float, default=0.0, metavar="P", help="From those P times as likely as the best (0: all)."
    ),
    click.option(
        "--typical-p", type=float, default=1.0, metavar="P", help="From the least unusual that sum to P (1: all)."
    ),
    click.option(
        "--mirostat", type=int, default=0, metavar="0|1|2", help="Hold the surprise of the text (0: off). Always draws."
    ),
    click.option(
        "--mirostat-tau", type=float, default=5.0, show_default=True, metavar="BITS", help="The surprise held, a token."
    ),
    click.option(
        "--mirostat-eta", type=float, default=0.1, show_default=True, metavar="RATE", help="How fast mirostat follows."
    ),
    click.option(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="Make what was said less likely (1: not)."
    ),
    click.option(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="Off the logit of a token that was said."
    ),
    click.option("--frequency-penalty", type=float, default=0.0, metavar="X", help="Off it each time that it was."),
    click.option(
        "--penalty-window",
        type=int,
        default=64,
        show_default=True,
        metavar="N",
        help="The penalties look at the last N tokens, the prompt's among them.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=read_biases,
        metavar="ID=ADDEND",
        help="Add to a token's logit; -inf bans it. May be repeated.",
    ),
    click.option("--samplers", metavar="NAMES", help="The order of the steps, with commas; -v shows it."),
    click.option("--seed", type=int, metavar="N", help="The same seed draws the same text (default: a fresh one)."),
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
