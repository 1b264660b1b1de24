"""The native engine: the graph compiled to a program of the C++ module, which runs a whole step in one call.

Weights are kept as they are stored (formats that the module does not compute on: as float32), laid out in panels while
they are read. Rows of activations are rounded to int8 in blocks of 32 for quantized weights (`formats.round_activation`
is the rounding); float weights are multiplied in float32. A row's logits depend on its tokens and positions alone, bit
for bit: not on the batch, on how a prompt is cut, or on the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

from starscope import native
from starscope.cache import Cache
from starscope.engine.base import (
    Array,
    Batch,
    EditRows,
    Sequences,
    StepEdits,
    Wanted,
    input_values,
    make_batch,
    whole_batch,
)
from starscope.engine.native_pass import KeepPlan, NativePass, plan_to_keep
from starscope.engine.native_program import Compiler
from starscope.engine.native_slots import Compiled
from starscope.engine.passes import tail_of
from starscope.engine.weights import Weights
from starscope.errors import DoesNotFitError, UnsupportedError
from starscope.formats import Bytes, Format, decode, find_format
from starscope.graph import Graph
from starscope.machine import bytes_text, free_memory, usable_cores

LISTS_KEPT = 4  # of those with edits
ROWS_AT_ONCE = 512  # of a step; what is between the operations takes memory for so many
PANEL_ROWS = 16  # that the module keeps together
READ_BYTES = 1 << 20  # of a file, by each thread at a time


class Reader:
    """Reads matrices into a program, pieces of any of them on several threads. The first error is raised at its end."""

    def __init__(self, weights: Weights, program: Any, threads: int) -> None:
        self._weights, self._program = weights, program
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()
        self._pieces: list[Future[None]] = []

    def fill(self, matrix: int, name: str, stored: Format, *, decoded: bool) -> None:
        """Begin to read a matrix. `decoded`: the program keeps it as float32."""
        rows, cols = self._weights.slots[name].shape
        step = max(PANEL_ROWS, READ_BYTES // stored.row_bytes(cols) // PANEL_ROWS * PANEL_ROWS)

        def read(start: int) -> None:
            stop = min(start + step, rows)
            raw = self._weights.read_stored(name, start, stop, self._buffer((stop - start) * stored.row_bytes(cols)))
            if decoded:
                raw = decode(stored, raw, threads=1).view(np.uint8)
            self._program.fill(matrix, start, np.ascontiguousarray(raw))

        self._pieces += [self._pool.submit(read, start) for start in range(0, rows, step)]

    def _buffer(self, size: int) -> Bytes:
        """Room for a piece, this thread's own: taking new memory for each would cost as much as filling it."""
        if getattr(self._local, "room", None) is None or len(self._local.room) < size:
            self._local.room = np.empty(max(size, READ_BYTES), np.uint8)
        room: Bytes = self._local.room
        return room

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for piece in self._pieces:
                if error is None:
                    piece.result()
        finally:
            self._pool.shutdown(cancel_futures=True)


class Listed:
    """A compiled list of instructions, in the module and as the compiler made it. `edited`: edges in the order of their
    numbers.
    """

    def __init__(self, program: Any, compiled: Compiled, edited: Sequence[int] = ()) -> None:
        self.compiled, self.edited = compiled, edited
        self.code = program.compile(compiled.instructions, compiled.widths, compiled.arrays)


def in_order(change: EditRows) -> EditRows:
    """A change with its arrays as the module takes them."""
    return change._replace(
        rows=np.ascontiguousarray(change.rows, np.int64), values=np.ascontiguousarray(change.values, np.float32)
    )


class NativeCache(Cache):
    """Keys and values of one sequence in the module's memory."""

    def __init__(self, context_length: int, stored: Any) -> None:
        super().__init__(context_length)
        self.stored = stored


class NativeEngine:
    """Runs a graph with the compiled module. Implements `Engine`. `isa` is the instruction set in use."""

    name = "native"
    runs_ahead = True
    edits = None
    compiler: Callable[..., Compiler] = Compiler  # an engine that has a part of the operations has its own

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        *,
        device: str = "cpu",
        context_length: int | None = None,
        threads: int | None = None,
    ) -> None:
        module = native.kernels()
        if module is None:
            raise UnsupportedError(
                f"the native engine is not in this installation: {native.why_missing()}.",
                hint="Install a C++ compiler and starscope again, or use the torch or numpy engine.",
            )
        self.graph, self.weights, self.device = graph, weights, device
        self.context_length = context_length or graph.hp.context_length
        self.threads = threads or usable_cores()
        self.isa = str(module.isa())
        self._module = module
        self._process, self._running = os.getpid(), threading.Lock()  # a program runs one step at a time
        self._computes = set(module.computes())
        self._check_memory()
        self._vectors: dict[str, int] = {}
        self._matrices: dict[str, int] = {}
        try:
            self._program = module.Program(self.threads, self.isa)
            with Reader(weights, self._program, self.threads) as self._reader:
                compiled = self.compiler(graph, module, self._matrix, self._vector).compile()
        except MemoryError:
            raise DoesNotFitError("there is not enough memory for the weights.", hint="Use a smaller model.") from None
        self._plain, self._buffers = Listed(self._program, compiled), module.Buffers()
        self._split: Listed | None = None
        self._lists: dict[frozenset[int], Listed] = {}  # with edits, by the edges that they change
        self._plans: dict[frozenset[int], KeepPlan | None] = {}  # by the edges that a step keeps

    def new_cache(self) -> NativeCache:
        hp = self.graph.hp
        try:
            stored = self._module.KeyValues(
                self.weights.half_cache, hp.num_layers, hp.num_kv_heads, hp.head_dim, self.context_length
            )
        except MemoryError:
            raise DoesNotFitError(
                "there is not enough memory for keys and values.", hint="Lower the context."
            ) from None
        return NativeCache(self.context_length, stored)

    def prepare(self) -> None:
        """Nothing is left to do: the weights were read when the engine was made."""

    def forward(
        self,
        sequences: Sequences,
        caches: Sequence[Cache] | None = None,
        wanted: Wanted = "last",
        *,
        edits: StepEdits | None = None,
    ) -> list[Array]:
        batch = make_batch(self, sequences, caches, wanted)
        logits = np.empty((len(batch.wanted), self.graph.hp.vocab_size), np.float32)
        known, _ = input_values(self.graph, batch)
        rows = len(batch.positions)
        for start in range(0, rows, ROWS_AT_ONCE):
            self._run(batch, known, start, min(start + ROWS_AT_ONCE, rows), logits, edits)
        batch.advance()
        return batch.split_wanted(logits)

    def _run(
        self, batch: Batch, known: dict[int, Array], start: int, stop: int, logits: Array, edits: StepEdits | None
    ) -> None:
        """Rows start to stop of a batch. Their keys and values are kept; `logits` gets those that are wanted."""
        changes = {} if edits is None else edits.of_step(batch, start, stop)
        listed = self._plain if edits is None else self._edited(frozenset(edits.edges), any(changes.values()))
        pieces = []
        for first, length, past, cache in zip(batch.starts, batch.lengths, batch.pasts, batch.caches, strict=False):
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                pieces.append((low - start, high - low, past + low - first, cache.stored))
        is_all = stop - start == len(batch.positions)
        begin, end = (0, len(logits)) if is_all else np.searchsorted(batch.wanted, [start, stop]).tolist()
        arrays = []
        for one in self._plain.compiled.inputs:
            if one.edge in known:
                value = known[one.edge][start:stop]
            else:
                value = self.weights.rows(one.table, known[one.source][start:stop])
            arrays.append(np.ascontiguousarray(value, np.float32))
        wanted = np.ascontiguousarray(batch.wanted[begin:end] - start)
        arrays.append(logits[begin:end])
        ordered = [[in_order(change) for change in changes.get(edge, ())] for edge in listed.edited]
        last = len(listed.compiled.instructions)
        self.run_listed(listed, self._buffers, 0, last, stop - start, wanted, pieces, arrays, ordered)

    def begin(self, sequences: Sequences, caches: Sequence[Cache] | None = None, wanted: Wanted = "last") -> NativePass:
        """A step that can stop between operations; `forward` otherwise. Takes memory for all its rows at once."""
        batch = make_batch(self, sequences, caches, wanted)
        return NativePass(self, batch, *input_values(self.graph, batch))

    def run_tail(self, edge: int, rows: Array) -> Array:
        """The logits `[n vocab_size]` that follow from rows `[n hidden_size]` of a value near the end of the graph."""
        first = tail_of(self.graph, edge)
        logits = [np.empty((0, self.graph.hp.vocab_size), np.float32)]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            tail = NativePass(self, whole_batch(len(part)), {edge: part}, first)
            tail.run(len(self.graph.ops))
            logits.append(tail.logits)
        return np.concatenate(logits[1:] or logits)

    def split(self) -> Listed:
        """The list with nothing fused, for steps that stop."""
        if self._split is None:
            compiled = self.compiler(self.graph, self._module, self._matrix, self._vector, split=True).compile()
            self._split = Listed(self._program, compiled)
        return self._split

    def plan_to_keep(self, edges: frozenset[int]) -> KeepPlan | None:
        """How a step in one call keeps these edges; None where it cannot."""
        if edges not in self._plans:
            self._keep_list(self._plans, edges, plan_to_keep(self.graph, edges, self._keeping))
        return self._plans[edges]

    def _keeping(self, edges: frozenset[int]) -> Listed:
        """The list that makes these edges in the caller's arrays."""
        compiled = self.compiler(self.graph, self._module, self._matrix, self._vector, kept=edges).compile()
        return Listed(self._program, compiled)

    @staticmethod
    def _keep_list(lists: dict[frozenset[int], Any], edges: frozenset[int], made: Any) -> None:
        while len(lists) >= LISTS_KEPT:
            del lists[next(iter(lists))]
        lists[edges] = made

    def _edited(self, edges: frozenset[int], is_changed: bool) -> Listed:
        """The list that changes these edges; the plain one for a step without changes where that has the same bits."""
        if not is_changed and not any("query" in self.graph.edges[edge].axes for edge in edges):
            return self._plain
        if edges not in self._lists:
            ordered = sorted(edges)
            numbers = {edge: number for number, edge in enumerate(ordered)}
            compiled = self.compiler(self.graph, self._module, self._matrix, self._vector, edited=numbers).compile()
            self._keep_list(self._lists, edges, Listed(self._program, compiled, ordered))
        return self._lists[edges]

    @property
    def buffers(self) -> Any:
        """Room for the values of steps that do not stop."""
        return self._buffers

    def new_buffers(self) -> Any:
        """Room for one step's values, in the module."""
        return self._module.Buffers()

    def run_listed(
        self,
        listed: Listed,
        buffers: Any,
        first: int,
        last: int,
        rows: int,
        wanted: Array,
        pieces: Sequence[tuple[int, int, int, Any]],
        arrays: Sequence[Array],
        edits: Sequence[Sequence[EditRows]] = (),
    ) -> None:
        """Instructions first to last on `rows` rows; `pieces`: (first row, rows, past, cache) of each sequence."""
        if self._process != os.getpid():  # after a fork: the parent may have held the lock
            self._process, self._running = os.getpid(), threading.Lock()
        with self._running:
            try:
                self._program.run(listed.code, buffers, first, last, rows, wanted, pieces, arrays, list(edits))
            except MemoryError:
                raise DoesNotFitError(
                    f"there is not enough memory for a step of {rows} tokens.", hint="Free some memory."
                ) from None
            except OSError as error:
                raise DoesNotFitError(
                    f"{self.threads} threads cannot be started: {error}.", hint="Use fewer: -t, or threads=."
                ) from None

    def _vector(self, name: str, made: Callable[[Weights], Array] | None = None) -> int:
        """A bias or a norm's weight in the module, or what is made of weights under a name of its own: its number."""
        if name not in self._vectors:
            values = self.weights[name] if made is None else made(self.weights)
            self._vectors[name] = int(self._program.add_vector(np.ascontiguousarray(values, np.float32)))
            if made is None:
                self.weights.forget(name)
        return self._vectors[name]

    def _matrix(self, name: str) -> int:
        """A matrix in the module: its number. It is there once the reader has ended."""
        if name not in self._matrices:
            rows, cols = self.weights.slots[name].shape
            stored = find_format(self.weights.format_name(name))
            kept = stored if stored.type_id in self._computes else find_format("F32")
            self._matrices[name] = int(self._program.add_matrix(kept.type_id, rows, cols))
            self._reader.fill(self._matrices[name], name, stored, decoded=kept != stored)
        return self._matrices[name]

    def _check_memory(self) -> None:
        """DoesNotFitError when the weights cannot fit into the memory that is free."""
        needed = 0
        for name, slot in self.weights.slots.items():
            if len(slot.shape) == 2 and not slot.always_f32 and not self.weights.is_tied(name):
                stored = find_format(self.weights.format_name(name))
                kept = stored if stored.type_id in self._computes else find_format("F32")
                needed += kept.nbytes(slot.shape)
        free = free_memory()
        if needed > free:
            raise DoesNotFitError(
                f"the weights need {bytes_text(needed)} of memory; {bytes_text(free)} are free.",
                hint="Quantize the model to a smaller type, or free some memory.",
            )
