"""The options of a hole to fill: its order, other files as context, the names of things, and healing at the cursor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from starscope.cli.common import PATH, read_file, text_argument, utf8

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--fim-order",
        type=click.Choice(("psm", "spm")),
        default="psm",
        show_default=True,
        help="Which the model reads first: the prompt (psm) or the suffix (spm).",
    ),
    click.option(
        "--context-file",
        "context_files",
        type=PATH,
        multiple=True,
        help="Another file for the model to read first, with its name; put the most relevant last. May be repeated.",
    ),
    click.option("--repository", metavar="NAME", help="Name of the repository."),
    click.option("--filename", metavar="NAME", help="Name of the file being filled in."),
)


def infill_options(function: F) -> F:
    """What `Model.generate` takes for a hole beside the suffix; the function gets it as `hole`, keywords to pass on."""

    @functools.wraps(function)
    def gathered(
        *args: Any,
        fim_order: str,
        context_files: tuple[str, ...],
        repository: str | None,
        filename: str | None,
        **parameters: Any,
    ) -> Any:
        hole = {
            "fim_order": fim_order,
            "files": [(text_argument(path, "a file's name"), utf8(read_file(path), path)) for path in context_files],
            "repository": None if repository is None else text_argument(repository, "the repository's name"),
            "filename": None if filename is None else text_argument(filename, "the file's name"),
        }
        return function(*args, hole=hole, **parameters)

    for option in reversed(OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]
