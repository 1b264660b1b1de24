"""Which engine runs a graph where, from what somebody asked for: devices by name or whatever there is, layers, options.

    placed = place(graph, weights, "auto", "auto", Placing(gpu_layers="auto"))
    placed.engine, placed.told

Never silent: a GPU that was asked for and is not there is UnsupportedError, one that is too small DoesNotFitError; only
`auto` takes less, and `told` says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starscope.engine.base import Engine, check_context_length, choose_engine, make_engine
from starscope.errors import UnsupportedError, UsageError
from starscope.graph import Graph
from starscope.placement import HOST, Device, Layers, Plan, check_options, make_plan

if TYPE_CHECKING:
    from starscope.engine.weights import Weights

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where a driver of CUDA, ROCm or WSL shows itself: without one, nobody who has not asked waits for torch."""


@dataclass(frozen=True)
class Placing:
    """What was asked for, in the words of `make_plan`. `auto` layers and nothing else: whatever is best."""

    gpu_layers: Layers = "auto"
    low_vram: bool = False
    kv_offload: bool = True
    main_gpu: int | None = None
    tensor_split: tuple[float, ...] | None = None

    @property
    def asks_for_a_gpu(self) -> bool:
        return self.gpu_layers not in ("auto", 0)

    @property
    def is_default(self) -> bool:
        return self == Placing()

    def plan(
        self, graph: Graph, formats: Mapping[str, str], devices: Sequence[Device], context_length: int | None
    ) -> Plan:
        """The plan for these devices. ContextOverflowError for positions that the model does not have."""
        check_context_length(graph, context_length)
        return make_plan(
            graph,
            formats,
            devices,
            gpu_layers=self.gpu_layers,
            context_length=context_length,
            low_vram=self.low_vram,
            kv_offload=self.kv_offload,
            main_gpu=self.main_gpu,
            tensor_split=self.tensor_split,
        )


@dataclass(frozen=True)
class Placed:
    """An engine, the plan that it follows (None: there is no device but the host), and the lines that say so.

    `fallback`: what was asked for and is not so, in one line; None where everything is.
    """

    engine: Engine
    plan: Plan | None = None
    report: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fallback: str | None = None

    @property
    def told(self) -> list[str]:
        """All that there is to say, a line each."""
        own = getattr(self.engine, "notes", ())
        return [*self.report, *self.notes, *own, *([self.fallback] if self.fallback else [])]


def place(
    graph: Graph,
    weights: Weights,
    engine: str,
    device: str,
    placing: Placing,
    *,
    context_length: int | None = None,
    threads: int | None = None,
) -> Placed:
    """An engine for a graph. `engine` and `device` as `starscope.load` has them; devices may be listed with commas."""
    check_options(placing.gpu_layers, [Device("any")] * 64, None, placing.tensor_split)
    if not isinstance(device, str) or not device:
        raise UsageError(f"device is {device!r}; expected auto, cpu, cuda, cuda:1, ...")
    options: dict[str, Any] = {"context_length": context_length, "threads": threads}
    if device == HOST and placing.asks_for_a_gpu:
        raise UsageError(
            f"device is cpu and {placing.gpu_layers} layers are to be on a GPU; expected one or the other."
        )
    # An engine that is named runs all of it where it was told to, unless layers are divided.
    is_plain = device == HOST or (engine != "auto" and placing.is_default) or placing.gpu_layers == 0
    devices = [] if is_plain else find_devices(device, placing)
    if is_plain or not devices:
        return _on_host(
            graph, weights, engine, device if is_plain and placing.gpu_layers != 0 else HOST, placing, options
        )
    plan = placing.plan(graph, formats_of(graph, weights), devices, context_length)
    if plan.is_on_host:
        placed = _on_host(graph, weights, engine, HOST, placing, options)
        return replace(placed, plan=plan, report=tuple(plan.report()), fallback=plan.shortfall)
    host, note = choose_engine(HOST) if engine == "auto" else (engine, None)
    from starscope.engine.split.engine import SplitEngine

    if host not in ("native", "torch", "numpy"):
        raise UsageError(f"engine {host!r} is unknown; expected auto, native, torch, numpy.")
    made = SplitEngine(plan, weights, host=host, threads=threads)
    return Placed(made, plan, tuple(plan.report()), (note,) if note else (), plan.shortfall)


def _on_host(
    graph: Graph, weights: Weights, engine: str, device: str, placing: Placing, options: dict[str, Any]
) -> Placed:
    """An engine of one device."""
    note = None
    if engine == "auto":
        engine, note = choose_engine(device)
    fallback = None
    if placing.low_vram and device in ("auto", HOST):
        fallback = "low VRAM has nothing to do: everything runs on the host."
    made = make_engine(engine, graph, weights, device=device, **options)
    return Placed(made, notes=(note,) if note else (), fallback=fallback)


def formats_of(graph: Graph, weights: Weights) -> dict[str, str]:
    """How each tensor of a graph is stored; those that are tied and not there left out."""
    return {name: weights.format_name(name) for name in graph.weights if not weights.is_tied(name)}


def find_devices(names: str, placing: Placing) -> list[Device]:
    """The devices with these names, or for "auto" all there are, with their free bytes.

    UnsupportedError for one that is not there; none for "auto" where nobody asked for a GPU.
    """
    if names == "auto":
        if not placing.asks_for_a_gpu and not any(Path(driver).exists() for driver in DRIVERS):
            return []
        if importlib.util.find_spec("torch") is None:
            if placing.asks_for_a_gpu:
                raise UnsupportedError("a GPU needs torch, which is not installed.", hint="Install torch 2.6 or newer.")
            return []
        found = _all_devices()
        if not found and placing.asks_for_a_gpu:
            raise UnsupportedError(
                f"{placing.gpu_layers} layers are to be on a GPU and torch finds none: there is cpu.",
                hint="Leave -ngl out or say auto, or install a torch that knows this machine's GPU.",
            )
        return found
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            f"device {names!r} needs torch, which is not installed.", hint="Install torch 2.6 or newer, or use the CPU."
        )
    from starscope.engine.gpu.devices import find_device

    listed = [name.strip() for name in names.split(",")]
    if len(listed) == 1 and placing.tensor_split is not None and len(placing.tensor_split) > 1:
        listed = [one.name for one in _all_devices() if one.name.startswith(listed[0])] or listed
    found = [Device(name, free_bytes(str(find_device(name)))) for name in listed]
    return [one for one in found if not one.name.startswith(HOST)]


def _all_devices() -> list[Device]:
    """What torch has: every CUDA or ROCm device, or else Apple's."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = ["cuda"] if count == 1 else [f"cuda:{i}" for i in range(count)]
    else:
        names = ["mps"] if torch.backends.mps.is_available() else []
    return [Device(name, free_bytes(name)) for name in names]


def free_bytes(name: str) -> int | None:
    """What a device has to give; None where torch does not say."""
    import torch

    from starscope.engine.gpu import devices

    found = devices.free_bytes(torch.device(name))
    return None if found is None else found[0]
