r"""What goes where and what it takes, before anything is allocated: a pure function of sizes, formats and options.

    plan = make_plan(graph, formats, [Device("cuda", free=24 << 30)], gpu_layers="auto", context_length=8192)
    plan.bytes["cuda"].total               # weights, keys and values, and scratch for one step
    plan.tensors["layers.3.mlp.up_proj.weight"], plan.caches[3, "k"], plan.ops[17]
    print("\n".join(plan.report()))

Bytes follow from the tensors' shapes and formats, the real context and the values of a step of `batch` tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starscope.errors import DoesNotFitError, UsageError
from starscope.formats import find_format
from starscope.graph import Graph
from starscope.machine import bytes_text
from starscope.placement.ladder import HOST, Rungs, block_devices, place_caches, place_ops, place_tensors
from starscope.placement.schedule import Segment, make_schedule, peak_bytes

MB = 1 << 20
BATCH = 512
"""Tokens of a prompt that run at once."""
LOW_VRAM_BATCH = 64
"""Likewise with low VRAM: prompts take longer, and what a step needs on the GPU is an eighth."""
KEPT_FORMATS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"})
"""What a GPU computes on as it is stored; anything else is there as float32."""
MARGIN_SHARE, LEAST_MARGIN = 20, 64 * MB
"""`auto` leaves a twentieth of the free memory, and never less than this: kernels and the allocator need some."""

Layers = int | Literal["all", "auto"]


@dataclass(frozen=True)
class Device:
    """A device that operations may be placed on. `free` bytes; None: nobody knows."""

    name: str
    free: int | None = None

    @property
    def margin(self) -> int:
        return 0 if self.free is None else max(self.free // MARGIN_SHARE, LEAST_MARGIN)


@dataclass(frozen=True)
class Bytes:
    """What one device holds."""

    weights: int = 0
    kv: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch

    def as_document(self) -> dict[str, int]:
        return {"weights": self.weights, "kv": self.kv, "scratch": self.scratch, "total": self.total}


@dataclass(frozen=True)
class Plan:
    """Where every operation, tensor and cache goes, and the bytes of each device, the host among them.

    `shortfall`: what auto left out for lack of room, in words; None where everything was asked for, or fits.
    """

    graph: Graph = field(repr=False)
    rungs: Rungs
    devices: tuple[Device, ...]
    main: str
    context_length: int
    batch: int
    ops: tuple[str, ...] = field(repr=False)
    tensors: Mapping[str, str] = field(repr=False)  # several devices: joined by +
    caches: Mapping[tuple[int, str], str] = field(repr=False)  # (block, "k" or "v")
    bytes: Mapping[str, Bytes]
    shortfall: str | None = None

    @property
    def on_gpus(self) -> Bytes:
        """The sum over all devices but the host."""
        found = [one for name, one in self.bytes.items() if name != HOST]
        return Bytes(sum(one.weights for one in found), sum(one.kv for one in found), sum(one.scratch for one in found))

    @property
    def is_on_host(self) -> bool:
        """Whether no device but the host has anything to do."""
        return all(place == HOST for place in self.ops)

    def report(self) -> list[str]:
        """The lines that say what was placed where, in the words of llama.cpp."""
        rungs, lines = self.rungs, []
        if rungs.asked and rungs.low_vram:
            lines.append("not allocating a VRAM scratch buffer due to low VRAM option")
        elif rungs.asked:
            lines.append(f"allocating {_mb(self.on_gpus.scratch)} MB VRAM for the scratch buffer")
        lines.append(f"offloading {rungs.blocks} repeating layers to GPU")
        if rungs.head:
            lines.append("offloading non-repeating layers to GPU")
        reason = "low VRAM option" if rungs.low_vram else "no KV offload option"
        for above, name in ((1, "v"), (2, "k")):
            if rungs.asked > rungs.num_layers + above:
                lines.append(
                    f"offloading {name} cache to GPU"
                    if rungs.keeps_kv
                    else f"cannot offload {name} cache to GPU due to {reason}"
                )
        lines.append(f"offloaded {rungs.offloaded}/{rungs.num_layers + 3} layers to GPU")
        lines.append(f"total VRAM used: {_mb(self.on_gpus.total)} MB")
        return lines

    def as_document(self) -> dict[str, Any]:
        """The JSON document of `starscope plan`. `bytes` are those of all devices but the host."""
        rungs = self.rungs
        return {
            "repeating_layers": rungs.blocks,
            "non_repeating": rungs.head,
            "v_cache": rungs.values,
            "k_cache": rungs.keys,
            "offloaded": rungs.offloaded,
            "max_offloadable": rungs.max_offloadable,
            "bytes": self.on_gpus.as_document(),
            "tensors": dict(self.tensors),
            "devices": {
                name: {**one.as_document(), "free": next((d.free for d in self.devices if d.name == name), None)}
                for name, one in self.bytes.items()
            },
            "context_length": self.context_length,
            "batch": self.batch,
            "low_vram": rungs.low_vram,
            "fallback": self.shortfall,
            "report": self.report(),
        }


def make_plan(
    graph: Graph,
    formats: Mapping[str, str],
    devices: Sequence[Device],
    *,
    gpu_layers: Layers = "auto",
    context_length: int | None = None,
    batch: int = BATCH,
    low_vram: bool = False,
    kv_offload: bool = True,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] | None = None,
) -> Plan:
    """Place a graph on `devices` (without the host), none of which may be there yet.

    `formats`: how each tensor of the graph is stored, by its name, without tied ones that are not. `gpu_layers`: rungs
    of the ladder (`ladder.py`), "all" of them, or "auto": as many as fit with a margin. `main_gpu`: which device has
    the norm and the head (default: the one with the last block). `tensor_split`: the devices' shares of the blocks
    (default: by free memory). UsageError for options out of range; DoesNotFitError, which says what would fit, when a
    number of layers or "all" needs more than is free.
    """
    limit = context_length or int(graph.hp.context_length)
    batch = min(batch, LOW_VRAM_BATCH) if low_vram else batch
    check_options(gpu_layers, devices, main_gpu, tensor_split)
    shares = _shares(devices, tensor_split)
    slots = graph.family.slots(graph.hp)
    tied = {slot.name: slot.tied_to for slot in slots if slot.tied_to and slot.name not in formats}
    placer = _Placer(graph, formats, tuple(devices), limit, batch, shares, main_gpu, low_vram, kv_offload, tied)
    rungs = placer.rungs(0)
    if not devices:
        return placer.plan(0)
    if isinstance(gpu_layers, int):
        return _checked(placer, gpu_layers)
    if gpu_layers == "all":
        return _checked(placer, rungs.max_offloadable)
    return _fitted(placer, rungs.max_offloadable)


def check_options(
    gpu_layers: object, devices: Sequence[Device], main_gpu: int | None, tensor_split: Sequence[float] | None
) -> None:
    """UsageError for what no model could be placed by."""
    is_number = isinstance(gpu_layers, int) and not isinstance(gpu_layers, bool)
    if gpu_layers not in ("all", "auto") and not (is_number and gpu_layers >= 0):  # type: ignore[operator]
        raise UsageError(f"gpu_layers is {gpu_layers!r}; expected a number of layers from 0 on, all or auto.")
    names = ", ".join(device.name for device in devices) or "none"
    if main_gpu is not None and not 0 <= main_gpu < max(len(devices), 1):
        raise UsageError(f"main_gpu is {main_gpu}; expected 0 to {max(len(devices), 1) - 1} (devices: {names}).")
    if tensor_split is not None:
        if len(tensor_split) > max(len(devices), 1):
            raise UsageError(f"tensor_split has {len(tensor_split)} shares for {len(devices)} devices ({names}).")
        if not all(0 <= share <= sys.float_info.max for share in tensor_split) or not any(tensor_split):
            raise UsageError(
                f"tensor_split is {','.join(map(str, tensor_split))}; expected shares from 0 on, not all 0."
            )


def _shares(devices: Sequence[Device], tensor_split: Sequence[float] | None) -> list[float]:
    """A share for each device; those left out of the split get nothing."""
    if tensor_split is not None:
        most = max(tensor_split)  # the sum of what is divided by it is finite
        return [*(share / most for share in tensor_split), *[0.0] * (len(devices) - len(tensor_split))]
    room = [max(0.0, float(device.free - device.margin)) for device in devices if device.free is not None]
    return room if any(room) and len(room) == len(devices) else [1.0] * len(devices)


@dataclass(frozen=True)
class _Placer:
    """What the plans of one model, for any number of layers, have in common."""

    graph: Graph
    formats: Mapping[str, str]
    devices: tuple[Device, ...]
    context_length: int
    batch: int
    shares: list[float]
    main_gpu: int | None
    low_vram: bool
    kv_offload: bool
    tied: Mapping[str, str]  # tensors that are not stored -> those that stand for them

    def rungs(self, asked: int) -> Rungs:
        return Rungs(int(self.graph.hp.num_layers), asked, self.low_vram, self.kv_offload)

    def plan(self, asked: int, shortfall: str | None = None) -> Plan:
        graph, rungs = self.graph, self.rungs(asked)
        blocks = block_devices(rungs, [one.name for one in self.devices], self.shares) if self.devices else []
        blocks = blocks or [HOST] * rungs.num_layers
        main = blocks[-1] if self.main_gpu is None or not self.devices else self.devices[self.main_gpu].name
        ops = place_ops(graph, rungs, blocks, main)
        tensors = place_tensors(graph, ops)
        places = dict.fromkeys((HOST, *(one.name for one in self.devices)))
        segments = make_schedule(graph, ops)
        return Plan(
            graph=graph,
            rungs=rungs,
            devices=self.devices,
            main=main,
            context_length=self.context_length,
            batch=self.batch,
            ops=tuple(ops),
            tensors={name: "+".join(found) for name, found in tensors.items()},
            caches=place_caches(graph, ops),
            bytes={place: self._bytes(place, ops, tensors, segments) for place in places},
            shortfall=shortfall,
        )

    def _bytes(
        self, place: str, ops: Sequence[str], tensors: Mapping[str, Sequence[str]], segments: Sequence[Segment]
    ) -> Bytes:
        graph, is_half = self.graph, self.is_half
        kept = [name for name, found in tensors.items() if place in found]
        weights = sum(self._tensor_bytes(name) for name in kept if self.tied.get(name) not in kept)
        sizes = {"rows": self.batch, "wanted": 1, "query": self.batch, "key": self.context_length}
        histories = graph.bytes({**sizes, "query": 1}, itemsize=2 if is_half else 4)
        kv = sum(histories[op.outputs[0]] for op in graph.ops if op.kind == "cache" and ops[op.index] == place)
        scratch = 0
        if place != HOST and place in ops:
            scratch = peak_bytes(graph, segments, place, sizes, half_cache=is_half)
        return Bytes(weights, kv, scratch)

    def _tensor_bytes(self, name: str) -> int:
        stored = self.formats[self.tied.get(name, name)]
        return find_format(stored if stored in KEPT_FORMATS else "F32").nbytes(self.graph.weights[name])

    @property
    def is_half(self) -> bool:
        """Whether keys and values are kept as float16: not for files that are float32 throughout."""
        return any(found != "F32" for found in self.formats.values())


def _lacks(plan: Plan, *, margin: bool) -> tuple[Device, int] | None:
    """The device that has too little room, and the bytes that it lacks."""
    for device in plan.devices:
        if device.free is not None:
            room = device.free - (device.margin if margin else 0)
            needed = plan.bytes[device.name].total
            if needed > max(room, 0):  # without room, and with nothing on it, it lacks nothing
                return device, needed - room
    return None


def _most(placer: _Placer, limit: int, *, margin: bool) -> int:
    """The most layers, up to `limit`, that fit; 0 when none does."""
    low, high = 0, limit + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _lacks(placer.plan(middle), margin=margin) is None else (low, middle)
    return low


def _checked(placer: _Placer, asked: int) -> Plan:
    plan = placer.plan(asked)
    lack = _lacks(plan, margin=False)
    if lack is None:
        return plan
    device, _ = lack
    found = plan.bytes[device.name]
    most = _most(placer, min(asked, plan.rungs.num_layers + 1), margin=False)
    weights, kv, scratch, total, free = (
        bytes_text(count, 2) for count in (found.weights, found.kv, found.scratch, found.total, device.free or 0)
    )
    others = "." if placer.low_vram else "; --low-vram and a lower --ctx need less."
    raise DoesNotFitError(
        f"{plan.rungs.offloaded} of {plan.rungs.num_layers + 3} layers need {total} on {device.name} "
        f"(weights {weights}, keys and values {kv}, scratch {scratch}); {free} are free.",
        hint=f"{most} would fit (-ngl {most}), or ask for auto{others}",
    )


def _fitted(placer: _Placer, limit: int) -> Plan:
    if _lacks(placer.plan(limit), margin=True) is None:
        return placer.plan(limit)
    # Values without keys are never worth it: whole attention patterns would move to the device, and take room there.
    most = _most(placer, min(limit, placer.rungs(0).num_layers + 1), margin=True)
    wanted = limit if most > placer.rungs(0).num_layers else most + 1
    lack = _lacks(placer.plan(wanted), margin=True)
    assert lack is not None, "one more does not fit"
    device, missing = lack
    more = "one more" if wanted == most + 1 else f"all {wanted}"
    return placer.plan(
        most,
        f"{most} of {limit} layers fit on {', '.join(one.name for one in placer.devices)} with a margin of "
        f"{bytes_text(device.margin, 2)}; {more} would need {bytes_text(missing, 2)} more on {device.name}.",
    )


def _mb(count: int) -> int:
    """Rounded up, as llama.cpp's line has it."""
    return (count + MB - 1) // MB
