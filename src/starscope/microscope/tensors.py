"""The tensors that traces hand out: torch's where torch is installed, NumPy's elsewhere.

Both kinds are ordinary tensors with one method more: `save()` gives the plain tensor, which shares their numbers. It
is there for code that was written for other tools; a value outlives its trace without it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
SMALL = 1 << 20  # bytes: of larger tensors a digest is remembered instead of a copy


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

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Stored as the plain tensor, which is known wherever it is read."""
            return self.save().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            memo[id(self)] = made = copy.deepcopy(self.save(), memo).as_subclass(type(self))
            return made

    return Value


def as_value(array: Any) -> Any:
    """A NumPy array, or a torch tensor, as what traces hand out; it shares the array's numbers."""
    if not isinstance(array, np.ndarray):
        return array.as_subclass(torch_value())
    from_numpy = _from_numpy()
    return array.view(ArrayValue) if from_numpy is None else from_numpy(array).as_subclass(torch_value())


@functools.cache
def _without_subclass() -> Any:
    import torch

    return torch._C.DisableTorchFunctionSubclass


@functools.cache
def _from_numpy() -> Any:
    if not has_torch():
        return None
    import torch

    return torch.from_numpy


class Watch:
    """Tells whether the numbers of a tensor were changed in place, through whatever view of them.

    `counter._version`, against `version`, is a quick answer: torch counts what it does, not what is done through a
    NumPy view, and nothing in inference mode (no counter then). `has_changed` looks at the numbers; those on a device
    are only counted, where they are.
    """

    __slots__ = ("_array", "_at", "_seen", "_uncounted", "counter", "version")

    def __init__(self, value: Any) -> None:
        array: np.ndarray[Any, Any] | None = None
        counter: Any = None
        if isinstance(value, np.ndarray):
            array = value.view(np.ndarray)
        else:
            with _without_subclass()():
                counter = value.detach()  # counts changes together with `value`, and is no subclass
            if counter.device.type == "cpu":
                array = counter.numpy()
        self._begin(array, counter)

    @classmethod
    def new_value(cls, array: np.ndarray[Any, Any]) -> tuple[Any, Watch]:
        """`as_value(array)` and its watch, in less time than one after the other."""
        from_numpy, watch = _from_numpy(), cls.__new__(cls)
        counter = None if from_numpy is None else from_numpy(array)
        watch._begin(array, counter)
        return (array.view(ArrayValue) if counter is None else counter.as_subclass(torch_value())), watch

    def _begin(self, array: np.ndarray[Any, Any] | None, counter: Any) -> None:
        self._array, self.counter, self._uncounted = array, counter, None
        if counter is not None and counter.is_inference():
            self.counter, self._uncounted = None, counter
        self._at = 0 if self.counter is None else self.counter.data_ptr()
        self.reset()

    def reset(self) -> None:
        """From now on."""
        self.version = 0 if self.counter is None else self.counter._version
        self._seen = self._look()

    def _look(self) -> bytes:
        array = self._array
        if array is None:
            if self._uncounted is None:
                return b""
            array = as_array(self._uncounted)
        elif self.counter is not None and self.counter.data_ptr() != self._at:
            array = self.counter.detach().numpy()  # they have moved, to memory that processes share
        if array.nbytes <= SMALL:
            return array.tobytes()
        return hashlib.blake2b(np.ascontiguousarray(array).data.cast("B"), digest_size=16).digest()

    def has_changed(self) -> bool:
        """Whether the numbers are others than at the last `reset`."""
        if self._array is None and self.counter is not None:
            return bool(self.counter._version != self.version)
        return self._look() != self._seen

    def follow(self, value: Any) -> None:
        """`reset`, wherever the numbers are now."""
        if self.is_elsewhere(value):
            self.__init__(value)  # type: ignore[misc]
        else:
            self.reset()

    def is_elsewhere(self, value: Any) -> bool:
        """Whether the tensor has other numbers altogether now, or in another order: `value.data = x`, `value.t_()`."""
        tensor = self._uncounted if self.counter is None else self.counter
        if tensor is None or tensor.is_meta:
            return False
        with _without_subclass()():
            if value.is_set_to(tensor):
                return False
            has_moved = value.data_ptr() != tensor.data_ptr()
            return bool(has_moved or (value.stride() != tensor.stride() and value.shape == tensor.shape))


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
