"""What users reported of other programs is a table in a test file: report -> "file: test", from the tests' folder."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent.parent


def assert_tests_are_there(places: Iterable[str], folder: Path = TESTS) -> None:
    """Each place, `file: test` with the file from `folder`, names a test function; there is at least one."""
    places = list(places)
    assert places
    for place in places:
        file, _, name = place.partition(": ")
        assert name in _functions(folder / file), f"{file} has no {name}"
        assert name.startswith("test_"), name


@cache
def _functions(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))
