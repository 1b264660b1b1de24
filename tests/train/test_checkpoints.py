"""At every moment a whole checkpoint is on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from starscope.errors import DoesNotFitError, InputError, InvalidContentError
from starscope.train import checkpoints
from starscope.train.checkpoints import CURRENT, PREVIOUS, State, load_checkpoint, read_checkpoint, save_checkpoint


def state(step: int) -> State:
    return State(step, {"parameter:a.weight": np.full((3, 4), step, np.float32)}, {"seed": 7})


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    save_checkpoint(tmp_path / "new", state(5))
    found, note = load_checkpoint(tmp_path / "new")
    assert (found.step, dict(found.facts), note) == (5, {"seed": 7}, "")
    assert (found.arrays["parameter:a.weight"] == 5).all()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [CURRENT]


def test_the_previous_one_is_kept(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, state(step))
    assert read_checkpoint(tmp_path / CURRENT).step == 3
    assert read_checkpoint(tmp_path / PREVIOUS).step == 2


@pytest.mark.parametrize("renamed", [0, 1])
def test_an_interrupt_before_either_rename_leaves_a_whole_checkpoint(tmp_path, monkeypatch, renamed):
    save_checkpoint(tmp_path, state(1))
    real, calls = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > renamed:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(2))
    found, note = load_checkpoint(tmp_path)
    assert found.step == 1
    assert ("The previous checkpoint is used" in note) == bool(renamed)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-10], lambda raw: raw[:-1] + b"x", lambda raw: b"", lambda raw: b"z" * 99]
)
def test_a_damaged_checkpoint_is_told_and_the_previous_one_used(tmp_path, damage):
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    path = tmp_path / CURRENT
    path.write_bytes(damage(path.read_bytes()))
    found, note = load_checkpoint(tmp_path)
    assert found.step == 1
    assert "is not a whole checkpoint" in note
    (tmp_path / PREVIOUS).unlink()
    with pytest.raises(InvalidContentError, match="is not a whole checkpoint"):
        load_checkpoint(tmp_path)


def test_no_checkpoint_at_all_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(1))
    monkeypatch.setattr(
        checkpoints.os, "statvfs", lambda _: type("Full", (), {"f_blocks": 9, "f_bavail": 0, "f_frsize": 4096})
    )
    with pytest.raises(DoesNotFitError, match="has 0 bytes free; a checkpoint needs"):
        save_checkpoint(tmp_path, state(2))
    assert load_checkpoint(tmp_path)[0].step == 1


def test_a_disk_that_fills_up_while_writing_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(1))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(DoesNotFitError, match=r"checkpoint\.bin cannot be written: the disk is full"):
        save_checkpoint(tmp_path, state(2))
    assert load_checkpoint(tmp_path)[0].step == 1
    assert [path.name for path in tmp_path.iterdir()] == [CURRENT]


def test_a_file_system_that_says_nothing_about_its_size_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoints.os, "statvfs", lambda _: type("Silent", (), {"f_blocks": 0, "f_bavail": 0, "f_frsize": 4096})
    )
    save_checkpoint(tmp_path, state(1))
    assert load_checkpoint(tmp_path)[0].step == 1


def test_what_is_asked_of_the_disk_is_at_least_what_is_written(tmp_path, monkeypatch):
    arrays = {f"exp_avg_sq:layers.{i}.post_attention_layernorm.weight": np.zeros(i, np.float32) for i in range(200)}
    monkeypatch.setattr(
        checkpoints.os, "statvfs", lambda _: type("Full", (), {"f_blocks": 9, "f_bavail": 0, "f_frsize": 4096})
    )
    with pytest.raises(DoesNotFitError) as refused:
        save_checkpoint(tmp_path, State(1, arrays, {"notes": "x" * 1000}))
    needed = int(refused.value.message.split()[-1].rstrip("."))
    monkeypatch.undo()
    save_checkpoint(tmp_path, State(1, arrays, {"notes": "x" * 1000}))
    written = (tmp_path / CURRENT).stat().st_size
    assert written <= needed <= written + 300_000


def test_a_checkpoint_cut_anywhere_is_never_taken_for_the_newest(tmp_path):
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    raw = (tmp_path / CURRENT).read_bytes()
    for length in range(0, len(raw), 97):
        (tmp_path / CURRENT).write_bytes(raw[:length])
        assert load_checkpoint(tmp_path)[0].step == 1
