"""The options that put adapters of low rank (LoRA) to a model: --lora and --lora-base."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import click

from starscope.cli.common import PATH
from starscope.cli.editing import split_scale
from starscope.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


class LoraArguments(TypedDict):
    """What `load` takes of them."""

    lora: list[tuple[str, float]]
    lora_base: str | None


OPTIONS = (
    click.option(
        "--lora",
        "lora_files",
        multiple=True,
        metavar="FILE[:SCALE]",
        help="Apply a LoRA adapter (PEFT folder or GGUF file), scaled by SCALE (default: 1). May be repeated.",
    ),
    click.option(
        "--lora-base",
        type=PATH,
        metavar="MODEL",
        help="The same model in higher precision: adapters are merged into its weights, which are then rounded to "
        "MODEL's formats.",
    ),
)


def lora_options(function: F) -> F:
    """--lora and --lora-base, as `adapters`, for `load`."""

    @functools.wraps(function)
    def gathered(*args: Any, lora_files: tuple[str, ...], lora_base: str | None, **parameters: Any) -> Any:
        if lora_base is not None and not lora_files:
            raise UsageError("--lora-base was given without an adapter; expected --lora too.")
        lora = [split_scale(given, "--lora") for given in lora_files]
        return function(*args, adapters=LoraArguments(lora=lora, lora_base=lora_base), **parameters)

    for option in reversed(OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]
