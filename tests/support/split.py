"""Engines over devices that are not there: CPUs that stand for them, and torch's fake tensors on them.

Fake tensors have shapes, types and devices and no numbers; an operation on two devices at once is an error. Python's
bindings want a driver for some things that a fake tensor needs none for; those go straight to the operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from starscope.engine import Weights
from starscope.engine.split.choose import formats_of
from starscope.engine.split.engine import SplitEngine
from starscope.graph import Graph
from starscope.placement import Device, Plan, make_plan

STAND_INS = {"cuda": "cpu", "cuda:0": "cpu", "cuda:1": "cpu"}


def plan_for(graph: Graph, weights: Weights, layers: int, *, devices: int = 1, **options: Any) -> Plan:
    """A plan for `cuda`, or for several of them."""
    names = ["cuda:0", "cuda:1"][:devices] if devices > 1 else ["cuda"]
    return make_plan(graph, formats_of(graph, weights), [Device(name) for name in names], gpu_layers=layers, **options)


def split_engine(graph: Graph, weights: Weights, layers: int, host: str = "torch", **options: Any) -> SplitEngine:
    """One whose GPUs are CPUs in truth."""
    return SplitEngine(plan_for(graph, weights, layers, **options), weights, host=host, threads=1, stand_ins=STAND_INS)


class _Bindings(TorchFunctionMode):
    """Moves and indexing of fake tensors, by operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            for one in args[1:]:
                device = one if isinstance(one, (str, torch.device)) else device
                dtype = one if isinstance(one, torch.dtype) else dtype
            if device is not None:
                place = torch.device(device)
                here = args[0].device
                is_here = place.type == here.type and place.index in (None, here.index)
                if is_here and dtype in (None, args[0].dtype):
                    return args[0]
                return torch.ops.aten._to_copy.default(args[0], device=place, dtype=dtype)
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(args[0])
        if func is torch.Tensor.__getitem__ and args[0].device.type != "cpu":
            return _indexed(args[0], args[1])
        if func is torch.Tensor.__setitem__ and args[0].device.type != "cpu":
            torch.ops.aten.copy_.default(_indexed(args[0], args[1]), args[2])
            return None
        return func(*args, **kwargs)


def _indexed(value: Any, index: Any) -> Any:
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index.Tensor(value, [index])
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            value, dim = torch.ops.aten.unsqueeze.default(value, dim), dim + 1
        elif isinstance(one, slice):
            assert one.step is None
            value, dim = torch.ops.aten.slice.Tensor(value, dim, one.start, one.stop), dim + 1
        else:
            value = torch.ops.aten.select.int(value, dim, one)
    return value


class Counted(TorchDispatchMode):
    """The bytes of tensors on each device that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, device, size = storage._cdata, tensor.device.type, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive[device] = self.alive.get(device, 0) + size
        self.most[device] = max(self.most.get(device, 0), self.alive[device])
        weakref.finalize(storage, self._forget, key, device, size)

    def _forget(self, key: int, device: str, size: int) -> None:
        self._seen.discard(key)
        self.alive[device] -= size


@contextmanager
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside it tensors are fake, on any device. What looks at numbers does not."""
    monkeypatch.setattr("starscope.engine.torch_kernels._again", lambda o, _alone: o)
    torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode(allow_non_fake_inputs=True), _Bindings():
        yield


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)
