"""The loss of held-out documents while training, through the same forward pass that trains.

Documents are cut into windows that do not overlap, each of whose tokens is predicted once. Whole windows have one
length and run as batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from starscope.errors import InvalidContentError
from starscope.perplexity import MOST_ROWS, Perplexity, Window, windows
from starscope.train.data import Ids
from starscope.train.forward import Forward
from starscope.train.kernels import IGNORED


@dataclass(frozen=True)
class HeldOut:
    """Documents to measure with: their ids, and what they take in UTF-8 bytes altogether."""

    documents: Sequence[Ids]
    bytes: int
    end_of_text: int


@torch.no_grad()
def measure_held_out(forward: Forward, held_out: HeldOut, context_length: int) -> Perplexity:
    """The loss of the held-out documents in windows of `context_length` tokens, each document by itself.

    InvalidContentError when there is no text, and when the loss is no finite number.
    """
    tokens = sum(map(len, held_out.documents))
    if not tokens:
        raise InvalidContentError("there is no text to measure; expected at least one held-out token.")
    nats = 0.0
    for group in _groups(held_out, context_length):
        ids = torch.from_numpy(np.stack([window.ids for window in group]))
        targets = ids[:, 1:].clone()
        for row, window in zip(targets, group, strict=True):
            row[: len(row) - window.scored] = IGNORED  # predicted in the window before
        nats += forward.loss(ids[:, :-1], targets).double().item()
    if not math.isfinite(nats):
        raise InvalidContentError("the held-out loss is not a finite number.", hint="Take a lower learning rate.")
    return Perplexity(nats, tokens, held_out.bytes, context_length, context_length)


def _groups(held_out: HeldOut, context_length: int) -> Iterator[list[Window]]:
    """Windows of one length that run together."""
    whole: list[Window] = []
    for document in held_out.documents:
        for window in windows(document, held_out.end_of_text, context_length, context_length):
            if len(window.ids) <= context_length:
                yield [window]
                continue
            whole.append(window)
            if len(whole) * context_length >= MOST_ROWS:
                yield whole
                whole = []
    if whole:
        yield whole
