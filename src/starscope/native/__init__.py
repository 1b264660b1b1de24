"""The compiled kernels, if this installation has them.

The C++ beside this file is built into `_kernels` when the package is installed on a machine with a compiler: codecs,
which NumPy computes too, to the same bits, and the native engine's program. A caller asks once and goes on either way:

    compiled = native.kernels()
    if compiled is not None:
        compiled.encode(type_id, values, packed)
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from starscope.errors import UnsupportedError
from starscope.machine import deferred_signals


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        with deferred_signals():  # the process would abort: nanobind makes types while it is imported
            return import_module("starscope.native._kernels"), None
    except ImportError as error:
        return None, str(error)


def kernels() -> ModuleType | None:
    """The compiled module, or None when it was not built or cannot be loaded."""
    return _load()[0]


def use_isa(name: str) -> None:
    """Use another instruction set than the best one from now on, for codecs and for engines made afterwards.

    UnsupportedError for one that this machine or installation does not have.
    """
    module = kernels()
    if module is None:
        raise UnsupportedError(f"there is no instruction set to choose: {why_missing()}.")
    if name not in module.isas():
        raise UnsupportedError(
            f"the instruction set {name!r} cannot be used here; expected one of {', '.join(module.isas())}."
        )
    module.set_isa(name)


def why_missing() -> str | None:
    """What kept the compiled module from loading; None when it is there."""
    return _load()[1]
