"""Keys and values that never move, and decoding steps that are recorded once over them.

A step of one token a sequence launches some hundreds of small kernels, and launching takes longer than running. CUDA
can record them as a graph and start all at once, if addresses and shapes stay the same. So a sequence's keys and values
have all of the context from the start; the new row goes where a tensor on the device says; attention reads a window of
fixed size, longer than the text, and hides what is behind the new row:

    recorder.run(batch, values, 0, len(graph.ops))     # as `engine.run`, for batches that `fits` takes

The first step of a window runs as it is, the second is captured, later ones are replayed. Where there is no CUDA they
all run as they are: the same arithmetic, which is how it is tested. A recorded step keeps no sequence alive.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from starscope.cache import Cache
from starscope.engine.base import Batch
from starscope.engine.torch_kernels import Group, Step

if TYPE_CHECKING:
    from starscope.engine.torch_engine import TorchEngine

FIRST_WINDOW = 256  # keys
RECORDED = 8
"""Steps that are kept: of the sequences that were decoded last."""
TOGETHER = 8
"""Sequences of one step at the most: each attends by itself, so that more make a graph long."""
_serials = itertools.count()


class StaticCache(Cache):
    """Keys and values of one sequence, `[num_kv_heads context_length dim]` for each half of each block.

    `make(shape)` gives a tensor of zeros in the type that they are kept in; they are read in `dtype`. A half is made
    when it is first written, with all of its positions.
    """

    def __init__(
        self, *, num_layers: int, context_length: int, make: Callable[[tuple[int, ...]], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(context_length)
        self.serial = next(_serials)
        self._make, self._dtype = make, dtype
        self._stored: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]

    def append(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.append`."""
        kept, end = self._half(layer, part, rows), self.length + len(rows)
        kept[:, self.length : end] = rows.transpose(0, 1)
        return kept[:, :end].to(self._dtype)

    def append_at(self, layer: int, part: str, row: Tensor, position: Tensor, window: int) -> Tensor:
        """Keep one row `[1 num_kv_heads dim]` at a position that only the device knows, int64 `[1]`; returns the first
        `window` positions, whatever is there.
        """
        kept = self._half(layer, part, row)
        kept.index_copy_(1, position, row.transpose(0, 1).to(kept.dtype))
        return kept[:, :window].to(self._dtype)

    def replace(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """As `ArrayCache.replace`."""
        kept = self._stored[layer][part][:, : rows.shape[1]]
        kept[:] = rows
        return kept.to(self._dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all that it keeps."""
        return sum(half.nbytes for layer in self._stored for half in layer.values())

    def _half(self, layer: int, part: str, rows: Tensor) -> Tensor:
        kept = self._stored[layer].get(part)
        if kept is None:
            with torch.inference_mode(mode=False):  # so that it can be written in any mode
                kept = self._make((rows.shape[1], self.context_length, rows.shape[2]))
            self._stored[layer][part] = kept
        return kept


class _Window:
    """The history of one sequence as a recorded step has it: without holding on to it."""

    def __init__(self, cache: StaticCache, position: Tensor, window: int) -> None:
        self._cache, self._position, self._window = weakref.ref(cache), position, window

    @property
    def is_gone(self) -> bool:
        return self._cache() is None

    def append(self, layer: int, part: str, rows: Tensor) -> Tensor:
        cache = self._cache()
        assert cache is not None, "whoever runs the step has the cache"
        return cache.append_at(layer, part, rows, self._position, self._window)

    def replace(self, layer: int, part: str, rows: Tensor) -> Tensor:
        raise AssertionError("nothing is replaced in a recorded step")


class _Recorded:
    """One step, its inputs at fixed addresses. `ran` times it has run."""

    def __init__(self, engine: TorchEngine, caches: list[StaticCache], window: int, inputs: dict[int, Tensor]) -> None:
        self.window, self.ran = window, 0
        self._engine = engine
        self._inputs = {edge: value.clone() for edge, value in inputs.items()}
        self._positions = torch.zeros(len(caches), dtype=torch.int64, device=engine.device)
        places = [self._positions[i : i + 1] for i in range(len(caches))]
        self._windows = [_Window(cache, place, window) for cache, place in zip(caches, places, strict=True)]
        groups = [Group(1, 1, 0, history, place) for history, place in zip(self._windows, places, strict=True)]
        self._step = Step(groups, None)
        self._graph: Any = None
        self._outputs: dict[int, Tensor] = {}

    @property
    def is_over(self) -> bool:
        """Whether a sequence is gone: the step cannot run any more."""
        return any(one.is_gone for one in self._windows)

    def run(
        self, positions: Tensor, values: dict[int, Any], start: int, stop: int, keep: Collection[int]
    ) -> dict[int, Tensor]:
        self._positions.copy_(positions)
        for edge, value in self._inputs.items():
            value.copy_(values[edge])
        if self._graph is not None:
            self._graph.replay()
        elif self.ran == 1 and self._positions.device.type == "cuda":
            self._capture(start, stop, keep)
        else:
            self._outputs = self._run(start, stop, keep)
        self.ran += 1
        return self._outputs

    def _capture(self, start: int, stop: int, keep: Collection[int]) -> None:
        """Record the step and run it; where that fails, run it as it is, and say so."""
        recording, device = torch.cuda.CUDAGraph(), self._positions.device
        try:
            # The stream that torch would take is one of the first device's; other threads may go on meanwhile.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with (
                torch.cuda.device(device),
                torch.cuda.graph(recording, stream=stream, capture_error_mode="thread_local"),
            ):
                self._outputs = self._run(start, stop, keep)
            recording.replay()
            self._graph = recording
        except RuntimeError as error:
            note = f"decoding steps run without CUDA graphs, which is slower: {str(error).splitlines()[0]}"
            if note not in self._engine.notes:  # every sequence tries again
                self._engine.notes.append(note)
            self._outputs = self._run(start, stop, keep)

    def _run(self, start: int, stop: int, keep: Collection[int]) -> dict[int, Tensor]:
        values: dict[int, Any] = dict(self._inputs)
        self._engine.run(self._step, values, start, stop, keep)
        return {edge: value for edge, value in values.items() if edge not in self._inputs}


class Recorder:
    """The recorded steps of one engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._steps: OrderedDict[object, _Recorded] = OrderedDict()

    def fits(self, batch: Batch) -> bool:
        """Whether a batch is a decoding step of few sequences: one row each, behind others."""
        return (
            len(batch.lengths) <= TOGETHER
            and all(length == 1 and past > 0 for length, past in zip(batch.lengths, batch.pasts, strict=True))
            and all(isinstance(cache, StaticCache) for cache in batch.caches)
        )

    def run(self, batch: Batch, values: dict[int, Any], start: int, stop: int, keep: Collection[int] = ()) -> None:
        """As `TorchEngine.run` for a batch that fits; every row is wanted. What it makes holds until the next step."""
        if any(isinstance(value, list) for value in values.values()):  # histories from elsewhere, of any length
            self._engine.run(self._engine.step(batch), values, start, stop, keep)
            return
        needed = max(batch.pasts) + 1
        limit = min(cache.context_length for cache in batch.caches)
        window = min(limit, max(FIRST_WINDOW, 1 << (needed - 1).bit_length()))
        key = (tuple(cache.serial for cache in batch.caches), start, stop, tuple(sorted(keep)), tuple(sorted(values)))
        one = self._steps.pop(key, None)
        if one is None or one.window != window:
            one = _Recorded(self._engine, batch.caches, window, values)
            self._steps = OrderedDict((of, step) for of, step in self._steps.items() if not step.is_over)
        self._steps[key] = one
        while len(self._steps) > RECORDED:
            self._steps.popitem(last=False)
        positions = torch.from_numpy(np.asarray(batch.pasts, np.int64))
        values.update(one.run(positions, values, start, stop, keep))
