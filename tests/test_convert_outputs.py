"""Where a conversion writes: all of a file or nothing, whatever stands in the way and whenever it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from starscope.checkpoint import Checkpoint
from starscope.convert import convert
from starscope.errors import OutputError, OutputExistsError, UsageError
from starscope.gguf import read_gguf
from starscope.quantize import quantize
from support.checkpoints import make_checkpoint
from support.users import ordinary_user, reachable_folder

CHILD = """
import json, os, sys
from starscope.convert import convert
from starscope.errors import StarscopeError
try:
    convert(sys.argv[1], sys.argv[2])
    result = {}
except StarscopeError as error:
    result = {"kind": type(error).__name__, "message": str(error), "status": error.exit_status}
print(json.dumps({**result, "left": sorted(os.listdir(os.path.dirname(sys.argv[2])))}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_checkpoint(folder, shards=2)
    return folder


def test_an_output_that_exists_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match=r"out\.gguf exists\. Use --force"):
        convert(source, out)
    assert out.read_bytes() == b"precious"
    convert(source, out, force=True)
    assert read_gguf(out).tensors
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_an_output_that_exists_is_refused_before_any_tensor_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    (tmp_path / "out.gguf").touch()
    monkeypatch.setattr("starscope.checkpoint.WeightFile.read_into", read)
    monkeypatch.setattr("starscope.convert.open_checkpoint", lambda *_, **__: Checkpoint(source, {}, None, {}))
    with pytest.raises(OutputExistsError):
        convert(source, tmp_path / "out.gguf")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00003.safetensors"])
def test_an_input_is_never_overwritten(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shards=2)
    before = (tmp_path / name).read_bytes()
    (tmp_path / "link.gguf").symlink_to(tmp_path / name)
    os.link(tmp_path / name, tmp_path / "hard.gguf")
    for out in (tmp_path / name, tmp_path / "link.gguf", tmp_path / "hard.gguf"):
        with pytest.raises(UsageError, match="is an input of this conversion"):
            convert(tmp_path, out, force=True)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("out", ["no/such/folder/out.gguf", "file/out.gguf", "n" * 300 + ".gguf", "a\0b.gguf"])
def test_an_output_that_cannot_be_made_is_one_sentence(out: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: "):
        convert(source, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_no_output(source: Path, tmp_path: Path) -> None:
    for force in (False, True):
        with pytest.raises(OutputError, match="is a folder; expected the name of a file"):
            convert(source, tmp_path, force=force)


@pytest.mark.parametrize("folder", ["Modèle « 模型 » 🌟", "ü" * 120, "/".join(["d" * 200] * 15)])
def test_unusual_paths_work_for_source_and_output(folder: str, tmp_path: Path) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True)
    make_checkpoint(place)
    assert read_gguf(convert(place, verify=True).out).tensors
    assert read_gguf(convert(place, place / f"{'ñ' * 100}.gguf", verify=True).out).tensors


def test_a_folder_that_may_not_be_written_is_one_sentence() -> None:
    with reachable_folder() as folder:
        make_checkpoint(folder)
        convert(folder).out.unlink()  # imports what an ordinary user might not be allowed to
        for path in folder.iterdir():
            path.chmod(0o644)
        folder.chmod(0o555)
        before = sorted(folder.iterdir())
        with (
            ordinary_user(),
            pytest.raises(OutputError, match=r"ggml-model-f16\.gguf cannot be written: Permission denied\.$"),
        ):
            convert(folder)
        assert sorted(folder.iterdir()) == before


IGNORES_FREE_SPACE = """
import os
real = os.fstatvfs
def boastful(descriptor):
    found = list(real(descriptor))
    found[3] = found[4] = 1 << 40
    return os.statvfs_result(found)
os.fstatvfs = boastful
"""


@pytest.mark.parametrize("known", [True, False], ids=["seen beforehand", "found while writing"])
def test_a_full_disk_leaves_nothing(known: bool, source: Path, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=100k tmpfs '{tmp_path}' && exec \"$@\""
    namespace = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    try:
        probe = subprocess.run([*namespace, "true"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {probe.stderr.strip()}")
    code = CHILD if known else IGNORES_FREE_SPACE + CHILD
    command = [*namespace, sys.executable, "-c", code, str(source), str(tmp_path / "out.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kind"], result["status"], result["left"]) == ("DoesNotFitError", 5, [])
    assert "out.gguf needs " in result["message"]


# Progress, and stopping


@pytest.mark.parametrize("verify", [False, True])
def test_progress_counts_up_to_its_total(verify: bool, source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    convert(source, tmp_path / "out.gguf", verify=verify, progress=lambda *counts: told.append(counts))
    total = told[0][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
    assert all(of == total for _, of in told)


class Enough(BaseException):
    """Stops a conversion from inside, as Ctrl-C and a signal do."""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Enough])
@pytest.mark.parametrize("verify", [False, True])
def test_stopping_at_any_moment_leaves_the_folder_as_it_was(
    verify: bool, stop: type[BaseException], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    calls: list[int] = []
    convert(source, tmp_path / "count.gguf", verify=verify, progress=lambda done, _: calls.append(done))
    (tmp_path / "count.gguf").unlink()
    for moment in range(1, len(calls) + 1, 3):
        left = [moment]

        def progress(done: int, total: int, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise stop

        with pytest.raises(stop):
            convert(source, out, verify=verify, force=True, progress=progress)
        assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
        assert out.read_bytes() == b"before"


SLOW = """
import sys, time
from starscope.convert import convert
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.02)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_an_interrupt_from_the_keyboard_leaves_nothing(wait_s: float, source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "out.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it is writing
        assert [path.name[:11] for path in tmp_path.iterdir()] == [".starscope-"]
        time.sleep(wait_s)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode in (-signal.SIGINT, 130), errors
    assert "KeyboardInterrupt" in errors
    assert not list(tmp_path.iterdir())


def test_quantizing_stopped_leaves_nothing_either(source: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    made = convert(source, tmp_path / "f16.gguf").out
    with pytest.raises(KeyboardInterrupt):
        quantize(made, tmp_path / "q8_0.gguf", to="q8_0", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["f16.gguf"]
