"""Whatever is read, in whatever order and at whichever step, nothing else is different for it; on every engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import starscope
from starscope.engine import ENGINES
from starscope.errors import OutOfOrder
from support.traces import read, same, value_names, write

PROMPT = [40, 33, 250, 7, 61, 33, 250, 100, 9]
OTHER = [12, 301, 5]
STEPS = 4
COUNT = 56  # values of three blocks, and those of the model

Action = tuple[str, int]  # what is done, and with which value: by its place among all names
READ = st.tuples(st.just("read"), st.integers(0, COUNT - 1))
CHANGE = st.tuples(st.sampled_from(["in place", "assign", "read"]), st.integers(0, COUNT - 1))
FEW = st.lists(READ, max_size=5)
# The same reads step after step are foreseen; whatever comes between them is not.
READS = st.one_of(
    FEW.map(lambda one: [sorted(one, key=lambda a: a[1])] * STEPS), st.lists(FEW, min_size=STEPS, max_size=STEPS)
)
CHANGES = st.lists(st.lists(CHANGE, max_size=3), min_size=STEPS, max_size=STEPS)
engines = pytest.mark.parametrize("engine", list(ENGINES))
types = pytest.mark.parametrize("to", ["f32", "q8_0"])


def run(model: starscope.Model, prompts: Any, program: list[list[Action]]) -> tuple[list[Any], list[Any], Any]:
    """The logits of each step, what came of each action, and the ids."""
    names = value_names(model)
    assert len(names) == COUNT
    logits, outcomes = [], []
    with model.trace(prompts, max_new_tokens=STEPS, logit_bias=dict.fromkeys(model.tokenizer.stop_ids, -1e9)) as t:
        for step in t.steps():
            furthest = -1
            for kind, which in program[step]:
                name = names[which]
                try:
                    if kind == "read":
                        outcomes.append(read(model, name).clone())
                    elif kind == "assign":
                        write(model, name, read(model, name) * 1.5)
                        outcomes.append("assigned")
                    elif which > furthest:  # what was passed would be late
                        read(model, name)[...] *= 1.5
                        outcomes.append("changed")
                except OutOfOrder:
                    outcomes.append("out of order")
                furthest = max(which, furthest)
            logits.append(model.logits[:, -1].clone())
    return logits, outcomes, t.result


def assert_same_runs(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


@engines
@types
@given(reads=READS, batch=st.booleans())
@settings(max_examples=25)
def test_reading_changes_no_logit_of_any_step(opened: Any, engine: str, to: str, reads: Any, batch: bool) -> None:
    model, prompts = opened(engine, to), [PROMPT, OTHER] if batch else [PROMPT]
    plain, _, ids = run(model, prompts, [[]] * STEPS)
    found, _, watched_ids = run(model, prompts, reads)
    assert_same_runs(found, plain)
    assert same(watched_ids, ids)


@engines
@types
@given(reads=READS, changes=CHANGES, batch=st.booleans())
@settings(max_examples=25)
def test_reading_beside_changes_changes_nothing_more(
    opened: Any, engine: str, to: str, reads: Any, changes: Any, batch: bool
) -> None:
    model, prompts = opened(engine, to), [PROMPT, OTHER] if batch else [PROMPT]
    edits = [sorted((a for a in step if a[0] != "read"), key=lambda a: a[1]) for step in changes]
    both = [sorted([*r, *e], key=lambda a: (a[1], a[0] == "read")) for r, e in zip(reads, edits, strict=True)]
    alone, _, ids = run(model, prompts, edits)
    found, outcomes, watched_ids = run(model, prompts, both)
    assert not any(isinstance(one, str) and one == "out of order" for one in outcomes)
    assert_same_runs(found, alone)
    assert same(watched_ids, ids)


@given(program=st.lists(st.lists(CHANGE, max_size=6), min_size=STEPS, max_size=STEPS))
@settings(max_examples=40)
def test_what_is_out_of_order_is_so_on_every_engine(opened: Any, program: Any) -> None:
    found = {}
    for engine in ENGINES:
        _, outcomes, _ = run(opened(engine, "f32"), [PROMPT], program)
        found[engine] = [one if isinstance(one, str) else list(one.shape) for one in outcomes]
    assert found["native"] == found["numpy"] == found["torch"]


@engines
@given(reads=READS, at=st.integers(1, STEPS - 1), which=st.integers(0, COUNT - 1))
@settings(max_examples=25)
def test_an_edit_that_nobody_foresaw_is_as_if_foreseen(
    opened: Any, engine: str, reads: Any, at: int, which: int
) -> None:
    # Steps that read alike, one of which changes what it had only read before.
    model = opened(engine, "q8_0")
    edits: list[list[Action]] = [[] for _ in range(STEPS)]
    edits[at] = [("in place", which)]
    program = [[("read", i) for i in sorted({w for _, w in reads[0]} | {which})] for _ in range(STEPS)]
    program[at] = [(("in place" if i == which else "read"), i) for _, i in program[at]]
    alone, _, ids = run(model, [PROMPT], edits)
    found, _, watched = run(model, [PROMPT], program)
    assert_same_runs(found, alone)
    assert same(watched, ids)
