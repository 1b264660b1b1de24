"""Which operation runs where: the ladder of `-ngl N`, over a recorded graph of any family.

N blocks from the last one on go to the GPU; above them, one rung each:

    num_layers + 1    the final norm and the head ("non-repeating"), the head alone with low VRAM
    num_layers + 2    values: what is cached of them, and their mix
    num_layers + 3    keys: what is cached of them, scores and softmax

Low VRAM, and "no KV offload", take the last two away: then attention of blocks on a GPU runs on the host. The token
embeddings, and what follows them before the first block, are always on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starscope.graph import Graph, Op

HOST = "cpu"
NORMS = frozenset({"layer_norm", "rms_norm"})
LAID_OUT = frozenset({"split_heads", "rope"})
"""What stands between a projection and attention and goes with whoever reads it: it moves or turns heads, no more."""


@dataclass(frozen=True)
class Rungs:
    """How far up the ladder a number of layers leads. `asked` may be more than there are rungs."""

    num_layers: int
    asked: int
    low_vram: bool = False
    kv_offload: bool = True

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values may be on a GPU at all."""
        return self.kv_offload and not self.low_vram

    @property
    def max_offloadable(self) -> int:
        return self.num_layers + (3 if self.keeps_kv else 1)

    @property
    def offloaded(self) -> int:
        return min(self.asked, self.max_offloadable)

    @property
    def blocks(self) -> int:
        return min(self.asked, self.num_layers)

    @property
    def head(self) -> bool:
        return self.asked > self.num_layers

    @property
    def norm(self) -> bool:
        return self.head and not self.low_vram

    @property
    def values(self) -> bool:
        return self.asked > self.num_layers + 1 and self.keeps_kv

    @property
    def keys(self) -> bool:
        return self.asked > self.num_layers + 2 and self.keeps_kv


def divide(count: int, shares: Sequence[float]) -> list[int]:
    """`count` blocks by share, in order: how many each gets. The rounding is of the sums, so that all are given out."""
    total, given, made = sum(shares), 0, []
    for i in range(len(shares)):
        until = round(count * sum(shares[: i + 1]) / total)
        made.append(until - given)
        given = until
    return made


def block_devices(rungs: Rungs, devices: Sequence[str], shares: Sequence[float]) -> list[str]:
    """The device of each block's weights."""
    made = [HOST] * (rungs.num_layers - rungs.blocks)
    for device, count in zip(devices, divide(rungs.blocks, shares), strict=True):
        made += [device] * count
    return made


def place_ops(graph: Graph, rungs: Rungs, blocks: Sequence[str], main: str) -> list[str]:
    """The device of every operation. `blocks`: that of each block's weights; `main`: where the norm and the head go."""
    in_blocks = [op.index for op in graph.ops if op.layer is not None]
    first, last = min(in_blocks), max(in_blocks)
    made = [HOST] * len(graph.ops)
    for op in graph.ops:
        if op.layer is not None:
            made[op.index] = blocks[op.layer]
        elif op.index > last and (rungs.norm if op.kind in NORMS else rungs.head):
            made[op.index] = main
    for op in graph.ops[first : last + 1]:
        assert op.layer is not None, "nothing stands between two blocks"
        part = _part(graph, op)
        if part is not None:
            made[op.index] = blocks[op.layer] if (rungs.values if part == "v" else rungs.keys) else HOST
    for op in graph.ops:  # where their input is made: what moves then is the least
        if op.kind in ("merge_heads", "wanted_rows"):
            producer = graph.producers[op.inputs[0]]
            made[op.index] = made[op.index if producer is None else producer]
    for op in reversed(graph.ops):
        if op.kind in LAID_OUT:
            readers = {made[reader] for edge in op.outputs for reader in graph.consumers[edge]}
            if len(readers) == 1:
                made[op.index] = readers.pop()
    return made


def _part(graph: Graph, op: Op) -> str | None:
    """Whether an operation goes with the cached keys or with the cached values; None: with neither."""
    if op.kind == "cache":
        return str(op.attrs["part"])
    return {"scores": "k", "softmax": "k", "mix": "v"}.get(op.kind)


def place_tensors(graph: Graph, ops: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The devices that have each tensor: those of the operations that read it, the first one first."""
    made: dict[str, tuple[str, ...]] = dict.fromkeys(graph.weights, ())
    for op in graph.ops:
        for name in op.weights:
            if ops[op.index] not in made[name]:
                made[name] = (*made[name], ops[op.index])
    return made


def place_caches(graph: Graph, ops: Sequence[str]) -> Mapping[tuple[int, str], str]:
    """(block, "k" or "v") -> the device that keeps them."""
    caches = (op for op in graph.ops if op.kind == "cache")
    return {(op.layer or 0, str(op.attrs["part"])): ops[op.index] for op in caches}
