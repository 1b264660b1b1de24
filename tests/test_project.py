"""The repository and the installed package as a whole."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import starscope

ROOT = Path(__file__).parent.parent

# Written so that this file does not contain what it looks for.
HOSTS = ("pypi", "pythonhosted", "npmjs", "debian", "download.pytorch")
FORBIDDEN = re.compile(rb"(?:%s)\.(?:org|com)|[\s\"'`=(]/(?:work|root)/" % "|".join(HOSTS).encode())


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    found = {
        str(path.relative_to(ROOT)): match.group().decode()
        for path in tracked_files()
        if b"\0" not in (content := path.read_bytes()) and (match := FORBIDDEN.search(content))
    }
    assert found == {}


def test_importing_starscope_imports_nothing_heavy():
    heavy = ["numpy", "torch", "tokenizers", "rich", "click", "transformers", "huggingface_hub"]
    assert run_python(f"import starscope, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_every_public_name_is_there():
    for name in starscope.__all__:
        assert getattr(starscope, name) is not None
    assert set(starscope.__all__) <= set(dir(starscope))
    with pytest.raises(AttributeError, match="module 'starscope' has no attribute 'lode'"):
        _ = starscope.lode


def test_the_version_is_one():
    assert importlib.metadata.version("starscope") == starscope.__version__
    command = run_python("from starscope.cli import main; import sys; sys.argv = ['starscope', '--version']; main()")
    assert starscope.__version__ in command


def test_the_installation_carries_types_and_no_sources_of_the_native_module():
    package = Path(starscope.__file__).parent
    assert (package / "py.typed").is_file()
    if "site-packages" in package.parts:  # not the editable installation
        assert [path.name for path in package.rglob("*") if path.suffix in (".cpp", ".h")] == []
