"""Fill-in-the-middle prompts (Bavarian et al. 2022), written as token ids: <prefix> P <suffix> S <middle>.

The three markers are the tokenizer's; the text around the hole is never parsed for special tokens, so code that
contains "<fim_suffix>" stays text. What does not fit is cut where it matters least: the prefix keeps its end, the
suffix its start.

    ids, dropped = infill_prompt(tokenizer, "def add(a, b): ", "return c", budget=1024)
    generate(engine, tokenizer, ids, stop_ids=tokenizer.infill_stop_ids)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from starscope.errors import ContextOverflowError, UnsupportedError

if TYPE_CHECKING:
    from starscope.tokenizer import Tokenizer

SUFFIX_SHARE = 4  # one token in four is the suffix's, where prefix and suffix both have more than fits


class InfillPrompt(NamedTuple):
    """The ids of a prompt, and how many tokens of the text around the hole were left out to make it fit."""

    ids: list[int]
    dropped: int


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, *, budget: int) -> InfillPrompt:
    """A prompt of at most `budget` tokens that asks for the text between `prefix` and `suffix`.

    Raises UnsupportedError when the vocabulary has no such markers.
    """
    fim = tokenizer.fim
    if fim is None:
        raise UnsupportedError(
            "this model's vocabulary has no fill-in-the-middle tokens (prefix, suffix, middle).",
            hint="Leave the suffix out, or use a model that was trained to fill in the middle.",
        )
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    room = budget - len(begin) - 3
    if room < 0:
        raise ContextOverflowError(f"a fill-in-the-middle prompt needs {budget - room} tokens; {budget} are free.")
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix)
    whole = len(before) + len(after)
    before, after = cut_to_fit(before, after, room)
    return InfillPrompt([*begin, fim.prefix, *before, fim.suffix, *after, fim.middle], whole - len(before) - len(after))


def cut_to_fit(prefix: list[int], suffix: list[int], room: int) -> tuple[list[int], list[int]]:
    """The end of the prefix and the start of the suffix, together at most `room` tokens.

    A quarter of the room is the suffix's and the rest the prefix's; what one of them does not need, the other gets.
    """
    for_suffix = min(len(suffix), max(room // SUFFIX_SHARE, room - len(prefix)))
    for_prefix = min(len(prefix), room - for_suffix)
    return prefix[len(prefix) - for_prefix :], suffix[:for_suffix]


def infill_budget(context_length: int, max_new_tokens: int) -> int:
    """The tokens that the prompt may take: what the answer leaves free, three quarters of the context at the least."""
    return context_length - min(max_new_tokens, context_length // 4)
