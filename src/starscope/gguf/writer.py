"""Writing a GGUF file: whole or not at all, and the same bytes for the same input.

The tensors' bytes come as chunks that are made while the file is written, so that a model larger than memory passes
through. They go to a temporary file in the same folder, which takes the output's name only when all of it is on the
disk; whatever happens before that, the folder is left as it was. A thread writes while the caller makes the next chunk.

    weight = OutputTensor("token_embd.weight", (49152, 768), find_format("f16"), lambda: encoded_rows(checkpoint))
    write_gguf("model.gguf", {"general.architecture": string("starcoder")}, [weight])
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starscope.errors import DoesNotFitError, GGUFError, OutputError, OutputExistsError
from starscope.formats import Format
from starscope.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ARRAY_ELEMENTS,
    MAX_KEYS,
    MAX_TENSORS,
    VERSION,
    Value,
    ValueType,
    alignment_problem,
    key_problem,
    name_problem,
    padding,
    shape_problem,
    string_problem,
)

Chunk = NDArray[Any] | bytes | bytearray | memoryview

QUEUED_CHUNKS = 2
"""How many finished chunks may wait for the disk: one more is being written, another being made."""
WRITEBACK_BYTES = 32 << 20
"""How much is written before the kernel is asked to bring it to the disk; left alone, it waits for gigabytes."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written. `chunks` makes its bytes in order; a chunk must not change once it is handed over."""

    name: str
    shape: tuple[int, ...]  # torch order: [out in]
    format: Format
    chunks: Callable[[], Iterable[Chunk]]  # format.nbytes(shape) bytes in all


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Value],
    tensors: Sequence[OutputTensor],
    *,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Writes a GGUF file (version 3) and returns its size in bytes. `progress` is called with the bytes of each piece.

    `check` is given the finished file under its temporary name; when it raises, the file never takes the output's name.
    A file that is replaced leaves its permissions to the new one.

    Raises OutputExistsError, before anything else is done, when `path` exists and `force` is not given; GGUFError for
    metadata, tensors or chunks that would not make a valid file; DoesNotFitError when the disk is too small;
    OutputError when it cannot be written.
    """
    target = _target(Path(path), force)
    alignment = _alignment(metadata)
    sizes = [_checked_size(tensor) for tensor in tensors]
    header = _header(metadata, tensors, sizes, alignment)
    total = len(header) + sum(size + padding(size, alignment) for size in sizes)
    with _atomic_output(target, total, force, check) as output:
        for data in _contents(header, tensors, sizes, alignment):
            output.put(data)
            if progress is not None:
                progress(len(data))
    return total


def _contents(
    header: bytes, tensors: Sequence[OutputTensor], sizes: Sequence[int], alignment: int
) -> Iterator[memoryview | bytes]:
    """The bytes of the file, in order."""
    yield header
    for tensor, size in zip(tensors, sizes, strict=True):
        yield from _checked_chunks(tensor, size)
        if size % alignment:
            yield bytes(padding(size, alignment))


# What the file will hold


def _alignment(metadata: Mapping[str, Value]) -> int:
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    if problem := alignment_problem(metadata[ALIGNMENT_KEY]):
        raise GGUFError(f"{problem}.")
    return int.from_bytes(metadata[ALIGNMENT_KEY].payload, "little")


def _checked_size(tensor: OutputTensor) -> int:
    """The tensor's bytes, once its name and shape are known to be readable again."""
    problem = name_problem(tensor.name.encode("utf-8", "surrogatepass")) or shape_problem(
        tensor.shape, tensor.format.type_id
    )
    if problem:
        raise GGUFError(f"{tensor.name!r} cannot be written: {problem}.")
    return tensor.format.nbytes(tensor.shape)


def _checked_chunks(tensor: OutputTensor, size: int) -> Iterator[memoryview]:
    """The tensor's chunks as bytes; GGUFError when there are more or fewer than its shape and format say."""
    left = size
    for chunk in tensor.chunks():
        if isinstance(chunk, np.ndarray):
            chunk = memoryview(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        data = memoryview(chunk).cast("B")
        left -= len(data)
        if left < 0:
            break
        if data:
            yield data
    if left:
        found = f"more than {size}" if left < 0 else f"only {size - left}"
        raise GGUFError(f"{tensor.name} gave {found} bytes; {list(tensor.shape)} as {tensor.format.name} has {size}.")


def _header(
    metadata: Mapping[str, Value], tensors: Sequence[OutputTensor], sizes: Sequence[int], alignment: int
) -> bytes:
    """Everything before the tensors' bytes, padded to the alignment."""
    for count, most, what in ((len(metadata), MAX_KEYS, "metadata keys"), (len(tensors), MAX_TENSORS, "tensors")):
        if count > most:
            raise GGUFError(f"{count} {what} are too many; a file may have {most}.")
    if sum(value.count for value in metadata.values() if value.type is ValueType.ARRAY) > MAX_ARRAY_ELEMENTS:
        raise GGUFError(f"the arrays of the metadata have more than {MAX_ARRAY_ELEMENTS} elements together.")
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        name = key.encode("utf-8", "surrogatepass")
        problem = key_problem(name)
        if value.type is ValueType.STRING:
            problem = problem or string_problem(key, len(value.payload))
        if problem:
            raise GGUFError(f"the metadata cannot be written: {problem}.")
        parts += [_text(name), value.encoded()]
    offset, names = 0, set()
    for tensor, size in zip(tensors, sizes, strict=True):
        if tensor.name in names:
            raise GGUFError(f"the tensor {tensor.name} would be written twice.")
        names.add(tensor.name)
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name.encode()))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.format.type_id, offset))
        offset += size + padding(size, alignment)
    header = b"".join(parts)
    return header + bytes(padding(len(header), alignment))


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


# Where it goes


@contextlib.contextmanager
def atomic_output(
    path: str | os.PathLike[str], total: int, *, force: bool = False
) -> Iterator[Callable[[memoryview | bytes], None]]:
    """A file of `total` bytes of any format, written piece by piece with what is given; raises as `write_gguf` does.

    It appears under `path` at the end of the block, or never when the block fails.
    """
    with _atomic_output(_target(Path(path), force), total, force, None) as output:
        yield output.put


def _target(path: Path, force: bool) -> Path:
    """The file to replace or create: what `path` links to, if it is a link."""
    with _reasons(path):
        if not os.path.lexists(path):
            return path
        if not force:
            raise OutputExistsError(f"{path} exists.")
        real = Path(os.path.realpath(path)) if path.is_symlink() else path
        if real.exists() and not stat.S_ISREG(real.stat().st_mode):
            raise OutputError(f"{path} is {'a folder' if real.is_dir() else 'no regular file'} and cannot be replaced.")
        return real


@contextlib.contextmanager
def _reasons(path: Path) -> Iterator[None]:
    """Says an operating system's error about the output in starscope's words."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{path} cannot be written: {reason}.") from error


def _does_not_fit(path: Path, needed: int, free: int) -> DoesNotFitError:
    hint = "Free some space or choose another folder."
    return DoesNotFitError(f"{path} needs {needed} bytes, and its disk has {free} bytes free.", hint=hint)


@contextlib.contextmanager
def _atomic_output(path: Path, total: int, force: bool, check: Callable[[Path], None] | None) -> Iterator[_Output]:
    """An output of `total` bytes that appears under `path` at the end of the block, or never when the block fails.

    Names are given relative to the open folder: the temporary name may be longer than the output's without meeting the
    limit on paths, and a folder that is renamed meanwhile does no harm.
    """
    with _reasons(path):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".starscope-{secrets.token_hex(8)}"
    try:
        disk = os.fstatvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and total > free:  # some network file systems say nothing about their size
            raise _does_not_fit(path, total, free)
        with _reasons(path):
            replaced = _status(path.name, folder)
            mode = 0o666 if replaced is None else 0o600  # nobody may read on the way what they may not read at the end
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        output = _Output(path, descriptor, total)
        try:
            yield output
            output.finish()
        finally:
            output.close()
        if check is not None:
            check(path.with_name(temporary))
        with _reasons(path):
            if not force and _status(path.name, folder) is not None:
                raise OutputExistsError(f"{path} was created meanwhile.")
            if replaced is not None:
                with contextlib.suppress(OSError):  # some file systems have no permissions to set
                    os.chmod(temporary, stat.S_IMODE(replaced.st_mode) & 0o777, dir_fd=folder)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        with contextlib.suppress(OSError):  # the file is in place; not every file system can sync a folder
            os.fsync(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


class _Output:
    """A file that a thread of its own writes to, in the order given."""

    def __init__(self, path: Path, descriptor: int, total: int) -> None:
        self._path, self._descriptor, self._total = path, descriptor, total
        self._written = self._started = 0  # bytes written, bytes that the disk was asked to take
        self._failure: BaseException | None = None
        self._queue: queue.Queue[memoryview | bytes | None] = queue.Queue(QUEUED_CHUNKS)
        self._thread = threading.Thread(target=self._run, name="starscope-writer", daemon=True)
        self._thread.start()

    def put(self, data: memoryview | bytes) -> None:
        """Hands over a piece; waits while too many are on their way. Raises what the thread met."""
        self._check()
        self._queue.put(data)

    def finish(self) -> None:
        """Waits until everything is on the disk."""
        self._queue.put(None)
        self._thread.join()
        self._check()
        with self._mapped_errors():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Ends the thread and closes the file, whatever has been written."""
        try:
            if self._thread.is_alive():
                self._failure = self._failure or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                self._queue.put(None)
                self._thread.join()
        finally:
            os.close(self._descriptor)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._failure is None:  # after a failure the rest is only taken, so that nobody waits for room
                try:
                    self._write(data)
                except BaseException as error:
                    self._failure = error

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self._descriptor, view)
            view = view[count:]
            self._written += count
        fresh = self._written - self._started
        if fresh >= WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice; of dirty pages it says: begin to write them, and keep them
                os.posix_fadvise(self._descriptor, self._started, fresh, os.POSIX_FADV_DONTNEED)
            self._started = self._written

    def _check(self) -> None:
        if self._failure is not None:
            with self._mapped_errors():
                raise self._failure

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                disk = os.fstatvfs(self._descriptor)
                raise _does_not_fit(self._path, self._total, self._written + disk.f_bavail * disk.f_frsize) from error
            raise OutputError(f"{self._path} cannot be written: {error.strerror}.") from error
