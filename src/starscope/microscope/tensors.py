"""The tensors that traces hand out: torch's where torch is installed, NumPy's elsewhere.

Both kinds are ordinary tensors with one method more: `save()` gives the plain tensor, which shares their numbers. It
is there for code that was written for other tools; a value outlives its trace without it.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class ArrayValue(np.ndarray[Any, Any]):
    """A NumPy array with `save()`, and `clone()` as torch has it."""

    def save(self) -> np.ndarray[Any, Any]:
        return self.view(np.ndarray)

    def clone(self) -> ArrayValue:
        return self.copy()


@functools.cache
def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


@functools.cache
def torch_value() -> Any:
    """The class of torch tensors that traces hand out; imports torch."""
    import torch

    class Value(torch.Tensor):
        """A torch tensor with `save()`."""

        def save(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    return Value


def as_value(array: Any) -> Any:
    """A NumPy array, or a torch tensor, as what traces hand out; it shares the array's numbers."""
    if not isinstance(array, np.ndarray):
        return array.as_subclass(torch_value())
    if not has_torch():
        return array.view(ArrayValue)
    import torch

    return torch.from_numpy(array).as_subclass(torch_value())


def plain(value: Any) -> Any:
    """The tensor itself, without what traces add."""
    return (
        value.save()
        if isinstance(value, ArrayValue) or (hasattr(value, "as_subclass") and hasattr(value, "save"))
        else value
    )


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Any tensor or nested list as a NumPy array; float types that NumPy lacks as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
        return np.asarray(value.numpy())
    return np.asarray(value)


def save(value: T) -> T:
    """Gives back what it is given: a value that was read outlives its trace. For code written for other tools."""
    plainly: T = plain(value)
    return plainly
