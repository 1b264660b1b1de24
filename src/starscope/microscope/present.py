"""How values are shown: batch first, shorter prompts left-padded, so that `[:, -1]` is each one's last token.

Engines keep the rows of all sequences one after another, without padding. Padding exists here alone: it is 0, in scores
the lowest float32, and what is written there is dropped.

    view = Presentation(lengths=[3, 5], pasts=[0, 0])
    shown = view.show(rows, form)          # [8 hidden_size] -> [2 5 hidden_size]
    rows = view.take_back(shown, form)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from starscope.engine.base import MASKED
from starscope.graph import Edge


@dataclass(frozen=True)
class Form:
    """How one value is shown. `per_sequence` values are a list in the engine, the others rows of all sequences."""

    per_sequence: bool
    rest: tuple[int, ...]  # the axes after [batch seq] as they are shown, before heads change places with positions
    stored: tuple[int, ...]  # the engine's axes of fixed size
    heads_first: bool = False
    pattern: bool = False
    fill: float = 0.0


def form_of(edge: Edge, layout: str | None, head_dim: int) -> Form:
    """The form of an edge, shown with a layout of the standard values, or plainly."""
    sizes = tuple(axis for axis in edge.axes if isinstance(axis, int))
    if edge.per_sequence:
        pattern = "query" in edge.axes
        fill = MASKED if any(name.endswith(".attention_scores") for name in edge.names) else 0.0
        return Form(True, sizes, sizes, pattern=pattern, fill=fill)
    if layout == "HeadOutputs" and len(sizes) == 1:
        return Form(False, (sizes[0] // head_dim, head_dim), sizes)
    return Form(False, sizes, sizes, heads_first=layout == "Queries")


class Presentation:
    """The shape of one step: new tokens (`lengths`) and cached ones (`pasts`) of every sequence."""

    def __init__(self, lengths: Sequence[int], pasts: Sequence[int]) -> None:
        self.lengths, self.pasts = list(lengths), list(pasts)
        self.totals = [past + length for past, length in zip(pasts, lengths, strict=True)]
        self.batch, self.seq, self.key = len(self.lengths), max(self.lengths), max(self.totals)
        self.even = len(set(self.lengths)) == 1 and len(set(self.totals)) == 1
        self.starts = [0, *np.cumsum(self.lengths).tolist()]

    def shape(self, form: Form) -> tuple[int, ...]:
        """The axes of a value as it is shown."""
        if form.pattern:
            return (self.batch, form.stored[0], self.seq, self.key)
        if form.per_sequence:
            return (self.batch, form.stored[0], self.key, *form.stored[1:])
        if form.heads_first:
            return (self.batch, form.rest[0], self.seq, *form.rest[1:])
        return (self.batch, self.seq, *form.rest)

    def show(self, value: Any, form: Form) -> Any:
        """A value of the engine as it is shown; contiguous, and the engine's own copy no more."""
        if form.per_sequence:
            if self.even and self.batch == 1:
                return value[0][None]
            return _stack(value, form.fill)
        if self.even:
            shown = value.reshape(self.batch, self.seq, *form.rest)
        else:
            rows = [value[start:stop] for start, stop in zip(self.starts, self.starts[1:], strict=False)]
            shown = _stack(rows, form.fill).reshape(self.batch, self.seq, *form.rest)
        return shown.swapaxes(1, 2) if form.heads_first else shown

    def take_back(self, shown: Any, form: Form) -> Any:
        """What was shown, in the engine's form, without the padding."""
        if form.pattern:
            return [
                shown[i, :, self.seq - length :, self.key - total :]
                for i, (length, total) in enumerate(zip(self.lengths, self.totals, strict=True))
            ]
        if form.per_sequence:
            return [shown[i, :, self.key - total :] for i, total in enumerate(self.totals)]
        if form.heads_first:
            shown = shown.swapaxes(1, 2)
        if self.even:
            return shown.reshape(self.batch * self.seq, *form.stored)
        rows = [shown[i, self.seq - length :].reshape(length, *form.stored) for i, length in enumerate(self.lengths)]
        return _join(rows)

    @property
    def mask(self) -> np.ndarray[Any, Any]:
        """`[batch key]`: 1 where a token is, 0 where there is padding."""
        return (np.arange(self.key) >= self.key - np.array(self.totals)[:, None]).astype(np.int64)

    @property
    def is_new(self) -> np.ndarray[Any, Any]:
        """`[batch seq]`: True where a new token is."""
        real: np.ndarray[Any, Any] = np.arange(self.seq) >= self.seq - np.array(self.lengths)[:, None]
        return real


def _stack(parts: Sequence[Any], fill: float) -> Any:
    """Arrays of one rank, padded at the beginning of their axes and laid on one another."""
    sizes = [max(part.shape[n] for part in parts) for n in range(parts[0].ndim)]
    if isinstance(parts[0], np.ndarray):
        out = np.full((len(parts), *sizes), fill, parts[0].dtype)
        for one, part in zip(out, parts, strict=True):
            one[tuple(slice(size - n, None) for size, n in zip(sizes, part.shape, strict=True))] = part
        return out
    import torch
    import torch.nn.functional as F

    padded = []
    for part in parts:
        before = [size - n for size, n in zip(sizes, part.shape, strict=True)]
        pads = [pad for missing in reversed(before) for pad in (missing, 0)]
        padded.append(F.pad(part, pads, value=fill))
    return torch.stack(padded)


def _join(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], np.ndarray):
        return np.concatenate(rows)
    import torch

    return torch.cat(list(rows))
