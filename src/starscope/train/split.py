"""Which text is held out to measure with: whole documents, or the last share of each.

A document is held out when a number that its name gives is below the share, so it is the same on every machine and
stays so when others are added. Where that cannot give about the share that was asked for (a single document, a few
large ones), "auto" holds out the last share of every document instead, and says so:

    parts = split_text(corpus.passages, 0.05, "auto")
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from starscope.errors import InvalidContentError
from starscope.train.documents import Passage

SPLITS = ("auto", "documents", "last")
NEAR_SHARE = 4  # documents are held out when that gives the share that was asked for within this factor


def name_fraction(name: str) -> float:
    """A number in [0, 1) that depends on a document's name alone: the first 8 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class Split:
    """What to train on and what to measure with, and how it was decided, in a sentence."""

    train: list[Passage]
    held_out: list[Passage]
    note: str


def split_text(passages: Sequence[Passage], share: float, how: str) -> Split:
    """Documents by their names, or the last share of each; InvalidContentError when nothing is left to train on."""
    if share == 0:
        return Split(list(passages), [], "nothing is held out.")
    total = sum(passage.bytes for passage in passages)
    held_out = [passage for passage in passages if name_fraction(passage.name) < share]
    found = sum(passage.bytes for passage in held_out) / total
    near = share / NEAR_SHARE <= found <= min(share * NEAR_SHARE, (1 + share) / 2)
    if how == "documents" or (how == "auto" and near):
        train = [passage for passage in passages if name_fraction(passage.name) >= share]
        if not train or not held_out:
            what = "to train on" if held_out else "held out"
            raise InvalidContentError(
                f"no document is {what} at a share of {share:g} of {len(passages)}.",
                hint="Change the share, or hold out the last share of each document.",
            )
        return Split(
            train, held_out, f"held out: {len(held_out)} of {len(passages)} documents, {found:.1%} of the text."
        )
    pairs = [passage.split(share) for passage in passages]
    train, held_out = ([part for part in parts if part.bytes] for parts in zip(*pairs, strict=True))
    if not train or not held_out:
        raise InvalidContentError(
            f"the text has {total} bytes: too few to hold out {share:g} of it.", hint="Add text or hold out nothing."
        )
    of = "the text" if len(passages) == 1 else f"each of {len(passages)} documents"
    return Split(train, held_out, f"held out: the last {share:.1%} of {of}.")
