"""Convert, run, train and look inside code models: the StarCoder and LLaMA families.

    import starscope

    model = starscope.load("demo")
    print(model.generate("def add(a, b):").text)

Nothing heavy is imported until it is used: `import starscope` loads neither NumPy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starscope.errors import StarscopeError as StarscopeError
    from starscope.generate import Completion as Completion
    from starscope.microscope import Edit as Edit
    from starscope.microscope import save as save
    from starscope.model import Model as Model
    from starscope.model import load as load

__version__ = "0.1.0"

_HOME = {  # public name -> the module that defines it
    "Completion": "starscope.generate",
    "Edit": "starscope.microscope",
    "Model": "starscope.model",
    "StarscopeError": "starscope.errors",
    "load": "starscope.model",
    "save": "starscope.microscope",
}

__all__ = ["Completion", "Edit", "Model", "StarscopeError", "__version__", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
