"""What a model in training writes: the same few beginnings and holes, continued at every evaluation.

A prompt with <FILL> in it is a hole. Without prompts, one beginning and, where the vocabulary can say so, one hole are
taken from the held-out text, with what stood there. Draws have a seed of their own, so that samples of one step are
the same in every run, and training goes on as if nobody had asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starscope.errors import ContextOverflowError, UsageError
from starscope.infill import FimOrder
from starscope.model import Model
from starscope.tokenizer import Tokenizer
from starscope.train.data import Ids

HOLE = "<FILL>"
TEMPERATURE = 0.7
SEED = 0
BEFORE, MIDDLE, AFTER = 32, 12, 32  # tokens around a hole that is taken from the text, and in it


@dataclass(frozen=True)
class Prompt:
    """A beginning, or the text around a hole; `truth` is what stood there, when that is known."""

    before: str
    after: str | None = None
    truth: str | None = None


def read_prompts(texts: Sequence[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts as they are given; UsageError for one with two holes or a hole that the vocabulary cannot fill.

    TokenizerError for a character that the vocabulary does not have.
    """
    made = []
    for text in texts:
        before, hole, after = text.partition(HOLE)
        if HOLE in after:
            raise UsageError(f"the prompt {text!r} has two {HOLE}; expected one hole at most.")
        if hole and tokenizer.fim is None:
            raise UsageError(
                f"the vocabulary has no tokens for filling in the middle; expected prompts without {HOLE}."
            )
        tokenizer.encode(before + after)
        made.append(Prompt(before, after if hole else None))
    return made


def usual_prompts(documents: Sequence[Ids], tokenizer: Tokenizer, context_length: int, *, fim: bool) -> list[Prompt]:
    """A beginning, and a hole, of the longest of the first few documents."""
    length = min(BEFORE, context_length // 4)
    if not documents or length < 1:
        return []
    document = max(documents[:64], key=len)
    if len(document) < 2 * length:
        return []
    begin = Prompt(tokenizer.decode(document[:length]), None, tokenizer.decode(document[length : 2 * length]))
    scale = length / BEFORE
    middle, after = max(1, int(MIDDLE * scale)), max(1, int(AFTER * scale))
    at = len(document) // 2
    if not fim or at + middle + after > len(document) or at < length:
        return [begin]
    parts = document[at - length : at], document[at + middle : at + middle + after], document[at : at + middle]
    return [begin, Prompt(*map(tokenizer.decode, parts))]


def write_samples(model: Model, prompts: Sequence[Prompt], max_new_tokens: int) -> list[dict[str, Any]]:
    """What the model makes of each prompt, as a line of the log has it."""
    made = []
    for prompt in prompts:
        sample: dict[str, Any] = {"before": prompt.before}
        count = min(max_new_tokens, model.context_length)
        order: FimOrder = "psm" if prompt.after is None else "spm"
        try:
            sample["text"] = model.generate(
                prompt.before, prompt.after, max_new_tokens=count, temperature=TEMPERATURE, seed=SEED, fim_order=order
            ).text
        except ContextOverflowError as error:
            sample["text"] = f"({error.message})"
        if prompt.after is not None:
            sample["after"] = prompt.after
        if prompt.truth is not None:
            sample["truth"] = prompt.truth
        made.append(sample)
    return made
