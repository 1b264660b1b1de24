"""PyTorch files (pytorch_model.bin) in the zip form that torch.save has written since 1.6.

The archive holds `data.pkl`, which says what the tensors are, and one uncompressed entry `data/<key>` for each
storage. The first is read as data by a machine of our own, the others row by row where they lie: no pickle module,
no torch, and no more memory than for safetensors. Tensors may share a storage.

    read_torch_bin(Path("pytorch_model.bin"))["transformer.wte.weight"].read_rows(0, 16)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from starscope.checkpoint.content import cut, short
from starscope.checkpoint.files import WeightFile
from starscope.checkpoint.tensor import DTYPE_BITS, StoredTensor, view
from starscope.checkpoint.unpickler import PICKLE_LIMIT, View, read_state_dict
from starscope.errors import CheckpointError, UnsupportedError

DIRECTORY_LIMIT = 64 << 20  # bytes; about 600,000 entries
END, END64, LOCATOR64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
ENTRY, LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
IS_LARGE = 0xFFFFFFFF  # in place of a size or an offset that a ZIP64 field has
ZIP64_FIELD = 1
ENCRYPTED = 1  # a bit of an entry's flags
AGAIN = "Download it again."
RESAVE = (
    "Save it again with a newer torch: torch.save(torch.load(FILE, weights_only=True), FILE), or with transformers: "
    "model.save_pretrained(FOLDER, safe_serialization=True)."
)


@dataclass(frozen=True)
class Entry:
    """Where an entry's bytes lie in the file."""

    offset: int
    size: int


def read_torch_bin(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of its state dict; only what describes them is read.

    UnsupportedError for older forms and for anything that is not a tensor, CheckpointError for a file that is
    damaged or contradicts itself.
    """
    file = WeightFile(path)
    _check_is_zip(file)
    entries = _read_entries(file)
    folder = _find_folder(path, entries)
    order = entries.get(f"{folder}/byteorder")
    if order is not None and (found := _read_entry(file, order, 16)) != b"little":
        raise UnsupportedError(f"{path} has byte order {found!r}; supported: b'little'.", hint=RESAVE)
    state = read_state_dict(_read_entry(file, entries[f"{folder}/data.pkl"], PICKLE_LIMIT), f"{path}: data.pkl")
    return {name: _place(file, name, tensor, folder, entries) for name, tensor in state.items()}


def _place(file: WeightFile, name: str, tensor: View, folder: str, entries: dict[str, Entry]) -> StoredTensor:
    """The tensor in the bytes of its storage, which must be there and hold all of it."""
    where, storage = f"{file.path}: {cut(name)}", tensor.storage
    entry = entries.get(f"{folder}/data/{storage.key}")
    if entry is None:
        raise CheckpointError(f"{where} is in storage {short(storage.key)}, which the file does not have.")
    itemsize = DTYPE_BITS[storage.dtype] // 8
    if entry.size != storage.size * itemsize:
        expected = f"{storage.size * itemsize} for {storage.size} of {storage.dtype}"
        raise CheckpointError(f"{where} is in a storage of {entry.size} bytes; expected {expected}.")
    steps = zip(tensor.shape, tensor.strides, strict=True)
    end = 0 if 0 in tensor.shape else 1 + tensor.offset + sum((size - 1) * stride for size, stride in steps)
    if end > storage.size:
        raise CheckpointError(f"{where} reaches to element {end} of a storage of {storage.size}.")
    at = entry.offset + tensor.offset * itemsize
    return view(StoredTensor(name, storage.dtype, tensor.shape, at, file), tensor.strides)


def _check_is_zip(file: WeightFile) -> None:
    head = _read(file, 0, min(file.size, 4))
    if head == b"PK\x03\x04":
        return
    if head.startswith(b"\x80") or b"ustar" in _read(file, 0, min(file.size, 512)):
        raise UnsupportedError(
            f"{file.path} has the form that torch.save wrote before 1.6; supported: zip.", hint=RESAVE
        )
    raise CheckpointError(f"{file.path} is not a PyTorch file: it starts with {head!r}; expected b'PK\\x03\\x04'.")


def _find_folder(path: Path, entries: dict[str, Entry]) -> str:
    """The one folder that everything in the archive is in."""
    folders = {name.partition("/")[0] for name in entries}
    folder = min(folders, default="")
    if len(folders) != 1 or f"{folder}/data.pkl" not in entries:
        raise CheckpointError(
            f"{path} has no data.pkl in the one folder of its archive; expected what torch.save writes."
        )
    if f"{folder}/constants.pkl" in entries:
        raise UnsupportedError(f"{path} is a TorchScript program; expected tensors.", hint=RESAVE)
    return folder


def _read(file: WeightFile, offset: int, size: int) -> bytes:
    data = bytearray(size)
    file.read_into(memoryview(data), offset)
    return bytes(data)


def _read_entry(file: WeightFile, entry: Entry, limit: int) -> bytes:
    if entry.size > limit:
        raise CheckpointError(f"{file.path} has an entry of {entry.size} bytes; expected at most {limit}.")
    return _read(file, entry.offset, entry.size)


def _read_entries(file: WeightFile) -> dict[str, Entry]:
    """Every entry of the archive, after checks: stored as is, each where it says, none over another."""
    start, size, count = _find_directory(file)
    directory = _read(file, start, size)
    entries: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        if at + ENTRY.size > size:
            raise CheckpointError(f"{file.path} lists fewer than the {count} entries that it says it has.", hint=AGAIN)
        signature, _, _, flags, method, *_, packed, length, n_name, n_extra, n_comment, _, _, _, offset = (
            ENTRY.unpack_from(directory, at)
        )
        raw_name = directory[at + ENTRY.size :][:n_name] if n_name < 4096 else b""
        extra_at = at + ENTRY.size + n_name
        extra = directory[extra_at : extra_at + n_extra]
        at = extra_at + n_extra + n_comment
        if signature != b"PK\x01\x02" or not raw_name or at > size:
            raise CheckpointError(f"{file.path} has a damaged list of entries.", hint=AGAIN)
        name = _checked_name(file, raw_name)
        if method or packed != length or flags & ENCRYPTED:
            how = "encrypted" if flags & ENCRYPTED else "compressed"
            raise UnsupportedError(
                f"{file.path}: {cut(name)} is {how}; torch.save stores entries as they are.", hint=RESAVE
            )
        if name in entries:
            raise CheckpointError(f"{file.path} has {cut(name)} twice.")
        length, _, offset = _large_sizes(file, name, (length, packed, offset), extra)
        entries[name] = Entry(_find_data(file, name, raw_name, offset, start), length)
    if at != size:
        raise CheckpointError(f"{file.path} lists more than the {count} entries that it says it has.", hint=AGAIN)
    _check_places(file, entries, start)
    return entries


def _find_directory(file: WeightFile) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of the list at the end of the archive."""
    end_at = file.size - END.size
    end = END.unpack(_read(file, end_at, END.size)) if end_at >= 0 else (b"",)
    if end[0] != b"PK\x05\x06":
        raise CheckpointError(f"{file.path} is cut: it does not end as an archive does.", hint=AGAIN)
    _, _, _, _, count, size, start, _ = end
    limit = end_at
    locator_at = end_at - LOCATOR64.size
    if locator_at >= 0 and (count == 0xFFFF or IS_LARGE in (size, start)):
        signature, _, limit, _ = LOCATOR64.unpack(_read(file, locator_at, LOCATOR64.size))
        if signature != b"PK\x06\x07" or limit + END64.size > locator_at:
            raise CheckpointError(f"{file.path} does not say where its list of entries is.", hint=AGAIN)
        signature, *_, count, size, start = END64.unpack(_read(file, limit, END64.size))
        if signature != b"PK\x06\x06":
            raise CheckpointError(f"{file.path} does not say where its list of entries is.", hint=AGAIN)
    if start + size > limit or size > DIRECTORY_LIMIT:
        raise CheckpointError(
            f"{file.path} says that its list of entries has {size} bytes from {start} on.", hint=AGAIN
        )
    return start, size, count


def _checked_name(file: WeightFile, raw: bytes) -> str:
    """The name of an entry, which must stay inside the archive's own folder."""
    name = raw.decode("utf-8", "backslashreplace")
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or len(parts) < 2 or {"", ".", ".."} & set(parts):
        raise CheckpointError(f"{file.path} has an entry {name[:80]!r}; expected names inside one folder.")
    return name


def _large_sizes(file: WeightFile, name: str, sizes: tuple[int, int, int], extra: bytes) -> list[int]:
    """Length, packed length and offset, where those that need more than 32 bits come from the ZIP64 field."""
    field, at = b"", 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64_FIELD:
            field = extra[at + 4 : at + 4 + size]
        at += 4 + size
    found: list[int] = []
    for value in sizes:
        if value == IS_LARGE:
            if len(field) < 8:
                raise CheckpointError(f"{file.path}: {cut(name)} does not say where it is.", hint=AGAIN)
            value, field = int.from_bytes(field[:8], "little"), field[8:]
        found.append(value)
    if found[0] != found[1]:
        raise UnsupportedError(
            f"{file.path}: {cut(name)} is compressed; torch.save stores entries as they are.", hint=RESAVE
        )
    return found


def _find_data(file: WeightFile, name: str, raw_name: bytes, offset: int, limit: int) -> int:
    """Where an entry's bytes begin: after its own header, which must say the same name and no compression."""
    if offset + LOCAL.size + len(raw_name) <= limit:
        header = _read(file, offset, LOCAL.size + len(raw_name))
        signature, _, _, method, *_, n_name, n_extra = LOCAL.unpack_from(header)
        if (signature, method, n_name) == (b"PK\x03\x04", 0, len(raw_name)) and header[LOCAL.size :] == raw_name:
            return offset + len(header) + int(n_extra)
    raise CheckpointError(f"{file.path}: {cut(name)} is not where the list of entries says.", hint=AGAIN)


def _check_places(file: WeightFile, entries: dict[str, Entry], limit: int) -> None:
    """Entries lie one after another, before the list of them."""
    at, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset < at:
            raise CheckpointError(f"{file.path}: {cut(name)} begins inside {cut(before)}.")
        at, before = entry.offset + entry.size, name
    if at > limit:
        raise CheckpointError(f"{file.path}: {cut(before)} ends at byte {at}; expected at most {limit}.", hint=AGAIN)
