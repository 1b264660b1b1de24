"""The model in the package is remade by one command, which goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import starscope

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo.py"
DEMO = Path(starscope.__file__).parent / "demo"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the script defines; `change` puts something else there."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    made = runpy.run_path(str(SCRIPT))
    names = made["main"].__globals__
    return SimpleNamespace(**made, change=lambda **others: names.update(others), names=names)


def line(step: int, stage: object = None, **changes: object) -> dict[str, object]:
    if stage is None:
        return {"step": step, "loss": 1.0}
    kept = vars(stage)
    return {"step": step, "run": {**kept, "precision": "bfloat16", **changes}}


def test_a_stage_is_under_way_until_its_last_step(script):
    ends = [stage.steps for stage in script.RECIPE]
    assert ends == sorted(set(ends))
    for number, stage in enumerate(script.RECIPE):
        assert script.stages_left(stage.steps - 1)[0] is stage
        assert script.stages_left(stage.steps) == list(script.RECIPE[number + 1 :])


def test_the_model_in_the_package_was_made_by_the_recipe(script):
    log = [json.loads(text) for text in (DEMO / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert script.is_recipe(log)
    assert script.commands(log) == "python scripts/train_demo.py --recipe"
    assert "```\npython scripts/train_demo.py --recipe\n```" in (DEMO / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_a_log_is_the_recipes_however_often_it_was_interrupted_and_not_with_another_step(script):
    a, b = (script.Stage(20, 70), script.Stage(40, 50, tests=1.0, short=True))
    recipe = (a, b)
    whole = [line(0, a), line(10), line(20), line(20, b), line(40)]
    assert script.is_recipe(whole, recipe)
    assert script.is_recipe([line(0, a), line(5, a, steps=90), line(20), line(20, b), line(33, b), line(40)], recipe)
    for wrong in (
        whole[:-1],  # not at its end
        [line(0, a), line(30), line(30, b), line(40)],  # the first one went on for too long
        [line(0, a), line(20), line(20, b, decay_steps=60), line(40)],
        [line(0, a, learning_rate=0.1), *whole[1:]],
        [line(0, a), line(20), line(20, a), line(40)],
        [],
    ):
        assert not script.is_recipe(wrong, recipe)


def test_the_recipe_goes_on_from_the_step_of_its_checkpoint(script, tmp_path):
    """Also after an end in the middle of a stage, and when everything was made already."""
    asked: list[tuple[int, int, bool, bool]] = []
    step, stop_at = 0, 7

    def train(args: argparse.Namespace, *, is_last: bool) -> int:
        nonlocal step
        asked.append((step, args.steps, args.resume, is_last))
        step = min(args.steps, stop_at) if step < stop_at else args.steps
        return 130 if step == stop_at else 0

    script.change(train=train, saved_step=lambda work: step)
    recipe = (script.Stage(5, 9), script.Stage(8, 9), script.Stage(12, 12, short=True))
    args = argparse.Namespace(work=tmp_path, steps=2000, minutes=3.0, resume=False)
    assert script.follow_recipe(args, recipe) == 130
    assert asked == [(0, 5, False, False), (5, 8, True, False)]
    stop_at = -1
    assert script.follow_recipe(args, recipe) == 0
    assert asked[2:] == [(7, 8, True, False), (8, 12, True, True)]
    assert script.follow_recipe(args, recipe) == 0
    assert asked[4:] == [(12, 12, True, True)]


def test_a_recipe_of_two_small_stages_trains_and_writes_the_model_once(script, tmp_path):
    """A model of the same form, of the library's smallest modules."""
    library = [tmp_path / "lib" / f"{name}.py" for name in ("a", "b", "test_c", "held")]
    library[0].parent.mkdir()
    for number, path in enumerate(library):
        path.write_text(
            f"def f{number}(x):\n    return x + {number}\n\n\nclass C{number}:\n    def g(self): ...\n" * 30
        )
    small = {"context_length": 64, "hidden_size": 32, "num_layers": 1, "intermediate_size": 32, "vocab_size": 300}
    names = script.names

    def documents(_share: float) -> tuple[list, list]:
        found = names["find_documents"]([library[0].parent], suffixes=[".py"]).documents
        return [one for one in found if "held" not in one.name], [one for one in found if "held" in one.name]

    script.change(
        VOCAB_SIZE=300,
        HPARAMS={**names["HPARAMS"], **small},
        DEMO=tmp_path / "demo",
        library=documents,
        say=lambda line: None,
    )
    recipe = (script.Stage(2, 5, batch_size=2), script.Stage(4, 4, tests=1.0, short=True, batch_size=2))
    args = argparse.Namespace(work=tmp_path / "work")
    assert script.follow_recipe(args, recipe[:1]) == 0  # stopped behind the first one
    first = (tmp_path / "demo" / "demo.gguf").stat().st_mtime_ns
    assert script.follow_recipe(args, recipe) == 0
    assert (tmp_path / "demo" / "demo.gguf").stat().st_mtime_ns > first
    log = [json.loads(text) for text in (tmp_path / "demo" / "log.jsonl").read_text().splitlines()]
    assert script.is_recipe(log, recipe)
    assert starscope.load(tmp_path / "demo" / "demo.gguf").hparams.hidden_size == 32
    assert "def f3" not in (tmp_path / "work" / "tokenizer.json").read_text()
