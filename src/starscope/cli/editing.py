"""The options that change what a model computes: edits from files, and control vectors."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from starscope.cli.common import PATH

if TYPE_CHECKING:
    from starscope.microscope import Edit
    from starscope.model import Model

F = TypeVar("F", bound=Callable[..., Any])
Source = tuple[str, "list[Edit]"]  # the file, what is in it

OPTIONS = (
    click.option(
        "--edits",
        "edit_files",
        type=PATH,
        multiple=True,
        help="JSON file of edits to apply to the model's values. May be repeated.",
    ),
    click.option(
        "--control-vector",
        "control_vectors",
        multiple=True,
        metavar="FILE[:SCALE]",
        help="Add the steering vectors in a GGUF file, scaled by SCALE (default: 1), to the blocks' outputs. "
        "May be repeated.",
    ),
)


def edit_options(function: F) -> F:
    """--edits and --control-vector; the function gets what is in the files as `edits`, for `with_edits`."""

    @functools.wraps(function)
    def gathered(*args: Any, edit_files: tuple[str, ...], control_vectors: tuple[str, ...], **parameters: Any) -> Any:
        edits: list[Source] = []
        scaled = [split_scale(given) for given in control_vectors]
        if edit_files:
            from starscope.microscope.edit_files import read_edits

            edits += [(path, read_edits(path)) for path in edit_files]
        if scaled:
            from starscope.microscope.control_vectors import steering_from_gguf

            edits += [(path, steering_from_gguf(path, scale)) for path, scale in scaled]
        return function(*args, edits=edits, **parameters)

    for option in reversed(OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]


def split_scale(given: str, option: str = "--control-vector") -> tuple[str, float]:
    """FILE[:SCALE]. The name of a file that is there is always the file."""
    path, colon, scale = given.rpartition(":")
    if not colon or os.path.exists(given):
        return given, 1.0
    try:
        number = float(scale)
    except ValueError:
        number = math.nan if os.path.exists(path) else 1.0  # no file's name then, but a scale that is none
        path = path if os.path.exists(path) else given
    if not path or not math.isfinite(number):
        raise click.UsageError(f"{option} {given}: expected FILE or FILE:SCALE, with a finite number as the scale.")
    return path, number


def with_edits(model: Model, edits: Sequence[Source]) -> Model:
    """The model under the edits of every file. InvalidContentError for those that it cannot have."""
    from starscope.errors import InvalidContentError, UsageError

    for path, found in edits:
        try:
            model = model.with_edits(found)
        except UsageError as error:
            raise InvalidContentError(f"{path}: {error.message}", hint=error.hint) from None
    return model
