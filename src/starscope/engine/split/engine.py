"""The split engine: each operation where a plan has it, by an engine of that device.

    engine = SplitEngine(plan, weights, host="native")
    engine.forward([ids], [engine.new_cache()])

On the host runs the native, torch or NumPy engine, on any other device torch's; each has its own operations' weights
and its own halves of the caches. A prompt runs `plan.batch` tokens at a time. A step goes through the plan's segments,
and what moves between devices moves once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from starscope.cache import Cache
from starscope.engine.base import (
    Array,
    Batch,
    Engine,
    Sequences,
    StepEdits,
    Wanted,
    input_values,
    make_batch,
    whole_batch,
)
from starscope.engine.edited import forward_edited
from starscope.engine.numpy_engine import NumpyEngine
from starscope.engine.passes import tail_of
from starscope.engine.split.caches import SplitCache
from starscope.engine.split.compiler import NativePart
from starscope.engine.split.passes import SplitPass
from starscope.engine.split.steps import NativeStep, Step, as_array, make_step
from starscope.engine.split.weights import PartWeights
from starscope.engine.weights import Weights
from starscope.placement import HOST, Plan, Segment, make_schedule

ATTENTION = f"{HOST}, attention"
"""The place of the host's keys, scores and softmax where values are elsewhere: the native engine has no half of it."""
ATTENDS = frozenset({"cache", "scores", "softmax", "mix", "merge_heads", "split_heads", "rope"})


class SplitEngine:
    """Runs a graph on several devices. Implements `Engine`. `device` is where most of it runs, `plan` says all.

    `host`: the engine of the host, native, torch or numpy. `stand_ins` gives the device that a planned one is in truth,
    by its name: for tests, without a GPU.
    """

    name = "split"
    runs_ahead = False
    edits = None

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        *,
        host: str = "native",
        threads: int | None = None,
        stand_ins: Mapping[str, str] | None = None,
    ) -> None:
        self.plan, self.graph, self.weights = plan, plan.graph, weights
        self.context_length = plan.context_length
        self.places = self._places(host)
        self.device = plan.main if plan.rungs.blocks else HOST
        self._running = threading.Lock()  # the native part has one place for the values of a step
        self._schedules: dict[int, list[Segment]] = {}
        counts = Counter(segment.place for segment in self.schedule(0))
        self._whole = {place for place, count in counts.items() if count == 1}
        self.parts: dict[str, Engine] = {}
        for place in dict.fromkeys(self.places):
            device = (stand_ins or {}).get(place, HOST if place == ATTENTION else place)
            self.parts[place] = self._make_part(place, device, host, threads)
        self.threads = max(part.threads for part in self.parts.values())

    def _places(self, host: str) -> list[str]:
        """The place of each operation: its device, or one of two engines of the host."""
        divided = {layer for (layer, _), device in self.plan.caches.items() if device != self.plan.caches[layer, "v"]}
        return [
            ATTENTION if host == "native" and place == HOST and op.layer in divided and op.kind in ATTENDS else place
            for op, place in zip(self.graph.ops, self.plan.ops, strict=True)
        ]

    def _make_part(self, place: str, device: str, host: str, threads: int | None) -> Engine:
        own = [op for op in self.graph.ops if self.places[op.index] == place]
        weights = PartWeights(self.weights, {name for op in own for name in op.weights})
        limit = self.context_length
        if place == HOST and host == "native":
            runs = [(segment.place == HOST, segment.ops) for segment in self.schedule(0)]
            return NativePart(self.graph, weights, runs=runs, context_length=limit, threads=threads)
        if place == HOST and host == "numpy":
            return NumpyEngine(self.graph, weights, context_length=limit, threads=threads)
        from starscope.engine.split.torch_step import make_torch_part

        part = make_torch_part(
            self.graph, weights, [op.index for op in own], device, like=place, context_length=limit, threads=threads
        )
        if place not in (HOST, ATTENTION) and not self.plan.rungs.low_vram:
            part.reserve(self.plan.bytes[place].scratch)
        return part

    @property
    def notes(self) -> list[str]:
        """What the parts have to say, each thing once."""
        return list(dict.fromkeys(note for part in self.parts.values() for note in getattr(part, "notes", ())))

    def new_cache(self) -> SplitCache:
        """Each place takes memory for its halves once they are written to."""
        return SplitCache(self.context_length, {place: part.new_cache() for place, part in self.parts.items()})

    def prepare(self) -> None:
        for part in self.parts.values():
            part.prepare()

    def schedule(self, begin: int) -> list[Segment]:
        """What runs where from an operation on."""
        if begin not in self._schedules:
            self._schedules[begin] = make_schedule(self.graph, self.places, begin)
        return self._schedules[begin]

    def forward(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        edits: StepEdits | None = None,
    ) -> list[Array]:
        if edits is not None:
            return forward_edited(self, sequences, caches, wanted, edits)
        batch = make_batch(self, sequences, caches, wanted)
        with self._running:
            made = [as_array(self.run(piece)) for piece in _pieces(batch, self.plan.batch)]
        batch.advance()
        return batch.split_wanted(made[0] if len(made) == 1 else np.concatenate(made))

    def run(self, batch: Batch) -> Any:
        """The logits of a piece of a step, `[wanted vocab_size]`, in the form of whoever makes them."""
        known, begin = input_values(self.graph, batch)
        steps = self.steps(batch, known)
        if begin:  # embeddings stand for what the first operation gives
            first = self.graph.ops[0].outputs[0]
            steps[self.places[0]].put(first, known[first])
        return self._go(steps, self.schedule(begin))

    def steps(self, batch: Batch, known: Mapping[int, Array]) -> dict[str, Step]:
        """A step at each place."""
        return {
            place: make_step(part, self.part_of(batch, place), known, whole=place in self._whole)
            for place, part in self.parts.items()
        }

    def part_of(self, batch: Batch, place: str) -> Batch:
        """A batch as a place sees it, with its own caches."""
        pairs = zip(batch.caches, batch.pasts, strict=True)
        return replace(batch, caches=[cache.at(place, past) for cache, past in pairs])

    def _go(self, steps: Mapping[str, Step], segments: Sequence[Segment]) -> Any:
        with self._without_gradients():
            for segment in segments:
                step = steps[segment.place]
                for edge, home in segment.enter:
                    step.put(edge, steps[home].take(edge))
                step.run(segment)
                for place, edge in segment.drop:
                    steps[place].drop(edge)
            return steps[self.places[-1]].take(self.graph.names["logits"])

    def _without_gradients(self) -> Any:
        """The inference mode of torch, which runs a part wherever there is more than one."""
        import torch

        return torch.inference_mode()

    def begin(self, sequences: Sequences, caches: Sequence[Cache] | None = None, wanted: Wanted = "last") -> SplitPass:
        """A step that can stop between operations; `forward` otherwise."""
        return SplitPass(self, make_batch(self, sequences, caches, wanted))

    def run_tail(self, edge: int, rows: Any) -> Array:
        """The logits `[n vocab_size]` that follow from rows `[n hidden_size]` of a value near the end of the graph."""
        rows = as_array(rows).astype(np.float32)
        begin, made = tail_of(self.graph, edge), [np.empty((0, int(self.graph.hp.vocab_size)), np.float32)]
        home = self.places[self.graph.producers[edge] or 0]
        for start in range(0, len(rows), self.plan.batch):
            part = rows[start : start + self.plan.batch]
            batch = whole_batch(len(part))
            with self._running:
                steps: dict[str, Step] = {
                    place: NativeStep(engine, batch, {}, is_split=True)
                    if isinstance(engine, NativePart)
                    else make_step(engine, batch, {})
                    for place, engine in self.parts.items()
                }
                steps[home].put(edge, part)
                made.append(as_array(self._go(steps, self.schedule(begin))))
        return np.concatenate(made)


def _pieces(batch: Batch, at_once: int) -> Iterator[Batch]:
    """A batch, so many rows at a time; what is wanted of each comes with it."""
    rows = len(batch.positions)
    if rows <= at_once:
        yield batch
        return
    for start in range(0, rows, at_once):
        stop = min(start + at_once, rows)
        parts = []
        for first, length, past, cache in zip(batch.starts, batch.lengths, batch.pasts, batch.caches, strict=False):
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                parts.append((high - low, past + low - first, cache))
        chosen = batch.wanted[(batch.wanted >= start) & (batch.wanted < stop)] - start
        yield Batch(
            ids=None if batch.ids is None else batch.ids[start:stop],
            embeddings=None if batch.embeddings is None else batch.embeddings[start:stop],
            positions=batch.positions[start:stop],
            lengths=[length for length, _, _ in parts],
            pasts=[past for _, past, _ in parts],
            caches=[cache for _, _, cache in parts],
            wanted=chosen,
            wanted_lengths=[len(chosen)],
        )
