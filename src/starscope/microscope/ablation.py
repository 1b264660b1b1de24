"""Ablations whose numbers come from other prompts: what a head gives on average, or what it gives elsewhere.

    edit = mean_ablation(model, "attention_head_outputs", layer=3, head=5, prompts=texts)
    edit = resample_ablation(model, "attention_head_outputs", layer=3, head=5, prompt=other)
    with model.editing(edit): ...

The numbers are taken once and are in the edit; nothing of the other prompts is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.errors import UsageError
from starscope.microscope.edit_plan import find_values
from starscope.microscope.edits import Edit
from starscope.microscope.selections import Selection, indices
from starscope.microscope.tensors import as_array

if TYPE_CHECKING:
    from starscope.microscope.root import Root


def mean_ablation(
    model: Root,
    value: str,
    layer: int | None,
    head: int | Sequence[int] | None,
    prompts: Any,
    *,
    positions: Selection = None,
) -> Edit:
    """An edit that sets a value to its mean over all positions of all `prompts` (texts or ids).

    `head`: of these heads alone; None for all of the value. `layer` is None for a value that a full name says.
    """
    rows = [_rows_of(model, value, layer, head, prompt) for prompt in _several(prompts)]
    mean = np.concatenate(rows).mean(axis=0, dtype=np.float64)
    return Edit(value, "set", layers=layer, heads=head, positions=positions, tensor=mean.astype(np.float32))


def resample_ablation(
    model: Root,
    value: str,
    layer: int | None,
    head: int | Sequence[int] | None,
    prompt: Any,
    *,
    positions: Selection = None,
) -> Edit:
    """An edit that replaces a value by the one that another prompt has at the same positions.

    `positions`: all of the other prompt's if None. UsageError for positions that it does not have.
    """
    rows = _rows_of(model, value, layer, head, prompt)
    wanted = Edit(value, "zero", positions=slice(0, len(rows)) if positions is None else positions)
    kept = wanted.selection("positions")
    if kept == "new":
        raise UsageError("positions are new; expected some of the other prompt.")
    chosen = indices(kept, len(rows), "positions")
    return Edit(value, "replace", layers=layer, heads=head, positions=chosen, tensor=rows[chosen])


def _several(prompts: Any) -> list[Any]:
    """Prompts one by one: a text or a list of ids is one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]
    if not len(prompts):
        raise UsageError("no prompt was given; expected one at least.")
    return list(prompts)


def _rows_of(model: Root, value: str, layer: int | None, head: Any, prompt: Any) -> np.ndarray[Any, Any]:
    """A value of one prompt: `[positions width]`, or `[positions heads head_dim]` of the heads chosen."""
    scope, asked = model.scope, Edit(value, "zero", layers=layer, heads=head)
    readings = find_values(asked, scope.names)
    if len(readings) != 1:
        raise UsageError(f"{value} is one of {len(readings)} layers; expected the layer.")
    [reading] = readings
    if reading.edge is None or scope.edges.facts[reading.edge].form.pattern:
        raise UsageError(f"{reading.name} is another size for every prompt; expected a value with positions only.")
    form = scope.edges.facts[reading.edge].form
    with model.trace(prompt) as t:
        [rows] = as_array(scope.read(t, reading))
        t.stop()
    if reading.rest is None and (form.heads_first or form.per_sequence):
        rows = rows.swapaxes(0, 1)
    made: np.ndarray[Any, Any] = rows
    if head is None:
        return made
    if rows.ndim != 3:
        raise UsageError(f"{reading.name} has no heads; expected an ablation of all of it.")
    return made[:, indices(asked.selection("heads"), made.shape[1], "heads")]
