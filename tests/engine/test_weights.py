"""Weights are read from their file, never through a mapping: cutting the file gives an error, not the process's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import starscope
from starscope.convert import convert
from starscope.engine.base import ENGINES
from starscope.engine.weights import GGUFSource
from starscope.errors import GGUFError, InputError
from starscope.gguf import read_gguf
from starscope.gguf.reader import GGUFFile
from support.checkpoints import make_checkpoint

ROWS = [5, 0, 319, 5]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as F32, as Q8_0, and as F32 with a copy of the key and value head for every query head."""
    folder = tmp_path_factory.mktemp("weights")
    make_checkpoint(folder)
    return {
        "F32": convert(folder, folder / "f32.gguf", to="f32").out,
        "Q8_0": convert(folder, folder / "q8_0.gguf", to="q8_0").out,
        "copies": convert(folder, folder / "copies.gguf", to="f32", expand_mqa=True).out,
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "copies"])
def test_a_model_is_loaded_and_run_without_the_mapping(
    engine: str, kind: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = starscope.load(files["F32" if kind == "copies" else kind], engine=engine).forward([1, 2, 3])

    def touched(*_arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(GGUFFile, "raw_rows", touched)
    model = starscope.load(files[kind], engine=engine)
    assert model.num_kv_heads == 1
    assert np.array_equal(model.forward([1, 2, 3]), expected)


CUT = """
import os, sys
import starscope
from starscope.errors import StarscopeError
path, engine, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = starscope.load(path, engine=engine)
model.forward([1, 2, 3])
os.truncate(path, size)
try:
    model.forward([4, 5, 6])
    print("ran")
except StarscopeError as error:
    print(type(error).__name__, "ends at byte" in str(error))
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [0, 20_000])
def test_a_file_that_is_cut_under_a_running_model_ends_no_process(
    engine: str, size: int, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(files["F32"].read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(path), engine, str(size)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The native and the NumPy engine look a row up where it is needed; torch has all of them.
    assert done.stdout == ("ran\n" if engine == "torch" else "GGUFError True\n"), done.stdout


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rows_are_those_of_the_whole_table(kind: str, files: dict[str, Path]) -> None:
    with read_gguf(files[kind]) as file:
        slot = next(s for s in starscope.load(files[kind]).weights.slots.values() if s.name == "embed_tokens.weight")
        source = GGUFSource(file, {})
        assert np.array_equal(source.read_rows(slot, np.array(ROWS)), source.read(slot)[ROWS])
        assert np.array_equal(source.read(slot), file.array(slot.gguf))
        for rows in ([320], [-1], [0, 320]):
            with pytest.raises(GGUFError, match="has 320 rows"):
                source.read_rows(slot, np.array(rows))
    with pytest.raises(InputError, match="is closed"):
        source.read_rows(slot, np.array(ROWS))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rows_asked_for_one_by_one_are_the_tables_own_whatever_is_read_along(kind: str, files: dict[str, Path]) -> None:
    weights = starscope.load(files[kind], engine="native").weights
    table = weights["embed_positions.weight"].copy()
    weights.forget("embed_positions.weight")
    last = len(table) - 1
    for row in (3, 4, 5, 6, 40, 5, 6, 7, *range(last - 40, last + 1), last, 0, 1):
        [read] = weights.rows("embed_positions.weight", np.array([row]))
        assert np.array_equal(read, table[row])
        read[:] = 0  # whoever has it may change it
