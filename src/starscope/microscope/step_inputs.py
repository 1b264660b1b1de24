"""The tokens that a step of a trace runs, as they are shown and as somebody may change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from starscope.errors import ValueShapeError
from starscope.microscope.tensors import Watch, as_array, as_value


class Inputs:
    """The tokens of one step, and as they are shown when somebody looks: ids `[batch seq]`, a mask `[batch key]`.

    What was changed there is what runs.
    """

    def __init__(self, sequences: Sequence[Any], pasts: Sequence[int], pad: int) -> None:
        self._sequences, self._pasts, self._pad = list(sequences), list(pasts), pad
        self._ids: Any = None
        self._mask: Any = None
        self._watches: list[Watch] = []
        self._assigned = False

    @property
    def is_embedded(self) -> bool:
        return bool(self._sequences[0].ndim == 2)

    @property
    def shape(self) -> tuple[int, int]:
        if self._ids is not None:
            return (int(self._ids.shape[0]), int(self._ids.shape[1]))
        return len(self._sequences), max(len(one) for one in self._sequences)

    @property
    def ids(self) -> Any:
        if self._ids is None:
            ids = np.full(self.shape, self._pad, np.int64)
            for row, one in zip(ids, self._sequences, strict=True):
                row[len(row) - len(one) :] = one
            self._ids = self._watched(ids)
        return self._ids

    @property
    def mask(self) -> Any:
        if self._mask is None:
            totals = np.array([past + len(one) for past, one in zip(self._pasts, self._sequences, strict=True)])
            most = int(totals.max())
            self._mask = self._watched((np.arange(most) >= most - totals[:, None]).astype(np.int64))
        return self._mask

    def assign_ids(self, ids: np.ndarray[Any, Any]) -> None:
        """Other tokens `[batch seq]`; of another length, all of them count."""
        mask = as_array(self.mask)
        if not any(self._pasts) and mask.shape != ids.shape:
            self._mask = self._watched(np.ones(ids.shape, np.int64))
        self._ids, self._assigned = self._watched(ids.astype(np.int64)), True

    def assign_mask(self, mask: np.ndarray[Any, Any]) -> None:
        self._mask, self._assigned = self._watched(mask), True

    def _watched(self, array: np.ndarray[Any, Any]) -> Any:
        value = as_value(array)
        self._watches.append(Watch(value))
        return value

    @property
    def is_changed(self) -> bool:
        """Whether somebody changed them in place since they were shown, or since they were taken."""
        return any(watch.has_changed() for watch in self._watches)

    def take(self) -> list[Any]:
        """What is to run, of each row."""
        if (self._assigned or self.is_changed) and not self.is_embedded:
            ids = as_array(self.ids)
            if any(self._pasts):
                self._sequences = list(ids)
            else:
                kept = check_mask(self.mask, ids.shape)
                self._sequences = [row[real == 1] for row, real in zip(ids, kept, strict=True)]
            for watch in self._watches:
                watch.reset()
            self._assigned = False
        return self._sequences


def check_mask(value: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A mask of ones that may have zeros at the beginning of its rows."""
    mask = as_array(value)
    if mask.shape != shape:
        raise ValueShapeError(f"attention_mask is {list(mask.shape)}; expected {list(shape)}, the shape of input_ids.")
    if not np.isin(mask, (0, 1)).all() or (np.diff(mask.astype(np.int64), axis=1) < 0).any() or not mask[:, -1].all():
        raise ValueShapeError("attention_mask has zeros behind a token; expected them only at the beginning of a row.")
    return mask.astype(np.int64)
