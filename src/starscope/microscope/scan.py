"""`model.scan(prompt)`: a trace in which nothing runs, for trying out what a body reads and writes.

Values have the shapes and types that they would have and no numbers: torch tensors on the device "meta", or NumPy
arrays all of whose entries are one. What a trace would refuse, a scan refuses: values out of order, other shapes. A
generation has as many steps as it was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from starscope.cache import Cache
from starscope.engine.base import Batch
from starscope.errors import ContextOverflowError
from starscope.graph import Graph
from starscope.microscope.forward import Forward, Served, check_shape
from starscope.microscope.tensors import Watch, as_value, has_torch
from starscope.microscope.trace import Trace


def stand_in(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """A tensor of that shape that takes no memory."""
    if has_torch():
        import torch

        return as_value(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
    one = np.zeros(1, dtype)
    return as_value(np.lib.stride_tricks.as_strided(one, shape, (0,) * len(shape)))


def is_stand_in(value: Any) -> bool:
    """Whether a tensor is one of those, or made of them by torch."""
    if isinstance(value, np.ndarray):
        return value.size > 1 and not any(value.strides)
    return hasattr(value, "detach") and value.device.type == "meta"


class Scan(Trace):
    """A trace without a run."""

    def _check_memory(self) -> None:
        longest, limit = max(len(prompt) for prompt in self._prompts), self.engine.context_length
        if longest > limit:
            raise ContextOverflowError(f"{longest} tokens do not fit: the context is {limit} tokens.")

    def _begin(self) -> Forward:
        sequences = self._inputs.take()
        if self.step == 0:
            self._prompts = sequences
        caches = self._caches or [Cache(self.engine.context_length) for _ in sequences]
        batch = Batch(
            ids=None,
            embeddings=None,
            positions=np.arange(0),
            lengths=[len(one) for one in sequences],
            pasts=[cache.length for cache in caches],
            caches=list(caches),
            wanted=np.arange(len(sequences)),
            wanted_lengths=[1] * len(sequences),
        )
        done = 1 if self._inputs.is_embedded else 0
        return _Shapes(
            lambda: _NoPass(self.edges.graph, batch, done), self.edges, stand_in, grad=False, holes=self._holes
        )

    def _finish_step(self) -> None:
        if self._step_ended:
            return
        forward = self._running()
        forward.finish()
        self._step_ended = True
        self._check_inputs()
        self._caches = forward.caches
        self._holes |= forward.skipped
        if self.plan.max_new_tokens is not None:
            for tokens in self._tokens:
                tokens.append(self._pad)

    def _complete(self) -> None:
        self._finish_step()
        while self.plan.max_new_tokens is not None and self._next_step():
            self._finish_step()
        self._state = "done"


class _NoPass:
    """A step of which nothing runs. Implements `Pass`."""

    is_torch = False

    def __init__(self, graph: Graph, batch: Batch, done: int) -> None:
        self.graph, self.batch, self.done = graph, batch, done

    def run(self, stop: int) -> None:
        self.done = stop

    def read(self, edge: int) -> Any:
        """Nobody reads from it."""

    def write(self, edge: int, value: Any) -> None:
        """There is no place for it."""

    def keep(self, edges: Collection[int]) -> None:
        """Everything is kept."""

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        self.done = stop

    def finish(self) -> None:
        for cache, length in zip(self.batch.caches, self.batch.lengths, strict=True):
            cache.advance(None, length)


class _Shapes(Forward):
    """A forward pass of shapes."""

    @staticmethod
    def _watch(value: Any) -> Watch:
        # All entries of a NumPy array are one here: whether it was changed says nothing.
        return Watch(np.empty(0) if isinstance(value, np.ndarray) else value)

    def all_logits(self) -> Any:
        served = self._served.get(self.edges.logits)
        return stand_in(self._shape(self.edges.logits)) if served is None else served.value

    def _serve(self, edge: int) -> Served:
        facts = self.edges.facts[edge]
        self._check_readable(edge)
        self._advance(facts.made)
        is_index = edge in self.edges.graph.inputs.values()
        value = stand_in(self._shape(edge), "int64" if is_index else "float32")
        served = Served(edge, facts, value, self._watch(value), used=facts.first_use < self._done)
        self._hand_out(served)
        return served

    def _for_engine(self, value: Any, facts: Any) -> Any:
        return None

    def _copy_of(self, given: Any, name: str, shape: tuple[int, ...]) -> Any:
        is_float = given.is_floating_point() if hasattr(given, "detach") else np.asarray(given).dtype.kind == "f"
        check_shape(name, shape, tuple(np.shape(given)), is_float)
        return stand_in(shape)

    def _see_head(self) -> None:
        self._sync(self.edges.gather + 1)
