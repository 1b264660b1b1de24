"""Several values by one name: patterns, lists and functions, made into what is to be read.

choose(names, "layers.*.layer_output")           # * and ? stand for any characters, [0-3] for one of them
choose(names, ["blocks.*.attn.hook_pattern", "logits"])
choose(names, lambda name: name.endswith("layer_mid"))
choose(names, None)                              # every standard value
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from starscope.errors import TraceError, UsageError
from starscope.microscope.names import HOOKS, Names, Reading
from starscope.values import BESIDE_THE_GRAPH

Asked = str | Iterable[str] | Callable[[str], bool] | None


def choose(names: Names, asked: Asked) -> list[tuple[Reading, bool]]:
    """What is to be read, each once, and whether it was asked for by its own name rather than among others.

    A pattern or a function looks at the standard names; where none fits, at TransformerLens' hooks, and then at what
    goes into parts and comes out of them (`layers.*.mlp.down_proj.input`), under the names of the checkpoint and of
    GGUF too. TraceError when a name is unknown or nothing fits.
    """
    found: dict[Reading, bool] = {}
    if asked is None or callable(asked):
        for reading in _fitting(names, asked or (lambda _: True), "the function that was given"):
            found.setdefault(reading, False)
        return list(found.items())
    for one in checked_names(asked):
        pattern = re.sub(r"(?<=[^.\[])\[(\d+|\*)\]", r".\1", one.strip()).removeprefix("model.")
        if not re.search(r"[*?\[]", pattern):
            found[names.reading(one)] = True
            continue
        for reading in _fitting(names, partial(_fits, pattern), repr(one)):
            found.setdefault(reading, False)
    if not found:
        raise TraceError("no value was asked for.", hint="Name some, or give None for every standard value.")
    return list(found.items())


def checked_names(given: Any) -> list[str]:
    """One name or several, as a list; UsageError for what is none."""
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"{name!r} was given for the name of a value; expected a text.")
    return names


def _fitting(names: Names, fits: Callable[[str], bool], what: str) -> list[Reading]:
    for candidates in (_standard(names), _hooks(names), _ends(names)):
        if found := [names.reading(name) for name in candidates if fits(name)]:
            return found
    raise TraceError(f"no value fits {what}.", hint="`starscope trace MODEL --list` lists the names.")


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern)


def _standard(names: Names) -> Iterator[str]:
    yield from names.graph.names
    yield from sorted(BESIDE_THE_GRAPH)


def _hooks(names: Names) -> Iterator[str]:
    for pattern in HOOKS:
        for layer in range(names.graph.hp.num_layers) if "{i}" in pattern else [0]:
            yield pattern.format(i=layer)


def _ends(names: Names) -> Iterator[str]:
    mixed = (_under_its_own_name(part.path, part.hf) for part in names.parts.values())
    paths = (*names.parts, *names.native, *names.gguf, *mixed)
    own = {path: names.part(path) for path in dict.fromkeys(paths) if path}
    for path, part in own.items():
        if part is not None and names.ends(part) is not None:
            yield f"{path}.input"
            yield f"{path}.output"


def _under_its_own_name(path: str, native: str) -> str:
    """`layers.3.self_attn.c_attn`: the checkpoint's name at the place that a part has here."""
    above, _, _ = path.rpartition(".")
    name = native.rpartition(".")[2]
    return f"{above}.{name}" if above else name
