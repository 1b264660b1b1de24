"""The NumPy engine: one short function an op, float32 throughout. It is what each op means.

An op's function takes the engine, the step's batch, the op and its input values; a value with a `query` or `key`
axis is a list with one array a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from starscope.cache import ArrayCache, Cache
from starscope.engine.base import (
    MASKED,
    Array,
    Batch,
    Sequences,
    StepEdits,
    Wanted,
    input_values,
    make_batch,
    whole_batch,
)
from starscope.engine.edited import forward_edited
from starscope.engine.passes import attention_of, tail_of
from starscope.engine.weights import Weights
from starscope.graph import Graph, Op
from starscope.machine import usable_cores
from starscope.ops import OPS
from starscope.rope import inverse_frequencies, rotation

Kernel = Callable[["NumpyEngine", Batch, Op, list[Any]], Any]


def embed(engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> Array:
    return engine.weights.rows(op.weights[0], inputs[0])


def add(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    total: Array = inputs[0] + inputs[1]
    return total


def layer_norm(engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> Array:
    x = inputs[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(variance + np.float32(op.attrs["epsilon"]))
    return _affine(engine, op, normed)


def rms_norm(engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> Array:
    x = inputs[0]
    normed = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(op.attrs["epsilon"]))
    return _affine(engine, op, normed)


def _affine(engine: NumpyEngine, op: Op, x: Array) -> Array:
    x = x * engine.weights[op.weights[0]]
    return x + engine.weights[op.weights[1]] if len(op.weights) > 1 else x


def linear(engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> Array:
    y: Array = inputs[0] @ engine.weights[op.weights[0]].T
    return y + engine.weights[op.weights[1]] if len(op.weights) > 1 else y


def split_heads(_engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> list[Array] | Array:
    x = inputs[0].reshape(len(inputs[0]), -1, op.attrs["head_dim"])  # [rows sum(heads) head_dim]
    parts = np.split(x, np.cumsum(op.attrs["heads"])[:-1], axis=1)
    return parts if len(parts) > 1 else parts[0]


def rope(engine: NumpyEngine, _batch: Batch, op: Op, inputs: list[Any]) -> Array:
    x, positions = inputs
    factors = engine.weights[op.weights[0]] if op.weights else None
    frequencies = inverse_frequencies(x.shape[-1], op.attrs["base"], op.attrs["scale"], factors)
    cos, sin = (one[:, None] for one in rotation(positions, frequencies))  # [rows 1 dim/2]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def cache(_engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> list[Array]:
    assert op.layer is not None
    rows = np.split(inputs[0], batch.starts[1:-1])
    return [kept.append(op.layer, op.attrs["part"], new) for kept, new in zip(batch.caches, rows, strict=True)]


def scores(_engine: NumpyEngine, batch: Batch, op: Op, inputs: list[Any]) -> list[Array]:
    made = []
    for q, k, past in zip(np.split(inputs[0], batch.starts[1:-1]), inputs[1], batch.pasts, strict=True):
        query, heads, dim = q.shape
        kv_heads, key, _ = k.shape
        # Every query head of a key head at once: K is read one time.
        rows = q.transpose(1, 0, 2).reshape(kv_heads, -1, dim)
        s = (rows @ k.transpose(0, 2, 1)).reshape(heads, query, key) * np.float32(op.attrs["scale"])
        made.append(np.where(unseen(past, query, key, op.attrs["window"]), np.float32(MASKED), s))
    return made


def unseen(past: int, query: int, key: int, window: int | None) -> Array:
    """Where a key is behind its query, or too far before it for a window: bool `[query key]`."""
    keys, queries = np.arange(key), past + np.arange(query)[:, None]
    future: Array = keys > queries
    return future if window is None else future | (keys <= queries - window)


def softmax(_engine: NumpyEngine, batch: Batch, _op: Op, inputs: list[Any]) -> list[Array]:
    made = []
    for x, past in zip(inputs[0], batch.pasts, strict=False):
        highest = x.max(axis=-1, keepdims=True)
        e = np.exp(x - highest)
        hide_behind(e, highest, past)
        made.append(e / e.sum(axis=-1, keepdims=True))
    return made


def hide_behind(weights: Array, highest: Array, past: int) -> None:
    """Where a query's scores are all masked, its weights `[heads query key]` are of the keys up to it: what comes
    behind it, and with it how a text is cut, makes no difference.
    """
    blind = highest <= MASKED
    if blind.any():
        _, query, key = weights.shape
        weights[blind & unseen(past, query, key, None)] = 0


def mix(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    made = []
    for p, v in zip(inputs[0], inputs[1], strict=True):
        heads, query, key = p.shape
        kv_heads, _, dim = v.shape
        o = (p.reshape(kv_heads, -1, key) @ v).reshape(heads, query, dim)
        if key > 1 and not np.isfinite(o.sum()):
            _mix_again(p, v, o)
        made.append(o.transpose(1, 0, 2))
    return np.concatenate(made)  # [rows num_heads head_dim]


def _mix_again(p: Array, v: Array, o: Array) -> None:
    """Rows of the result that are not finite, from what they see alone: 0 times a later infinity or NaN is not 0."""
    heads, query, key = p.shape
    for i in np.flatnonzero(~np.isfinite(o).all(axis=(0, 2))).tolist():
        seen = key - query + i + 1
        if not p[:, i, seen:].any():  # as long as nobody has written probabilities there
            first = int(p[:, i].any(axis=0).argmax())  # behind what a window leaves out
            rows = p[:, i, first:seen].reshape(len(v), -1, seen - first)
            o[:, i] = (rows @ v[:, first:seen]).reshape(heads, -1)


def merge_heads(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    merged: Array = inputs[0].reshape(len(inputs[0]), -1)
    return merged


def gelu(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    x = inputs[0]
    y: Array = x * np.float32(0.5) * (1 + erf(x * np.float32(math.sqrt(0.5))))
    return y


def gelu_tanh(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    x = inputs[0]
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    y: Array = x * np.float32(0.5) * (1 + np.tanh(inner))
    return y


def silu(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    x = inputs[0]
    y: Array = x / (1 + np.exp(-x))
    return y


def multiply(_engine: NumpyEngine, _batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    product: Array = inputs[0] * inputs[1]
    return product


def wanted_rows(_engine: NumpyEngine, batch: Batch, _op: Op, inputs: list[Any]) -> Array:
    rows: Array = inputs[0][batch.wanted]
    return rows


KERNELS: dict[str, Kernel] = {name: globals()[name] for name in OPS}

# erf at multiples of 1/64 up to 6, past which it is 1 in float32.
_ERF_STEP, _ERF_END = 1 / 64, 6.0
_ERF_GRID = np.arange(0, _ERF_END + _ERF_STEP, _ERF_STEP)
_ERF_VALUES = np.array([math.erf(x) for x in _ERF_GRID])
_ERF_SLOPES = 2 / math.sqrt(math.pi) * np.exp(-(_ERF_GRID**2))


def erf(x: Array) -> Array:
    """The error function in x's dtype, to 1e-11: a Taylor polynomial of degree 4 around the nearest grid point."""
    a = np.minimum(np.abs(x, dtype=np.float64), _ERF_END)
    index = np.rint(np.nan_to_num(a) / _ERF_STEP).astype(np.int64)
    g = _ERF_GRID[index]
    t = a - g
    series = t * (1 + t * (-g + t * ((2 * g * g - 1) / 3 + t * (g / 2 - g * g * g / 3))))
    result: Array = np.copysign(_ERF_VALUES[index] + _ERF_SLOPES[index] * series, x).astype(x.dtype)
    return result


class NumpyEngine:
    """Runs a graph with NumPy alone. Implements `Engine`."""

    name = "numpy"
    runs_ahead = False
    edits = None
    kernels: Mapping[str, Kernel] = KERNELS  # by the kind of op

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        *,
        device: str = "cpu",
        context_length: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.graph, self.weights, self.device = graph, weights, device
        self.context_length = context_length or graph.hp.context_length
        self.threads = threads or usable_cores()
        if threads is not None:
            import threadpoolctl

            threadpoolctl.threadpool_limits(threads, user_api="blas")

    def new_cache(self) -> Cache:
        half = self.weights.half_cache
        return ArrayCache(
            num_layers=self.graph.hp.num_layers,
            context_length=self.context_length,
            allocate=lambda shape: np.empty(shape, np.float32),
            as_cached=(lambda rows: rows.astype(np.float16)) if half else (lambda rows: rows),
        )

    def prepare(self) -> None:
        for name in self.weights:
            if not self.weights.slots[name].always_f32:
                self.weights[name]

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
        values, start = input_values(self.graph, batch)
        self.run(batch, values, start, len(self.graph.ops))
        batch.advance()
        return batch.split_wanted(values[self.graph.names["logits"]])

    def begin(self, sequences: Sequences, caches: Sequence[Cache] | None = None, wanted: Wanted = "last") -> NumpyPass:
        """A step that can stop between operations; `forward` otherwise."""
        return NumpyPass(self, make_batch(self, sequences, caches, wanted))

    def run_tail(self, edge: int, rows: Array) -> Array:
        """The logits `[n vocab_size]` that follow from rows `[n hidden_size]` of a value near the end of the graph."""
        values: dict[int, Any] = {edge: rows}
        self.run(whole_batch(len(rows)), values, tail_of(self.graph, edge), len(self.graph.ops))
        logits: Array = values[self.graph.names["logits"]]
        return logits

    def run(self, batch: Batch, values: dict[int, Any], start: int, stop: int, keep: Collection[int] = ()) -> None:
        """Run ops `start` to `stop` over `values` (edge -> value); an edge in `keep` outlives its last use."""
        graph = self.graph
        logits = graph.names["logits"]
        for op in graph.ops[start:stop]:
            # Weights that are not finite give logits that are not; whoever samples refuses those.
            with np.errstate(over="ignore", invalid="ignore"):
                made = self.kernels[op.kind](self, batch, op, [values[i] for i in op.inputs])
            if len(op.outputs) == 1:
                values[op.outputs[0]] = made
            else:
                values.update(zip(op.outputs, made, strict=True))
            for i in set(op.inputs):
                if graph.last_use(i) == op.index and i not in keep and i != logits:
                    del values[i]


class NumpyPass:
    """A step of the NumPy engine, one operation after another. Implements `Pass`."""

    is_torch = False

    def __init__(self, engine: NumpyEngine, batch: Batch) -> None:
        self.graph, self.batch = engine.graph, batch
        self._engine = engine
        self._values, self.done = input_values(engine.graph, batch)
        self._kept: set[int] = set()

    def run(self, stop: int) -> None:
        self._engine.run(self.batch, self._values, self.done, stop, self._kept)
        self.done = stop

    def read(self, edge: int) -> Any:
        value: Any = self._values[edge]
        return [one.copy() for one in value] if isinstance(value, list) else value.copy()

    def write(self, edge: int, value: Any) -> None:
        cached = attention_of(self.graph, edge)
        if cached is not None:
            pairs = zip(self.batch.caches, value, strict=True)
            value = [cache.replace(*cached, rows) for cache, rows in pairs]
        self._values[edge] = value

    def keep(self, edges: Collection[int]) -> None:
        self._kept.update(edges)

    def skip(self, stop: int, values: Mapping[int, Any]) -> None:
        self._values.update(values)
        self.done = stop

    def finish(self) -> Any:
        self.batch.advance()
        return self._values[self.graph.names["logits"]]
