"""Does knowing what follows help? Holes in lines of held-out files, filled with and without the text behind them.

    python benches/infill.py demo tests/data/held_out/*.py

A fixed rule hides spans inside of lines, and rests of lines. Greedy text, with the suffix (psm, spm) or from the prefix
alone, is right when it begins with what was hidden, and when the hole goes to the line's end, ends with the line there:
one rule for all, since from the prefix alone a model cannot know where a span ends. `exact` counts those that end where
the hole does. The token that the hole may have cut is taken back (healing). Bits per byte are those of the hidden text,
given what is shown; once more for the holes that cut no token. Printed: tables, or with --json one document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import starscope
from starscope.generate import check_prompt
from starscope.infill import FimOrder, infill_prompt
from starscope.train.data import random_words

MOST_CHARACTERS = 24  # of a span
FEWEST_CHARACTERS = 8  # that are no blanks, of a line that gets a hole
LENGTHS = {"1-4": range(1, 5), "5-8": range(5, 9), "9-16": range(9, 17), "17-": range(17, sys.maxsize)}  # characters
PREFIX_TOKENS, SUFFIX_TOKENS = 100, 300  # what is shown of the text around a hole: most of it lies behind
TOKENS_MORE = 8  # that a completion may have than the hidden text, which may be cut into tokens in other ways
BATCH = 64  # prompts handed over together

Draw = Callable[[int], int]  # n -> a uniform number below n


@dataclass(frozen=True)
class Hole:
    """`middle` is hidden; `prefix` and `suffix` are all of the file around it."""

    prefix: str
    middle: str
    suffix: str


@dataclass(frozen=True)
class Kind:
    """A kind of hole: where `cut` puts it in a line, whether it goes to the line's end."""

    what: str
    cut: Callable[[str, Draw], tuple[int, int]]
    to_the_end: bool


@dataclass(frozen=True)
class Way:
    """A way to ask: with the suffix, in an order, or from the prefix alone."""

    order: FimOrder | None = None


def span(line: str, draw: Draw) -> tuple[int, int]:
    """A uniform length, then a uniform place; not blank."""
    while True:
        length = 1 + draw(min(MOST_CHARACTERS, len(line)))
        start = draw(len(line) - length + 1)
        if line[start : start + length].strip():
            return start, start + length


def rest(line: str, draw: Draw) -> tuple[int, int]:
    """From a uniform place behind the first character to the end."""
    return 1 + draw(len(line) - 1), len(line)


KINDS = {
    "span": Kind(f"a span of 1 to {MOST_CHARACTERS} characters inside of a line", span, to_the_end=False),
    "rest": Kind("the rest of a line", rest, to_the_end=True),
}
WAYS = {"psm": Way("psm"), "spm": Way("spm"), "prefix": Way()}
ORDERS = [name for name, way in WAYS.items() if way.order]
ALONE = [name for name in WAYS if name not in ORDERS]


def choose_holes(texts: Sequence[str], kind: str, count: int, seed: int) -> list[Hole]:
    """`count` holes in as many lines, the same on every machine; fewer where there are fewer lines.

    Which lines, and where each is cut, depends on the seed and the line's number alone. Blanks around a line are no
    part of it.
    """
    lines = []  # (text, where the line begins and ends in it)
    for text in texts:
        start = 0
        for line in text.splitlines(keepends=True):
            first = start + len(line) - len(line.lstrip())
            if sum(not character.isspace() for character in line) >= FEWEST_CHARACTERS:
                lines.append((text, first, first + len(line.strip())))
            start += len(line)
    holes = []
    for index in np.argsort(random_words(seed, 0, count=len(lines)), kind="stable")[:count].tolist():
        text, first, end = lines[index]
        draw = drawing(random_words(seed, 1 + list(KINDS).index(kind), index, count=1000).tolist())
        begin, stop = (first + at for at in KINDS[kind].cut(text[first:end], draw))
        holes.append(Hole(text[:begin], text[begin:stop], text[stop:]))
    return holes


def drawing(words: Iterable[int]) -> Draw:
    """Numbers from random words, one after another."""
    left = iter(words)
    return lambda n: next(left) % n


def shorten(model: starscope.Model, hole: Hole) -> Hole:
    """The hole with what is shown of the text around it, cut between tokens."""
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    # What no number of tokens could need is cut off first, so that whole files need not be encoded.
    prefix, suffix = hole.prefix[-32 * PREFIX_TOKENS :], hole.suffix[: 32 * SUFFIX_TOKENS]
    return Hole(decode(encode(prefix)[-PREFIX_TOKENS:]), hole.middle, decode(encode(suffix)[:SUFFIX_TOKENS]))


def complete(model: starscope.Model, holes: Sequence[Hole], kind: Kind, way: Way) -> list[starscope.Completion]:
    """Greedy text for each hole; without the suffix its first line."""
    most = [len(model.tokenizer.encode(hole.middle)) + TOKENS_MORE for hole in holes]
    if way.order is not None:
        stop = ["\n"] if kind.to_the_end else []
        return [
            model.generate(hole.prefix, hole.suffix, fim_order=way.order, heal=True, stop=stop, max_new_tokens=limit)
            for hole, limit in zip(holes, most, strict=True)
        ]
    done: dict[int, starscope.Completion] = {}
    by_limit = sorted(range(len(holes)), key=most.__getitem__)
    for start in range(0, len(holes), BATCH):
        batch = by_limit[start : start + BATCH]
        prompts = [holes[i].prefix for i in batch]
        texts = model.generate(prompts, stop="\n", max_new_tokens=most[batch[-1]], heal=True)
        done.update(zip(batch, texts, strict=True))
    return [done[i] for i in range(len(holes))]


def is_right(hole: Hole, done: starscope.Completion, kind: Kind) -> bool:
    """Whether it begins with what was hidden; whether it is that, where the hole goes to the line's end."""
    return is_exact(hole, done) if kind.to_the_end else done.text.startswith(hole.middle)


def is_exact(hole: Hole, done: starscope.Completion) -> bool:
    return done.text == hole.middle and done.finish_reason == "stop"


def bits(model: starscope.Model, hole: Hole, order: FimOrder | None) -> float:
    """The negative log2-likelihood of the hidden text's tokens, given what is shown."""
    tokenizer, middle = model.tokenizer, model.tokenizer.encode(hole.middle)
    room = model.context_length - len(middle)
    if order is not None:
        before = infill_prompt(tokenizer, hole.prefix, hole.suffix, budget=room, fim_order=order).ids
    else:
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        before = check_prompt(tokenizer, [*begin, *tokenizer.encode(hole.prefix)], room)
    logits = np.asarray(model.forward([*before, *middle])[0], np.float64)[len(before) - 1 : -1]
    logits -= logits.max(axis=1, keepdims=True)
    nats = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(middle)), middle]
    return float(nats.sum()) / math.log(2)


def cuts_no_token(model: starscope.Model, hole: Hole) -> bool:
    encode = model.tokenizer.encode
    return encode(hole.prefix + hole.middle) == [*encode(hole.prefix), *encode(hole.middle)]


def share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def by_length(holes: Sequence[Hole], right: Sequence[bool]) -> dict[str, float | None]:
    """The share of right ones among the holes of each length."""
    return {
        name: share([ok for hole, ok in zip(holes, right, strict=True) if len(hole.middle) in lengths])
        for name, lengths in LENGTHS.items()
    }


def bits_per_byte(holes: Sequence[Hole], found: Sequence[float], kept: Sequence[bool]) -> float | None:
    size = sum(len(hole.middle.encode()) for hole, keep in zip(holes, kept, strict=True) if keep)
    return round(sum(value for value, keep in zip(found, kept, strict=True) if keep) / size, 4) if size else None


def only(right: Sequence[bool], other: Sequence[bool]) -> int:
    """How many holes the first gets right and the other does not."""
    return sum(a and not b for a, b in zip(right, other, strict=True))


def measure(model: starscope.Model, holes: Sequence[Hole], kind: Kind, orders: Sequence[str]) -> dict[str, Any]:
    """What is reported of one kind of hole."""
    holes = [shorten(model, hole) for hole in holes]
    whole = [cuts_no_token(model, hole) for hole in holes]
    ways: dict[str, dict[str, Any]] = {}
    right: dict[str, list[bool]] = {}
    for name in (*orders, *ALONE):
        way = WAYS[name]
        pairs = list(zip(holes, complete(model, holes, kind, way), strict=True))
        right[name] = [is_right(hole, done, kind) for hole, done in pairs]
        found = [bits(model, hole, way.order) for hole in holes]
        ways[name] = {
            "right": sum(right[name]),
            "rate": share(right[name]),
            "rate_by_length": by_length(holes, right[name]),
            "exact": share([is_exact(hole, done) for hole, done in pairs]),
            "bits_per_byte": bits_per_byte(holes, found, [True] * len(holes)),
            "bits_per_byte_no_token_cut": bits_per_byte(holes, found, whole),
        }
    compared = [
        {"way": a, "other": b, "only_way": only(right[a], right[b]), "only_other": only(right[b], right[a])}
        for a in orders
        for b in ALONE
    ]
    return {"holes": len(holes), "holes_that_cut_no_token": sum(whole), "ways": ways, "pairs": compared}


def table(kind: Kind, found: Mapping[str, Any]) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    lines = [
        f"{found['holes']} holes, {kind.what}; {found['holes_that_cut_no_token']} cut no token",
        f"  {'':<8}" + "".join(f"{name:>10}" for name in ("right", "", *LENGTHS, "exact", "bits/byte", "no cut")),
    ]
    for name, way in found["ways"].items():
        cells = [
            way["right"],
            percent(way["rate"]),
            *map(percent, way["rate_by_length"].values()),
            percent(way["exact"]),
        ]
        cells += [way[key] for key in ("bits_per_byte", "bits_per_byte_no_token_cut") if way.get(key) is not None]
        lines.append(f"  {name:<8}" + "".join(f"{cell!s:>10}" for cell in cells))
    for pair in found["pairs"]:
        lines.append("  right with {way} alone: {only_way}; with {other} alone: {only_other}".format(**pair))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="as for starscope run")
    add("files", nargs="+", type=Path, help="text that the model has not seen")
    add("--holes", type=int, default=500, help="of each kind (default: %(default)s)")
    add("--kind", choices=[*KINDS, "both"], default="both")
    add("--order", choices=[*ORDERS, "both"], default="both")
    add("--seed", type=int, default=0)
    add("--engine", default="auto")
    add("--threads", type=int)
    add("--json", action="store_true")
    args = parser.parse_args()
    model = starscope.load(args.model, engine=args.engine, threads=args.threads)
    texts = [path.read_text(encoding="utf-8") for path in args.files]
    report = {}
    for name in KINDS if args.kind == "both" else [args.kind]:
        holes = choose_holes(texts, name, args.holes, args.seed)
        report[name] = measure(model, holes, KINDS[name], ORDERS if args.order == "both" else [args.order])
        if not args.json:
            print(table(KINDS[name], report[name]) + "\n", flush=True)
    if args.json:
        print(json.dumps({"model": str(args.model), "files": len(texts), "seed": args.seed, "kinds": report}, indent=2))


if __name__ == "__main__":
    main()
