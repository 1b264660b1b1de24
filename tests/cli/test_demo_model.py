"""What the README says of the model in the package, on the text that was held out of its training."""

from __future__ import annotations

import json
import lzma
import runpy
from pathlib import Path

import pytest

from starscope.train.split import name_fraction

TESTS = Path(__file__).parent.parent
HELD_OUT = sorted((TESTS / "data" / "held_out").glob("*.py"))
MOST_BYTES = 300_000
ROOM = 0.9  # of the compressor's bits per byte: the model may need no more


@pytest.fixture(scope="module")
def script():
    """What scripts/train_demo.py defines."""
    return runpy.run_path(str(TESTS.parent / "scripts" / "train_demo.py"))


def name_in_library(path: Path) -> str:
    return path.stem.replace(".", "/") + path.suffix


def test_the_held_out_text_is_small_and_chosen_by_the_rule_that_training_follows(script):
    assert len(HELD_OUT) >= 10
    assert sum(path.stat().st_size for path in HELD_OUT) <= MOST_BYTES
    for path in HELD_OUT:
        name = name_in_library(path)
        assert name_fraction(name) < script["HELD_OUT"], name
        assert not script["is_test"](name), name


def test_the_model_is_told_of_exactly_these_files_as_held_out():
    import starscope

    card = (Path(starscope.__file__).parent / "demo" / "MODEL_CARD.md").read_text(encoding="utf-8")
    names = card.split(" are below ")[1].split(".\n\n")[0]
    assert sorted(names.split("`")[1::2]) == sorted(map(name_in_library, HELD_OUT))


def test_the_demo_model_needs_fewer_bits_per_byte_than_xz_with_room_to_spare(cli):
    # Windows that do not overlap take two thirds of the time of the command's default, and give a little more bits.
    result = cli("perplexity", "demo", *HELD_OUT, "--stride", 512, "--json")
    found = json.loads(result.stdout)
    text = b"".join(path.read_bytes() for path in HELD_OUT)
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    assert found["bytes"] == len(text)
    assert found["bits_per_byte"] < ROOM * 8 * len(packed) / len(text)
