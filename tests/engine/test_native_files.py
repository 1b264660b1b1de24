"""The native engine on files and the command line: the demo model in every type, damaged files, too little memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from starscope import load, native
from starscope.cli.app import app
from starscope.engine import native_engine
from starscope.errors import DoesNotFitError
from starscope.perplexity import measure_texts
from starscope.quantize import quantize
from starscope.recipes import RECIPES
from support.stored import make_graph, stored_weights

module = native.kernels()
assert module is not None, native.why_missing()
DEMO = Path(native_engine.__file__).parents[1] / "demo" / "demo.gguf"
HELD_OUT = Path(__file__).parents[1] / "data" / "held_out"
TEXTS = [(HELD_OUT / name).read_text(encoding="utf-8")[:1800] for name in ("sched.py", "copyreg.py")]
SAME_PERPLEXITY = 0.003  # of each other


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = module.isa()
    yield
    native.use_isa(before)


@pytest.mark.parametrize("to", RECIPES)
def test_the_demo_model_predicts_as_well_as_in_numpy_in_every_type(to: str, tmp_path: Path) -> None:
    path = quantize(DEMO, tmp_path / "demo.gguf", to=to).out
    found, expected = (
        measure_texts(model.engine, model.tokenizer, TEXTS).perplexity
        for model in (load(path, engine="native"), load(path, engine="numpy"))
    )
    assert abs(found / expected - 1) <= (1e-5 if to == "F32" else SAME_PERPLEXITY)


CUT = """
import os, sys
import numpy as np
from starscope.engine.native_engine import NativeEngine, Reader
from starscope.engine.weights import open_weights
from starscope.errors import StarscopeError
from starscope.family import find_family_of_file, hparams_from_metadata
from starscope.gguf.reader import read_gguf
from starscope.graph import record
path, size, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
file = read_gguf(path)
family = find_family_of_file(file)
hp, weights = open_weights(file, family, hparams_from_metadata(family, file))
if when == "while":  # the first matrix is there, and what was mapped of the file with it
    fill = Reader.fill
    def cut_then_fill(self, matrix, *arguments, **options):
        if matrix == 1:
            os.truncate(path, size)
        fill(self, matrix, *arguments, **options)
    Reader.fill = cut_then_fill
elif when == "before":
    os.truncate(path, size)
try:
    engine = NativeEngine(record(family, hp), weights)
    os.truncate(path, size)
    engine.forward([np.arange(300)])
    print("ran")
except StarscopeError as error:
    print(type(error).__name__, "ends at byte" in str(error) or "has" in str(error))
"""


@pytest.mark.parametrize("when", ["before", "while", "after"])
@pytest.mark.parametrize("kept", [0.0, 0.07, 0.5, 0.999])
def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(when: str, kept: float, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(DEMO.read_bytes())
    size = int(path.stat().st_size * kept)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CUT, str(path), str(size), when],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    # Once it is loaded, the positions' rows alone are read from the file, if they are past its end.
    assert said[-1] == "True" or (when == "after" and said == ["ran"]), done.stdout


def test_too_little_memory_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph()
    weights = stored_weights(graph, "Q5_0")  # kept as float32

    def nothing_is_read(*_arguments: object) -> None:
        raise AssertionError

    matrices = [s for s in weights.slots.values() if len(s.shape) == 2 and not s.always_f32 and s.tied_to is None]
    needed = sum(4 * int(np.prod(slot.shape)) for slot in matrices)
    monkeypatch.setattr(native_engine, "free_memory", lambda: needed)
    native_engine.NativeEngine(graph, weights)
    monkeypatch.setattr(weights, "read_stored", nothing_is_read)
    monkeypatch.setattr(native_engine, "free_memory", lambda: needed - 1)
    with pytest.raises(DoesNotFitError, match=r"the weights need [\d.]+ KiB of memory; [\d.]+ KiB are free"):
        native_engine.NativeEngine(graph, weights)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_line_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("run", "demo", "x", "-t", "0")[0] == 2
    status, _, said = run("run", "demo", "x", "--isa", "sse9")
    assert status == 4
    assert "'sse9' cannot be used here; expected one of scalar" in said
    monkeypatch.setattr(native_engine, "free_memory", lambda: 10**6)
    status, out, said = run("run", "demo", "x", "-n", "1")
    assert (status, out) == (5, "")
    assert "the weights need 4.1 MiB of memory; 976.6 KiB are free." in said


def test_an_instruction_set_for_another_engine_is_a_usage_error() -> None:
    before = module.isa()
    for verb in (["run", "demo", "x"], ["perplexity", "demo", __file__], ["bench", "demo"], ["demo"]):
        for options in (["--engine", "numpy"], ["--engine", "torch"], ["--device", "cuda"]):
            status, out, said = run(*verb, "--isa", "scalar", *options)
            assert (status, out) == (2, "")
            other = "numpy" if "numpy" in options else "torch"
            assert f"but the {other} engine would run" in said
    assert module.isa() == before  # nothing has been changed on the way
    assert "Instruction set for the native engine" in " ".join(run("run", "--help")[1].split())


def test_every_instruction_set_writes_the_same_text() -> None:
    prompt = "import os\n\n\ndef read(path):\n    "
    texts = {
        isa: run("run", "demo", prompt, "-n", "24", "-q", "--isa", isa, "--engine", "native")[:2]
        for isa in module.isas()
    }
    assert set(texts.values()) == {(0, texts["scalar"][1])}
    assert len(texts["scalar"][1].strip()) > 20


def test_running_on_the_cpu_imports_no_torch() -> None:
    code = (
        "import sys; from starscope.cli.app import app\n"
        "try: app(['run', 'demo', 'def ', '-n', '1', '-q'])\n"
        "except SystemExit as status: print(status.code, 'torch' in sys.modules, 'starscope.engine.native_engine' in"
        " sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == "0 False True"
