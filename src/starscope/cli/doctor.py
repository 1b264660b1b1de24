"""`doctor`: what this installation has, and one line that says whether all is well."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import click

from starscope import __version__
from starscope.cli.common import Session, everywhere, json_option
from starscope.cli.units import bytes_text

OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PACKAGES = ("numpy", "tokenizers", "huggingface_hub", "threadpoolctl", "click", "rich")


@click.command()
@json_option
@everywhere
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Check versions, hardware and optional packages.

    The last line is the verdict. The exit status is 0 even if something is missing.
    """
    session: Session = ctx.obj
    document = examine()
    session.document(document) if session.json else session.write(as_text(document))


def examine() -> dict[str, Any]:
    """Everything that `doctor` tells."""
    from starscope import native
    from starscope.machine import cgroup_cores, cpu_model, memory, usable_cores

    kernels = native.kernels()
    torch = examine_torch()
    document: dict[str, Any] = {
        "starscope": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "torch": torch,
        "native": {
            "present": kernels is not None,
            "reason": native.why_missing(),
            "isa": kernels.isa() if kernels is not None else None,
        },
        "engine": examine_engine(),
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "cgroup_cores": cgroup_cores(),
        },
        "memory": memory(),
        "offline": {name: os.environ.get(name) for name in OFFLINE_SWITCHES},
        "demo_model": has_demo_model(),
    }
    return {**document, "verdict": verdict(document)}


def verdict(document: dict[str, Any]) -> str:
    """What to conclude, in one sentence."""
    missing = [name for name, version in document["packages"].items() if version is None]
    if missing:
        return f"not ready: {', '.join(missing)} not installed; reinstall starscope."
    torch, engine = document["torch"], document["engine"]["name"]
    if engine == "torch" and torch["problem"]:
        return f"not ready: the torch engine would run models, but torch fails to import: {torch['problem']}"
    parts = []
    if not document["native"]["present"]:
        parts.append(f"without compiled kernels (the {engine} engine runs models, and everything is slower)")
    if torch["version"] is None:
        parts.append("without torch (no training, gradients or GPU)")
    elif torch["problem"]:
        parts.append(f"torch {torch['version']} fails to import: {torch['problem']}")
    return "ready: models run on this machine" + (", " + "; ".join(parts) if parts else "") + "."


def has_demo_model() -> bool:
    """Whether MODEL may be "demo"."""
    from starscope.errors import InputError

    try:
        from starscope.model import find_model

        find_model("demo")
    except (ImportError, InputError):  # a package that is missing is a line of its own
        return False
    return True


def examine_engine() -> dict[str, Any]:
    """The engine that `load` chooses for the CPU, and why; no name where a package is missing that all of them need."""
    try:
        from starscope.engine.base import choose_engine
    except ImportError as error:
        return {"name": None, "reason": f"{error}."}
    name, note = choose_engine("cpu")
    return {"name": name, "reason": note or "the native engine runs it: the compiled kernels are installed."}


def version_of(package: str) -> str | None:
    """An installed package's version, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_torch() -> dict[str, Any]:
    """The version and devices of torch, which is imported: being installed does not mean that it works."""
    version, problem, devices = version_of("torch"), None, []
    if version is not None:
        try:
            import torch

            devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        except Exception as error:  # whatever it is, it is what doctor is asked for
            problem = f"{type(error).__name__}: {error}"
    return {"version": version, "problem": problem, "cuda_devices": devices}


def as_text(document: dict[str, Any]) -> str:
    """The same in lines of a name and a value; the verdict last."""
    cpu, found, native, torch = (document[name] for name in ("cpu", "memory", "native", "torch"))
    cores = f"{cpu['usable_cores']} of {cpu['cores']} cores"
    if cpu["cgroup_cores"] is not None:
        cores += f", {cpu['cgroup_cores']:g} at once in this container"
    room = " of ".join(bytes_text(found[name]) for name in ("available", "total") if found[name] is not None)
    if found["cgroup_limit"] is not None:
        room += f", at most {bytes_text(found['cgroup_limit'])} in this container"
    if torch["version"] is None:
        torch_text = "not installed: no training, gradients or GPU (install torch 2.6 or newer)"
    elif torch["problem"]:
        torch_text = f"{torch['version']}, which fails to import: {torch['problem']}"
    else:
        torch_text = f"{torch['version']}, " + (", ".join(torch["cuda_devices"]) or "no GPU")
    offline = [name for name, value in document["offline"].items() if value and value != "0"]
    rows = [
        ("starscope", document["starscope"]),
        ("python", f"{document['python']} ({sys.executable})"),
        ("platform", document["platform"]),
        ("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in document["packages"].items())),
        ("torch", torch_text),
        ("kernels", f"compiled, {native['isa']}" if native["present"] else f"missing: {native['reason']}"),
        ("engine", document["engine"]["reason"].removesuffix(".")),
        ("processor", f"{cpu['model']}, {cores}"),
        ("memory", f"{room} free" if room else "unknown"),
        ("offline", ", ".join(offline) or "no"),
        ("demo model", "installed" if document["demo_model"] else "not installed"),
        ("verdict", document["verdict"]),
    ]
    return "".join(f"{name:<11} {value}\n" for name, value in rows)
