"""Edits made ready for an engine: names become edges, positions become rows of each step.

    plan = plan_edits([Edit("layer_output", "add", layers=3, tensor=direction)], scope.names, scope.edges)
    engine.forward([ids], edits=plan)

What is selected follows from a token's position, the length of its prompt and its row alone: the step it comes in does
not matter, so chunks, batches and caches do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from starscope.engine.base import MASKED, Array, Batch, EditRows
from starscope.errors import TraceError, UsageError
from starscope.microscope.edges import EdgeFacts, Edges
from starscope.microscope.edits import Edit
from starscope.microscope.names import Names, Reading
from starscope.microscope.selections import ENDLESS, Kept, Stretch, count_of, indices, is_relative, stretches
from starscope.values import ATTENTION, BESIDE_THE_GRAPH, BLOCK, MLP

HOSTS = (BLOCK, ATTENTION, MLP)


@dataclass(frozen=True)
class Where:
    """Tokens, by their positions, their steps and their rows."""

    positions: Kept
    steps: Kept
    rows: Kept

    def of_prompt(self, length: int | None, row: int) -> list[Stretch]:
        """The positions selected in the text of one row, whose prompt has so many tokens."""
        if self.rows is not None and not any(a <= row < b for a, b, _ in stretches(self.rows, ENDLESS, "rows")):
            return []
        end = _known(length) if self.is_relative else 0
        found = stretches(self.positions, end, "positions")
        if self.steps is None:
            return found
        # Step k >= 1 is fed the token at position `end + k - 1`, step 0 all before.
        steps = [(0 if a == 0 else end + a - 1, end + b - 1) for a, b, _ in stretches(self.steps, ENDLESS, "steps")]
        cut = (Stretch(max(a, c), min(b, d), n + max(c - a, 0)) for a, b, n in found for c, d in steps)
        return [one for one in cut if one.start < one.stop]

    @property
    def is_relative(self) -> bool:
        """Whether it depends on the prompt's length."""
        return self.steps is not None or is_relative(self.positions)


def _known(length: int | None) -> int:
    if length is None:
        raise UsageError(
            "an edit is placed by the length of the prompt, which this cache does not know.",
            hint="Set its prompt_length.",
        )
    return length


@dataclass(frozen=True)
class Block:
    """A rectangle of a value's columns and what becomes of it: `values` [1 or positions, cols or 1]."""

    first_col: int
    cols: int
    values: Array
    first_head: int = 0
    heads: int = 0


@dataclass(frozen=True)
class Planned:
    """One edit of one edge. `keys` are set for scores and probabilities alone."""

    edge: int
    where: int  # number of a Where
    scale: float
    blocks: list[Block]
    per_position: bool  # values have a row for each position
    keys: Kept = None
    is_pattern: bool = False
    apart: bool = False  # keys depend on the prompt's length

    def changes(self, rows: Array, numbers: Array, end: int | None, total: int) -> list[EditRows]:
        """The changes of these rows, which are the `numbers`-th that were selected; there are `total` keys at most."""
        made = []
        for block in self.blocks:
            values = block.values[numbers] if self.per_position else block.values
            if not self.is_pattern:
                made.append(EditRows(rows, block.first_col, block.cols, self.scale, values))
                continue
            for start, stop, number in stretches(self.keys, end or 0, "keys", last=total):
                stop = min(stop, total)
                if start >= stop:
                    continue
                own = values[:, number : number + stop - start] if values.shape[1] > 1 else values
                made.append(EditRows(rows, start, stop - start, self.scale, own, block.first_head, block.heads))
        return made


class EditPlan:
    """Edits of one model. Implements `StepEdits`."""

    def __init__(self, edits: Sequence[Edit], planned: list[Planned], wheres: list[Where], edges: Edges) -> None:
        self.edits = tuple(edits)
        self.edges = frozenset(one.edge for one in planned)
        self._planned, self._wheres = planned, wheres
        axes = [edge.axes for edge in edges.graph.edges]
        self._of_wanted = frozenset(edge for edge in self.edges if axes[edge][0] == "wanted")
        self._is_relative = any(where.is_relative for where in wheres) or any(one.apart for one in planned)
        self._has_rows = any(where.rows is not None for where in wheres)
        self._digest = hashlib.blake2b(repr([edit._identity() for edit in edits]).encode(), digest_size=16).digest()

    def key(self, prompt_length: int, row: int) -> object:
        """What a cache depends on besides its tokens."""
        return (self._digest, prompt_length if self._is_relative else None, row if self._has_rows else None)

    def of_step(self, batch: Batch, start: int, stop: int) -> dict[int, list[EditRows]]:
        """The changes of rows start to stop of a batch, by edge."""
        found: dict[int, list[EditRows]] = {}
        selected: dict[tuple[int, bool, bool], list[tuple[Array, Array, int | None]]] = {}
        total = max(past + length for past, length in zip(batch.pasts, batch.lengths, strict=True))
        for one in self._planned:
            wanted = one.edge in self._of_wanted
            case = (one.where, one.apart, wanted)
            if case not in selected:
                parts = self._select(self._wheres[one.where], batch, start, stop, one.apart)
                selected[case] = _among_wanted(parts, batch, start, stop) if wanted else parts
            for rows, numbers, end in selected[case]:
                found.setdefault(one.edge, []).extend(one.changes(rows, numbers, end, total))
        return found

    @staticmethod
    def _select(
        where: Where, batch: Batch, start: int, stop: int, apart: bool
    ) -> list[tuple[Array, Array, int | None]]:
        """The rows selected, counted from `start`, and their numbers among all selected of their text; with the length
        of the prompt for each text by itself if they are to be `apart`, in one otherwise.
        """
        parts: list[tuple[list[Array], list[Array], int | None]] = [([], [], None)]
        first = 0
        for length, past, cache in zip(batch.lengths, batch.pasts, batch.caches, strict=True):
            low, high = max(first, start), min(first + length, stop)
            shift = first - past  # of a row before its position
            first += length
            if low >= high:
                continue
            if apart:
                parts.append(([], [], _known(cache.prompt_length)))
            for a, b, number in where.of_prompt(cache.prompt_length, cache.row):
                begin, end = max(a + shift, low), min(b + shift, high)
                if begin < end:
                    parts[-1][0].append(np.arange(begin - start, end - start))
                    at = number + begin - shift - a
                    parts[-1][1].append(np.arange(at, at + end - begin))
        return [(_joined(rows), _joined(numbers), end) for rows, numbers, end in parts if rows]


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _among_wanted(
    parts: list[tuple[Array, Array, int | None]], batch: Batch, start: int, stop: int
) -> list[tuple[Array, Array, int | None]]:
    """The same for a value of wanted rows alone."""
    begin, end = np.searchsorted(batch.wanted, [start, stop]).tolist()
    wanted = batch.wanted[begin:end] - start
    found = []
    for rows, numbers, length in parts:
        kept = np.isin(rows, wanted)
        if kept.any():
            found.append((np.searchsorted(wanted, rows[kept]), numbers[kept], length))
    return found


def plan_edits(edits: Sequence[Edit], names: Names, edges: Edges, before: Sequence[Edit] = ()) -> EditPlan:
    """Edits for one model, behind those `before`. UsageError, with the edit's number, for what the model lacks."""
    planned: list[Planned] = []
    wheres: list[Where] = []
    for i, edit in enumerate([*before, *edits], -len(before)):
        if not isinstance(edit, Edit):
            raise UsageError(f"edits[{i}] is {type(edit).__name__}; expected an Edit.")
        try:
            where = Where(edit.selection("positions"), edit.selection("steps"), edit.selection("rows"))
            if where not in wheres:
                wheres.append(where)
            planned += [_plan(edit, one, wheres.index(where), edges) for one in find_values(edit, names)]
        except (UsageError, TraceError) as error:
            raise UsageError(f"edits[{i}]: {error.message}", hint=error.hint) from None
    return EditPlan([*before, *edits], planned, wheres, edges)


def find_values(edit: Edit, names: Names) -> list[Reading]:
    """The values that an edit is of: one, or one of each layer."""
    layers, pattern = edit.selection("layers"), _of_layers(edit.value, names)
    if pattern is None:
        if layers is not None:
            raise UsageError(f"{edit.value} is one value; expected no layers.")
        return [names.reading(edit.value)]
    chosen = indices(layers, int(names.graph.hp.num_layers), "layers")
    return [names.reading(pattern.replace("{i}", str(layer))) for layer in chosen]


def _of_layers(name: str, names: Names) -> str | None:
    """The name with `{i}` for the layer; None for one value's."""
    if "{i}" in name:
        return name
    if names.find(name) is not None:
        return None
    patterns = (f"{host}.{name}" for host in HOSTS)
    return next((pattern for pattern in patterns if names.find(pattern.replace("{i}", "0")) is not None), None)


def _plan(edit: Edit, reading: Reading, where: int, edges: Edges) -> Planned:
    """One edit of one value."""
    edge = reading.edge
    if edge is None or reading.name in BESIDE_THE_GRAPH or edges.graph.producers[edge] is None:
        raise UsageError(f"{reading.name} cannot be edited: it is what the model is given, or follows from the logits.")
    producer = edges.graph.ops[edges.graph.producers[edge] or 0]
    if producer.kind == "wanted_rows":
        edge = producer.inputs[0]  # the same rows, before they are chosen
    facts, rest = edges.facts[edge], reading.rest
    if facts.form.pattern:
        return _plan_pattern(edit, edge, where, facts)
    if edit.op == "mask":
        raise UsageError(f"mask is for attention_scores; {facts.name} has none.")
    if edit.selection("keys") is not None:
        raise UsageError(f"keys are for attention_scores and attention_probabilities; {facts.name} has none.")
    sizes = rest or (facts.form.stored if facts.form.per_sequence else facts.form.rest)
    if len(sizes) == 1:
        if edit.selection("heads") is not None:
            raise UsageError(f"{facts.name} has no heads; expected an edit without.")
        stretched, width = [Stretch(0, 1, 0)], sizes[0]
        expected: tuple[int, ...] = (width,)
    else:
        stretched, width = _heads(edit, sizes[0]), sizes[1]
        expected = (_total(stretched), width)
    values = _values(edit, expected, facts)
    blocks = []
    for start, stop, number in stretched:
        cols = (stop - start) * width
        own = values
        if values.ndim == len(expected) + 1:  # [positions or 1, ...]
            own = values[:, number : number + stop - start] if len(expected) == 2 else values
            own = np.ascontiguousarray(own.reshape(len(own), -1))
        blocks.append(Block(start * width, cols, own))
    return Planned(edge, where, _scale(edit), blocks, edit.op == "replace")


def _plan_pattern(edit: Edit, edge: int, where: int, facts: EdgeFacts) -> Planned:
    """Of scores or probabilities: one block for each head whose values differ, else for heads side by side."""
    if edit.op == "mask" and facts.form.fill != MASKED:
        raise UsageError(f"mask is for attention_scores; for {facts.name} there is zero.")
    stretched, keys = _heads(edit, facts.form.stored[0]), edit.selection("keys")
    width = 1 if keys is None else count_of(keys)
    if width is None and edit.tensor is not None and edit.tensor.ndim and edit.tensor.shape[-1] > 1:
        raise UsageError(f"{facts.name} was given a tensor for keys whose number is not known; expected one column.")
    values = _values(edit, (_total(stretched), width or 1), facts)
    if values.ndim < 3:
        blocks = [Block(0, 0, values, start, stop - start) for start, stop, _ in stretched]
    else:
        heads = [(head, number + head - start) for start, stop, number in stretched for head in range(start, stop)]
        blocks = [Block(0, 0, np.ascontiguousarray(values[:, number]), head, 1) for head, number in heads]
    relative = is_relative(keys)
    return Planned(edge, where, _scale(edit), blocks, edit.op == "replace", keys, is_pattern=True, apart=relative)


def _heads(edit: Edit, size: int) -> list[Stretch]:
    """The heads selected, those side by side together."""
    found = indices(edit.selection("heads"), size, "heads")
    return stretches(tuple(found), size, "heads")


def _total(stretched: list[Stretch]) -> int:
    return sum(stop - start for start, stop, _ in stretched)


def _scale(edit: Edit) -> float:
    return {"add": 1.0, "scale": edit.factor}.get(edit.op, 0.0)


def _values(edit: Edit, expected: tuple[int, ...], facts: EdgeFacts) -> Array:
    """What is added or written: `[1 1]` for one number, else `[positions or 1, *expected]`."""
    # x + -0.0 is x, the sign of a zero too; x times 0 is 0, whatever x is.
    numbers: dict[str, Any] = {"zero": 0.0, "mask": MASKED, "scale": -0.0 if edit.factor else 0.0}
    if edit.op in numbers:
        return np.full((1, 1), numbers[edit.op], np.float32)
    tensor = edit.tensor
    behind = tensor.shape[1:] if edit.op == "replace" else tensor.shape
    fits = len(behind) <= len(expected) and all(
        one in (1, size) for one, size in zip(behind[::-1], expected[::-1], strict=False)
    )
    if not fits:
        rows = ["positions"] if edit.op == "replace" else []
        raise UsageError(
            f"{facts.name} was given a tensor {list(tensor.shape)}; expected one that broadcasts to "
            f"[{' '.join(map(str, (*rows, *expected)))}]."
        )
    if edit.op != "replace" and tensor.size == 1:
        return np.float32(edit.factor) * np.asarray(tensor.reshape(1, 1))
    count = len(tensor) if edit.op == "replace" else 1
    aligned = tensor.reshape(count, *(1,) * (len(expected) - len(behind)), *behind)
    return np.float32(edit.factor) * np.broadcast_to(aligned, (count, *expected))
