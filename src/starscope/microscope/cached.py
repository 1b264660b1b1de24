"""`run_with_cache`: one run, after which what was asked for is there, and nothing else was kept.

    logits, cache = model.run_with_cache(prompt, "layers.*.self_attn.attention_probabilities", rows=[-1])
    cache["layers.3.self_attn.attention_probabilities"]     # [batch num_heads 1 key]
    cache["blocks.3.attn.hook_pattern"]                     # the same tensor

What will be kept is known from the graph's sizes, so that too much of it is an error before anything runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.engine import Engine
from starscope.engine.base import Array, Batch
from starscope.engine.edited import change_rows
from starscope.engine.passes import Pass, read_rows
from starscope.errors import ContextOverflowError, DoesNotFitError, TraceError, UnsupportedError, UsageError
from starscope.machine import free_memory
from starscope.microscope.asked import Asked, choose
from starscope.microscope.names import Reading
from starscope.microscope.present import Form, Presentation
from starscope.microscope.storing import write_safetensors
from starscope.microscope.tensors import as_array, as_value
from starscope.values import VALUES

if TYPE_CHECKING:
    from starscope.microscope.scope import Scope

Positions = int | slice | Sequence[int] | None
ITEM = 4  # bytes of a float32

# The queries whose scores an engine has at once, of those that are read and of all.
SCORED: Mapping[str, Callable[[int, int], int]] = {
    "numpy": lambda _read, every: every,
    "native": lambda read, _every: max(read, 1),
    "torch": lambda read, _every: max(read, 1),
    "split": lambda _read, every: every,
}


class NotKeptError(TraceError, KeyError):
    """A value that was not asked for when the model ran."""

    code = "not_kept"


class ActivationCache(Mapping[str, Any]):
    """Values of one run by their names, each under all of its names; iterating gives the standard ones.

    Values are float32 (ids int64), in the layouts of the standard values: torch tensors where torch is installed, on
    the CPU. `rows` are the positions along `seq` or `query` that they have, None for all; `prompt_ids` what was run.
    """

    def __init__(
        self, kept: Mapping[Reading, Array], reading: Callable[[str], Reading], rows: Sequence[int] | None, ids: Any
    ) -> None:
        self._kept = {one.name: array for one, array in kept.items()}
        self._reading = reading
        self._values: dict[int, Any] = {}
        self.rows = None if rows is None else list(rows)
        self.prompt_ids: list[list[int]] | None = ids  # None for embeddings

    def __getitem__(self, name: str) -> Any:
        array = self.array(name)
        if id(array) not in self._values:
            self._values[id(array)] = as_value(array)
        return self._values[id(array)]

    def array(self, name: str) -> Array:
        """A value as a NumPy array, by any of its names."""
        return self._kept[self.standard_name(name)]

    def standard_name(self, name: str) -> str:
        """The name by which iterating gives a value that goes by this one too."""
        if name in self._kept:
            return name
        try:
            found = self._reading(name).name
        except TraceError as error:
            raise NotKeptError(error.message, hint=error.hint) from None
        if found not in self._kept:
            raise NotKeptError(
                f"{name} was not kept.", hint="Name it when the model runs: run_with_cache(prompt, names)."
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<ActivationCache of {len(self)} values, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """The bytes of all values; of those under two names, once."""
        return sum({id(array): array.nbytes for array in self._kept.values()}.values())

    def layout(self, name: str) -> tuple[str | None, tuple[str, ...]]:
        """The layout of a value and its axes: ("Residual", ("batch", "seq", "hidden_size"))."""
        self.array(name)
        return layout_of(self._reading(name))

    def to_numpy(self) -> dict[str, Array]:
        """Every value as a NumPy array, by its standard name; the same numbers, not copies."""
        return dict(self._kept)

    def save(self, path: str | os.PathLike[str], names: Iterable[str] | None = None, *, force: bool = False) -> int:
        """Write the values to a safetensors file, and their axes, rows and the prompt's ids into its metadata; returns
        its bytes. `names`: those to write, by any name that they have, which is theirs in the file too (None: all, by
        the standard ones). OutputExistsError for a path that exists, unless `force`.
        """
        chosen = list(self if names is None else dict.fromkeys(names))
        metadata = {
            "axes": json.dumps({name: self.layout(name)[1] for name in chosen}),
            "prompt_ids": json.dumps(self.prompt_ids),
            "rows": json.dumps(self.rows),
        }
        return write_safetensors(path, {name: self.array(name) for name in chosen}, metadata, force=force)


def layout_of(reading: Reading) -> tuple[str | None, tuple[str, ...]]:
    """The layout of a value and its axes; what goes into a part or comes out of it has none of the named layouts."""
    value = VALUES.get(reading.name.rpartition(".")[2])
    if value is not None and reading.rest is None:
        return value.layout, value.axes
    return None, ("batch", "seq", "features")


def run_with_cache(
    scope: Scope,
    engine: Engine,
    prompts: list[Any],
    asked: Asked,
    *,
    stop_at_layer: int | None = None,
    rows: Positions = None,
    wants_logits: bool = True,
) -> tuple[Array | None, ActivationCache]:
    """Run prompts (ids or embeddings) and keep what was asked for, as NumPy arrays.

    The logits are given too, unless the run stops before them. Without `wants_logits` they are not computed for their
    own sake, and nothing behind the last value that was asked for runs.

    See `Root.run_with_cache`.
    """
    arrays = [np.asarray(prompt) for prompt in prompts]
    lengths = [len(array) for array in arrays]
    positions = _positions(rows, max(lengths))
    end = None if stop_at_layer is None else _end_of(scope, stop_at_layer)
    wanted = _in_time(scope, choose(scope.names, asked), end, is_embedded=arrays[0].ndim == 2)
    wants_logits = end is None and (wants_logits or any(one.edge == scope.edges.logits for one in wanted))
    run = _Run(scope, engine, Presentation(lengths, [0] * len(lengths)), positions)
    run.check_it_fits(wanted, wants_logits=wants_logits)
    kept, logits = run.collect(engine.begin(arrays, None, "last"), arrays, wanted, wants_logits=wants_logits)
    ids = None if arrays[0].ndim == 2 else [array.tolist() for array in arrays]
    return logits, ActivationCache(kept, scope.reading, positions, ids)


def _positions(rows: Positions, seq: int) -> list[int] | None:
    """Which positions are kept, from 0; None for all. Of prompts of several lengths they count as they are shown."""
    if rows is None:
        return None
    if isinstance(rows, slice):
        found = list(range(seq))[rows]
    else:
        given: Any = rows
        is_one = not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0
        asked = [given.item() if hasattr(given, "item") else given] if is_one else list(given)
        for one in asked:
            if not isinstance(one, (int, np.integer)) or isinstance(one, bool):
                raise UsageError(f"rows has {one!r}; expected positions, as in [0, -1] or slice(4, 8).")
            if not -seq <= one < seq:
                raise UsageError(f"row {one} is out of range; the prompt has {seq} positions, {-seq} to {seq - 1}.")
        found = [int(one) % seq for one in asked]
    if not found:
        raise UsageError("rows selects no position; expected one at least.")
    return found


def _end_of(scope: Scope, layer: int) -> int:
    """The operation before which the run stops: the first one of a block, or the first behind the last block."""
    count = int(scope.hp.num_layers)
    if not isinstance(layer, int) or not -count <= layer <= count:
        raise UsageError(f"stop_at_layer is {layer!r}; expected a block, {-count} to {count}.")
    layer = layer + count if layer < 0 else layer
    blocks = scope.edges.blocks
    return blocks[layer][0] if layer < count else blocks[count - 1][1]


def _in_time(
    scope: Scope, chosen: Sequence[tuple[Reading, bool]], end: int | None, *, is_embedded: bool
) -> list[Reading]:
    """What there is before the run ends. Refused when it was named and is not, left out when a pattern fits it."""
    wanted = []
    for reading, is_named in chosen:
        if is_embedded and reading.name == "input_ids":
            if is_named:
                raise UnsupportedError("the model was given embeddings; there are no input_ids.")
        elif end is None or _made(scope, reading) <= end:
            wanted.append(reading)
        elif is_named:
            raise UsageError(
                f"{reading.name} is made after the run has stopped.", hint="Stop at a later layer, or leave it out."
            )
    if not wanted:
        raise UsageError("nothing that was asked for is made before the run stops.", hint="Stop at a later layer.")
    return wanted


def _made(scope: Scope, reading: Reading) -> int:
    """How many operations have run when a value is there."""
    if reading.name == "next_token_probs":
        return scope.edges.end
    return 0 if reading.edge is None else scope.edges.facts[reading.edge].made


@dataclass
class _Run:
    """One run: who takes part in it, and which positions are kept."""

    scope: Scope
    engine: Engine
    view: Presentation
    positions: list[int] | None

    def check_it_fits(self, wanted: Sequence[Reading], *, wants_logits: bool) -> None:
        """DoesNotFitError when what is kept, and what the run needs at once, are more than is free."""
        scope, view = self.scope, self.view
        graph, facts, engine = scope.graph, scope.edges.facts, self.engine
        if view.seq > engine.context_length:
            raise ContextOverflowError(f"{view.seq} tokens do not fit: the context is {engine.context_length} tokens.")
        edges = {one.edge for one in wanted if one.edge is not None}
        size = sum(int(np.prod(self.shape(facts[edge].form), dtype=object)) for edge in edges - {scope.edges.logits})
        if wants_logits:
            size += 2 * view.batch * self.count * int(graph.hp.vocab_size)
        kept, needed = ITEM * size, 0
        if engine.device == "cpu":
            read = self.count if any(facts[edge].form.pattern for edge in edges) else 0
            changed = () if engine.edits is None else engine.edits.edges
            is_explicit = any(facts[edge].form.pattern for edge in changed)  # attention goes by way of its patterns
            query = view.seq if is_explicit else SCORED[engine.name](read, view.seq)
            sizes = {"rows": sum(view.lengths), "wanted": view.batch, "key": view.seq}
            needed = graph.peak_bytes({**sizes, "query": query})
            histories = [op.outputs[0] for op in graph.ops if op.kind == "cache"]
            each = graph.bytes({**sizes, "query": 1, "key": sum(view.lengths)})
            needed += sum(each[edge] for edge in histories)
        free = free_memory()
        if kept + needed > free:
            raise DoesNotFitError(
                f"what is kept of {sum(view.lengths)} tokens takes {kept:,} bytes, and the run {needed:,}; "
                f"{free:,} bytes are free.",
                hint="Ask for fewer values, or only for some positions, as in rows=[-1].",
            )

    @property
    def count(self) -> int:
        """How many positions are kept."""
        return self.view.seq if self.positions is None else len(self.positions)

    def shape(self, form: Form) -> tuple[int, ...]:
        """A value's shape as it is kept."""
        shape = list(self.view.shape(form))
        if self.positions is not None:
            shape[_axis_of(form)] = self.count
        return tuple(shape)

    def collect(
        self, one: Pass, inputs: Sequence[Array], wanted: Sequence[Reading], *, wants_logits: bool
    ) -> tuple[dict[Reading, Array], Array | None]:
        """Run as far as something is wanted."""
        edges = self.scope.edges
        by_edge: dict[int, Array] = {}
        needed = {reading.edge for reading in wanted if reading.edge is not None} - {edges.logits}
        if inputs[0].ndim == 1 and (ids := edges.graph.inputs["input_ids"]) in needed:
            needed.discard(ids)
            by_edge[ids] = self._ids(inputs)
        order = sorted(needed, key=lambda edge: edges.facts[edge].made)
        logits = last = None
        for edge in order:
            one.run(max(one.done, edges.facts[edge].made))
            by_edge[edge] = self._read(one, edge)
        if wants_logits or any(reading.edge is None and reading.name == "next_token_probs" for reading in wanted):
            one.run(max(one.done, edges.gather))
            others = self._other_logits(one) if wants_logits else []
            one.run(edges.end)
            last = as_array(one.read(edges.logits))
            one.finish()
            if wants_logits:
                by_edge[edges.logits] = logits = self._all_logits(last, others)
        return {reading: self._value(reading, by_edge, last) for reading in wanted}, logits

    def _value(self, reading: Reading, by_edge: Mapping[int, Array], last: Array | None) -> Array:
        if reading.name == "attention_mask":
            mask = self.view.mask
            return mask if self.positions is None else np.ascontiguousarray(mask[:, self.positions])
        if reading.edge is None:
            assert last is not None
            weights = np.exp(last - last.max(-1, keepdims=True))
            probs: Array = weights / weights.sum(-1, keepdims=True)
            return probs
        value = by_edge[reading.edge]
        return value if reading.rest is None else value.reshape(*value.shape[:2], *reading.rest)

    def _ids(self, inputs: Sequence[Array]) -> Array:
        pad = self.scope.tokenizer.eos_id or 0
        ids = np.full((self.view.batch, self.view.seq), pad, np.int64)
        for row, one in zip(ids, inputs, strict=True):
            row[len(row) - len(one) :] = one
        return ids if self.positions is None else np.ascontiguousarray(ids[:, self.positions])

    def _own(self, row: int) -> tuple[Array, Array]:
        """Of one prompt: which of the kept positions it has, and where they are among its own tokens."""
        positions = np.arange(self.view.seq) if self.positions is None else np.array(self.positions)
        own = positions - (self.view.seq - self.view.lengths[row])
        return own >= 0, own[own >= 0]

    def _read(self, one: Pass, edge: int) -> Array:
        """A value that is there now, as it is shown, with the kept positions alone."""
        form = self.scope.edges.facts[edge].form
        if self.positions is None:
            value = one.read(edge)
            parts = [as_array(part) for part in value] if isinstance(value, list) else as_array(value)
            return np.ascontiguousarray(self.view.show(parts, form))
        rows = [self._own(row) for row in range(self.view.batch)]
        if form.pattern:
            parts = [as_array(part) for part in read_rows(one, edge, [own for _, own in rows])]
        else:
            value = one.read(edge)
            starts = self.view.starts
            if form.per_sequence:
                parts = [as_array(part)[:, own] for part, (_, own) in zip(value, rows, strict=True)]
            else:
                value = as_array(value)
                parts = [value[starts[row] + own].reshape(-1, *form.rest) for row, (_, own) in enumerate(rows)]
                parts = [part.swapaxes(0, 1) for part in parts] if form.heads_first else parts
        out = np.full(self.shape(form), form.fill, parts[0].dtype)
        for shown, part, (there, _) in zip(out, parts, rows, strict=True):
            if form.pattern:
                shown[:, there, self.view.key - part.shape[2] :] = part
            elif _axis_of(form) == 2:
                shown[:, there] = part
            else:
                shown[there] = part
        return out

    def _other_logits(self, one: Pass) -> list[Array]:
        """Of each prompt, the logits of the kept positions that are not its last."""
        edges, starts = self.scope.edges, self.view.starts
        lasts = [length - 1 for length in self.view.lengths]
        own = [self._own(row)[1] for row in range(self.view.batch)]
        rows = [some[some != last] for some, last in zip(own, lasts, strict=True)]
        every = np.concatenate([starts[row] + some for row, some in enumerate(rows)])
        if not len(every):
            return [np.empty((0, int(edges.graph.hp.vocab_size)), np.float32) for _ in rows]
        each, where = np.unique(every, return_inverse=True)
        made = as_array(self._edited(one.batch, each, self.engine.run_tail(edges.head, one.read(edges.head)[each])))
        return np.split(made[where], np.cumsum([len(some) for some in rows])[:-1])

    def _edited(self, batch: Batch, rows: Array, logits: Any) -> Any:
        """Logits of some rows of a batch, each once, with the edits of an edited model."""
        if self.engine.edits is None:
            return logits
        total = len(batch.positions)
        every = replace(batch, wanted=np.arange(total), wanted_lengths=list(batch.lengths))
        place = np.full(total, -1)
        place[rows] = np.arange(len(rows))
        for change in self.engine.edits.of_step(every, 0, total).get(self.scope.edges.logits, ()):
            kept = place[change.rows] >= 0
            values = change.values if len(change.values) == 1 else change.values[kept]
            logits = change_rows(logits, change._replace(rows=place[change.rows][kept], values=values))
        return logits

    def _all_logits(self, last: Array, others: Sequence[Array]) -> Array:
        """`[batch positions vocab_size]` of the last rows `[batch vocab_size]` and the others of each prompt."""
        out = np.zeros((self.view.batch, self.count, last.shape[-1]), last.dtype)
        for row, (shown, rest) in enumerate(zip(out, others, strict=True)):
            there, own = self._own(row)
            is_last = np.flatnonzero(there)[own == self.view.lengths[row] - 1]
            is_other = np.flatnonzero(there)[own != self.view.lengths[row] - 1]
            shown[is_last], shown[is_other] = last[row], rest
        return out


def _axis_of(form: Form) -> int:
    """The axis of positions in a value as it is shown."""
    return 2 if form.per_sequence or form.heads_first else 1
