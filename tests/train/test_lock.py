"""The lock on a run's folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from starscope.errors import OutputError
from starscope.train import lock
from starscope.train.lock import held

CHILD = """
import sys
from pathlib import Path
from starscope.train.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_until_it_ends_even_when_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(OutputError, match=r"another run is at work in .*run"), held(folder):
        pass
    child.kill()
    child.communicate()
    with held(folder):
        assert list(folder.iterdir()) == []


def test_a_folder_into_which_nothing_was_put_is_gone_again_and_others_stay(tmp_path):
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b").exists()
    with held(tmp_path / "c"):
        (tmp_path / "c" / "file").touch()
    assert (tmp_path / "c" / "file").exists()
    (tmp_path / "old").mkdir()
    with held(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: Not a directory"), held(tmp_path / "file" / "run"):
        pass


def test_where_there_are_no_locks_nothing_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    with held(tmp_path), held(tmp_path):
        pass
