"""The writer leaves a whole file or nothing, says why, and never holds more than a few chunks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from starscope.errors import DoesNotFitError, GGUFError, OutputError, OutputExistsError
from starscope.formats import find_format
from starscope.gguf import OutputTensor, Value, ValueType, array, read_gguf, scalar, string, strings, u32, write_gguf
from starscope.gguf import writer as writer_module

F32 = find_format("f32")
META: dict[str, Value] = {"general.architecture": string("starcoder")}


def tensor(*chunks: np.ndarray | bytes, name: str = "w", shape: tuple[int, ...] = (2, 4)) -> OutputTensor:
    return OutputTensor(name, shape, F32, lambda: chunks or (bytes(F32.nbytes(shape)),))


def failing(error: BaseException) -> OutputTensor:
    def chunks() -> Iterator[bytes]:
        yield bytes(16)
        raise error

    return OutputTensor("w", (2, 4), F32, chunks)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# What it writes


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    meta = META | {"tokenizer.ggml.tokens": strings(["a", "b"])}
    tensors = [tensor(name="a"), tensor(np.ones((2, 4), np.float32), name="b")]
    for name in ("one", "two"):
        write_gguf(tmp_path / name, meta, tensors)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_tensors_follow_each_other_aligned_and_the_gaps_are_zeros(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    three = np.ones(3, np.float32)
    size = write_gguf(path, META, [tensor(three, name="a", shape=(3,)), tensor(three, name="b", shape=(3,))])
    with read_gguf(path) as file:
        first, second = file.tensors.values()
    assert second.offset == first.offset + 32
    assert path.read_bytes()[first.offset + 12 : second.offset] == bytes(20)
    assert path.stat().st_size == size == second.offset + 32


def test_chunks_of_any_kind_and_layout_are_written_as_their_values(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    chunks = (values.T[0], memoryview(values.T[1].tobytes()), b"", bytearray())
    write_gguf(tmp_path / "m.gguf", META, [tensor(*chunks)])
    with read_gguf(tmp_path / "m.gguf") as file:
        assert file.array("w").tolist() == values.T.tolist()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    steps: list[int] = []
    assert write_gguf(tmp_path / "m.gguf", META, [tensor()], progress=steps.append) == sum(steps)


def test_only_a_few_chunks_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, open_disk, write = 0, threading.Event(), os.write
    limit = writer_module.QUEUED_CHUNKS + 3  # being written, being made, and the header

    def slow_write(descriptor: int, data: bytes) -> int:
        assert open_disk.wait(10)
        return write(descriptor, data)

    def chunks() -> Iterator[bytes]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield bytes(4)

    def let_go() -> None:
        seen.append(made)
        open_disk.set()

    seen: list[int] = []
    monkeypatch.setattr(os, "write", slow_write)
    threading.Timer(0.3, let_go).start()
    write_gguf(tmp_path / "m.gguf", META, [OutputTensor("w", (100,), F32, chunks)])
    assert made == 100
    assert seen[0] <= limit


# What it refuses


@pytest.mark.parametrize(("chunks", "message"), [
    ((bytes(31),), "w gave only 31 bytes"),
    ((bytes(32), bytes(1)), "w gave more than 32 bytes"),
    ((np.zeros(4, np.float32),), "w gave only 16 bytes"),
    ((b"",), "w gave only 0 bytes"),
])  # fmt: skip
def test_chunks_that_do_not_sum_to_the_shape_are_refused(tmp_path: Path, chunks: tuple[bytes], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        write_gguf(tmp_path / "m.gguf", META, [tensor(*chunks)])
    assert files(tmp_path) == []


def test_no_chunk_past_the_end_is_asked_for(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (bytes(32), bytes(32))
        raise AssertionError("a third chunk was asked for")

    with pytest.raises(GGUFError, match="w gave more than 32 bytes"):
        write_gguf(tmp_path / "m.gguf", META, [OutputTensor("w", (2, 4), F32, chunks)])
    assert files(tmp_path) == []


@pytest.mark.parametrize(("meta", "tensors", "message"), [
    ({"General": u32(1)}, [], "only a-z"),
    ({"": u32(1)}, [], "a key of 0 bytes"),
    ({"k" * 65_536: u32(1)}, [], "a key of 65536 bytes"),
    ({"clé": u32(1)}, [], "only a-z"),
    ({"general.alignment": u32(12)}, [], "alignment is 12"),
    ({"general.alignment": scalar(ValueType.UINT64, 32)}, [], "expected UINT32"),
    ({"tokenizer.chat_template": string("x" * (1 << 20) + "x")}, [], "at most 1048576"),
    ({"a": array(ValueType.UINT8, np.zeros((1 << 24) + 1, np.uint8))}, [], "more than 16777216 elements"),
    (META, [tensor(name="w"), tensor(name="w")], "w would be written twice"),
    (META, [tensor(name="n" * 64)], "name of 64 bytes"),
    (META, [tensor(name="a/b")], "slashes"),
    (META, [tensor(name="\udcff")], "not UTF-8"),
    (META, [tensor(shape=())], "0 dimensions"),
    (META, [tensor(shape=(1, 1, 1, 1, 1))], "5 dimensions"),
    (META, [tensor(shape=(0, 4))], "at least 1"),
    (META, [OutputTensor("w", (2, 33), find_format("q8_0"), lambda: ())], "packs 32 at a time"),
    ({f"k{i}": u32(0) for i in range(65_537)}, [], "65537 metadata keys are too many"),
])  # fmt: skip
def test_what_the_reader_would_refuse_is_not_written(
    tmp_path: Path, meta: dict[str, Value], tensors: list[OutputTensor], message: str
) -> None:
    with pytest.raises(GGUFError, match=message):
        write_gguf(tmp_path / "m.gguf", meta, tensors)
    assert files(tmp_path) == []


# What is already there


def test_an_output_that_exists_is_kept_and_no_work_is_done(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(OutputExistsError, match=r"m\.gguf exists"):
        write_gguf(tmp_path / "m.gguf", META, [failing(AssertionError("work was done"))])
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


def test_force_replaces_the_output_and_a_failure_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="stop"):
        write_gguf(path, META, [failing(ValueError("stop"))], force=True)
    assert path.read_bytes() == b"mine"
    write_gguf(path, META, [tensor()], force=True)
    assert list(read_gguf(path).tensors) == ["w"]
    assert files(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_force_keeps_the_permissions_of_what_it_replaces(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    path.chmod(mode)
    meanwhile: list[int] = []

    def look(temporary: Path) -> None:
        meanwhile.append(temporary.stat().st_mode & 0o777)

    write_gguf(path, META, [tensor()], force=True, check=look)
    assert path.stat().st_mode & 0o777 == mode
    assert meanwhile == [0o600]


def test_a_new_file_has_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_gguf(tmp_path / "m.gguf", META, [tensor()], force=True)
    finally:
        os.umask(before)
    assert (tmp_path / "m.gguf").stat().st_mode & 0o777 == 0o640


def test_force_through_a_link_replaces_what_it_links_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.gguf").write_bytes(b"old")
    (tmp_path / "link.gguf").symlink_to("disk/real.gguf")
    write_gguf(tmp_path / "link.gguf", META, [tensor()], force=True)
    assert (tmp_path / "link.gguf").is_symlink()
    assert read_gguf(tmp_path / "disk" / "real.gguf").path.is_file()


def test_a_dangling_link_exists(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to("nowhere")
    with pytest.raises(OutputExistsError):
        write_gguf(tmp_path / "link.gguf", META, [tensor()])


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def chunks() -> Iterator[bytes]:
        path.write_bytes(b"theirs")
        yield bytes(32)

    with pytest.raises(OutputExistsError, match="created meanwhile"):
        write_gguf(path, META, [OutputTensor("w", (2, 4), F32, chunks)])
    assert path.read_bytes() == b"theirs"
    assert files(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_a_folder_or_a_pipe_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="cannot be replaced"):
        write_gguf(tmp_path / name, META, [tensor()], force=True)


# Where it cannot be written


@pytest.mark.parametrize("name", ["missing/m.gguf", "n" * 256, "zero\0byte", "file/m.gguf", "/proc/m.gguf"])
def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        write_gguf(tmp_path / name, META, [tensor()])
    assert files(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_output_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write_gguf(tmp_path / "m.gguf", META, [tensor()])


@pytest.mark.parametrize("name", ["n" * 250 + ".gguf", "模型 ünï.gguf", "é" * 127, os.fsdecode(b"\xff.gguf")])
def test_names_of_255_bytes_and_outside_ascii_are_written(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / name, META, [tensor()])
    assert list(read_gguf(tmp_path / name).tensors) == ["w"]
    assert files(tmp_path) == [name]


def test_a_path_as_long_as_the_system_allows_is_written(tmp_path: Path) -> None:
    room = os.pathconf(tmp_path, "PC_PATH_MAX") - 1 - len(os.fsencode(tmp_path)) - len("/m")
    folder = tmp_path
    while room > 1:
        step = min(room - 1, 200)
        folder, room = folder / ("d" * step), room - 1 - step
    try:
        folder.mkdir(parents=True)
    except OSError as error:  # the file system itself allows less
        pytest.skip(str(error))
    write_gguf(folder / "m", META, [tensor()])
    assert list(read_gguf(folder / "m").tensors) == ["w"]
    assert files(folder) == ["m"]


# What happens on the way


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), OSError(errno.EIO, "the source broke"), MemoryError()]
)
def test_a_failure_of_the_source_is_passed_on_and_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        write_gguf(tmp_path / "m.gguf", META, [tensor(name="a"), failing(error)])
    assert caught.value is error
    assert files(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name == "starscope-writer"]


@pytest.mark.parametrize(("number", "error", "message"), [
    (errno.ENOSPC, DoesNotFitError, r"needs 160 bytes, and its disk has [0-9]+ bytes free"),
    (errno.EDQUOT, DoesNotFitError, "needs 160 bytes"),
    (errno.EROFS, OutputError, "Read-only file system"),
    (errno.EIO, OutputError, "Input/output error"),
])  # fmt: skip
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failure_of_the_disk_is_said_in_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], message: str, call: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(error, match=message):
        write_gguf(tmp_path / "m.gguf", META, [tensor()])
    assert files(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_before_any_work(tmp_path: Path) -> None:
    huge = OutputTensor("w", (1 << 30, 1 << 20), F32, lambda: [failing(AssertionError("work was done"))])  # type: ignore[list-item]
    with pytest.raises(DoesNotFitError, match=r"needs 4503599627370624 bytes, and its disk has [0-9]+ bytes free"):
        write_gguf(tmp_path / "m.gguf", META, [huge])
    assert files(tmp_path) == []


def test_a_file_larger_than_the_process_may_write_is_an_output_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            write_gguf(tmp_path / "m.gguf", META, [tensor(shape=(1000,))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == []


PROGRAM = """
    import os, sys, time
    from starscope.errors import StarscopeError
    from starscope.formats import find_format
    from starscope.gguf import OutputTensor, write_gguf

    def chunks():
        for i in range(8):
            yield bytes(1 << 16)
            between(i)

    {body}

    try:
        write_gguf(sys.argv[1] + "/m.gguf", {{}}, [OutputTensor("w", (1 << 17,), find_format("f32"), chunks)])
    except StarscopeError as error:
        print(type(error).__name__, error.message)
    except KeyboardInterrupt:
        print("interrupted")
    print(os.listdir(sys.argv[1]))
"""


def program(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(PROGRAM).format(body=body)]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    waiting = program('between = lambda i: (print("ready", flush=True), time.sleep(30)) if i == 3 else None')
    with subprocess.Popen([*waiting, tmp_path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert len(files(tmp_path)) == 1
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == "interrupted\n[]\n"


def in_a_small_disk(folder: Path, body: str, kilobytes: int) -> str:
    """The output of PROGRAM writing into a tmpfs of its own mount namespace; skips where the machine allows none."""
    mount = f'mount -t tmpfs -o size={kilobytes}k tmpfs "$0" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, str(folder)]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    return subprocess.run([*inside, *program(body), str(folder)], capture_output=True, text=True, check=True).stdout


def test_a_disk_too_small_is_refused_with_both_sizes(tmp_path: Path) -> None:
    output = in_a_small_disk(tmp_path, 'between = lambda i: sys.exit("work was done")', 400)
    assert output == f"DoesNotFitError {tmp_path}/m.gguf needs 524352 bytes, and its disk has 409600 bytes free.\n[]\n"


def test_a_disk_that_fills_up_on_the_way_is_reported_and_left_clean(tmp_path: Path) -> None:
    body = 'between = lambda i: open(sys.argv[1] + "/other", "wb").write(bytes(300_000)) if i == 2 else None'
    output = in_a_small_disk(tmp_path, body, 600)
    assert output.startswith(f"DoesNotFitError {tmp_path}/m.gguf needs 524352 bytes, and its disk has ")
    assert output.endswith("\n['other']\n")
