"""Brings .venv to what a job needs: `setup.py demo|test|dev`. People and CI use it through make.

Each step leaves a stamp in .venv, a hash of everything that the step depends on; a step whose stamp is right does
nothing, so a second run asks no package index. pip keeps the machine's settings (PIP_*, pip.conf).

    demo   the package and what it imports         works without a compiler
    test   and the tools and oracles of the tests   the package comes from a wheel; the native module must compile
    dev    the same, with the package editable
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
BUILD = ROOT / "build"
PIN = ["--constraint", str(ROOT / "constraints.txt")]
CMAKE = ["cmake>=3.20", "ninja"]  # what scikit-build-core would fetch by itself, here pinned


def main() -> None:
    """Runs the steps of one job."""
    job = sys.argv[1] if len(sys.argv) == 2 else ""
    if job not in ("demo", "test", "dev"):
        sys.exit("usage: setup.py demo|test|dev")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["project"]["dependencies"] + project["build-system"]["requires"] + CMAKE
    pins = digest([ROOT / "pyproject.toml", ROOT / "constraints.txt"])

    if not venv_works():
        make_venv()
    step("base", pins, lambda: pip("install", *PIN, *requirements))
    if job != "demo":
        step("test", pins, lambda: install_test_tools(project["project"]["optional-dependencies"]))
    native = [ROOT / "CMakeLists.txt", *files(ROOT / "src/starscope/native")]
    if job == "dev":
        step("package", f"editable {pins} {digest(native)}", install_editable)
    else:
        sources = [*native, *files(ROOT / "src"), ROOT / "README.md", ROOT / "LICENSE"]
        # The demo takes a wheel without the native module, the tests never do.
        compiled = f"wheel with the native module {pins} {digest(sources)}"
        if not stamp_is("package", compiled):
            step(
                "package", f"wheel {pins} {digest(sources)}" if job == "demo" else compiled, lambda: install_wheel(job)
            )


def install_test_tools(extras: dict[str, list[str]]) -> None:
    """The extras of the tests, once it is known that no CUDA build comes with them."""
    wanted = [name for extra in ("dev", "torch", "gguf", "hf") for name in extras[extra] if "starscope[" not in name]
    report = VENV / "report.json"
    pip("install", *PIN, "--dry-run", "--report", str(report), *wanted)
    install = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    nvidia = [item["name"] for item in install if item["name"].lower().startswith("nvidia")]
    if nvidia:
        sys.exit(
            f"starscope: pip is about to install {', '.join(nvidia)}. The tests use the CPU build of torch: point pip"
            " at one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL or pip.conf) and run make again."
        )
    if install:
        pip("install", "--no-deps", *(f"{item['name']}=={item['version']}" for item in install))


def install_editable() -> None:
    """The package from src/, with the native module if it compiles."""
    pip("install", "--no-index", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def install_wheel(job: str) -> None:
    """Builds the wheel as a user's pip would, and installs it."""
    out = BUILD / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log = BUILD / "wheel.log"
    settings = [f"build-dir={BUILD / 'cmake'}"]
    if job == "test":
        settings.append("cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--log", str(log), "-w", str(out)]
    pip("wheel", *options, *(f"--config-settings={setting}" for setting in settings), str(ROOT))
    (wheel,) = out.glob("*.whl")
    if wheel.name.endswith("-none-any.whl"):
        if job == "test":
            sys.exit(f"starscope: the native module did not compile, and the tests demand it. The log is {log}.")
        say(f"no native module: it did not compile (the log is {log}). NumPy does its work.")
    pip("install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))


def venv_works() -> bool:
    """Whether .venv is whole and its Python still the one that it was made with, which need not be this one."""
    return PYTHON.exists() and stamp_is("venv", python_version())


def python_version() -> str:
    """What .venv's Python says it is; empty if it cannot run pip."""
    ask = [PYTHON, "-c", "import pip, sys; print(sys.version)"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


def make_venv() -> None:
    """A new .venv with nothing but pip."""
    say(f"making .venv with Python {sys.version.split()[0]}")
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(VENV))
    STAMPS.mkdir()
    (STAMPS / "venv").write_text(python_version())


def step(name: str, key: str, action: Callable[[], None]) -> None:
    """Runs the action unless it was the last one to succeed under this name, with this key."""
    if stamp_is(name, key):
        return
    (STAMPS / name).unlink(missing_ok=True)
    say(f"setting up: {name}")
    action()
    (STAMPS / name).write_text(key)


def stamp_is(name: str, key: str) -> bool:
    """Whether the step was done with this key."""
    path = STAMPS / name
    return path.is_file() and path.read_text() == key


def digest(paths: Iterable[Path]) -> str:
    """A hash of the files' names and bytes."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def files(folder: Path) -> Sequence[Path]:
    """The files below a folder, without what Python and compilers leave there."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so"))


def pip(*arguments: str) -> None:
    """Runs .venv's pip, quietly unless something is wrong."""
    run(str(PYTHON), "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", *arguments[1:])


def run(*command: str) -> None:
    """Runs a command; its failure ends the set-up."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
    if code := subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode:
        sys.exit(f"starscope: this failed with status {code}: {' '.join(command)}")


def say(message: str) -> None:
    """One line on stderr."""
    print(f"starscope: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
