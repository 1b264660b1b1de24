"""Imports go up the level list of ARCHITECTURE.md and no further; heavy packages are imported where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "starscope"
MODULES = sorted(SOURCE.rglob("*.py"))
HARD_LIMIT = 600  # lines in a file

HEAVY = {"gguf", "huggingface_hub", "rich", "tokenizers", "torch", "transformers", "triton"}
ALLOWED_AT_THE_TOP = {
    "engine/gpu/": {"torch"},
    "engine/gpu/triton_kernels.py": {"triton"},
    "engine/split/torch_step.py": {"torch"},
    "engine/torch_": {"torch"},
    "train/": {"torch"},
}  # by the beginning of the path


def read_levels() -> list[str]:
    """The first word of each line of the fenced block that follows `<!-- levels -->`."""
    _, marker, rest = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("<!-- levels -->")
    assert marker, "ARCHITECTURE.md has no line <!-- levels -->"
    lines = rest.split("```")[1].splitlines()[1:]
    return [line.split()[0] for line in lines if line.strip()]


LEVELS = read_levels()


def level_of(module: str) -> int | None:
    """The place of a module in the list: its own line, or that of the nearest package around it."""
    while module:
        if module in LEVELS:
            return LEVELS.index(module)
        module = module.rpartition(".")[0]
    return None


def name_of(path: Path) -> str:
    """Below starscope: `gguf.reader`; a package goes by its own name."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def internal_imports(path: Path) -> Iterator[str]:
    """The modules of starscope that a file imports anywhere, as names below starscope."""
    package = ["starscope", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("starscope."):
                yield name.removeprefix("starscope.")


def imports_when_loaded(node: ast.AST) -> Iterator[str]:
    """The top-level packages that are imported when the module is: not inside functions, not for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            yield child.module.partition(".")[0]
        yield from imports_when_loaded(child)


def test_the_level_list_names_modules_that_exist_once():
    assert len(LEVELS) == len(set(LEVELS))
    levels = [SOURCE.joinpath(*level.split(".")) for level in LEVELS]
    assert [path for path in levels if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_up_the_level_list(path):
    name = name_of(path)
    if name in ("", "__main__"):  # the package's front doors: attributes loaded when asked for, and the command
        return
    level = level_of(name)
    assert level is not None, f"ARCHITECTURE.md's level list does not cover {name}"
    for imported in internal_imports(path):
        target = level_of(imported)
        if imported.startswith("__"):  # __version__ and the like, from the package itself
            continue
        assert target is not None, f"{name} imports {imported}, which the level list does not cover"
        assert target <= level, f"{name} imports {imported}, which comes after it in the level list"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_packages_are_imported_where_they_are_used(path):
    relative = path.relative_to(SOURCE).as_posix()
    allowed = {name for start, names in ALLOWED_AT_THE_TOP.items() if relative.startswith(start) for name in names}
    found = HEAVY.intersection(imports_when_loaded(ast.parse(path.read_text(encoding="utf-8"))))
    assert found <= allowed


def test_no_source_file_is_over_the_limit():
    sources = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if (lines := len(path.read_text().splitlines())) > HARD_LIMIT
    }
    assert long == {}
