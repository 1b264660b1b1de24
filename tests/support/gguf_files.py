"""GGUF files put together byte by byte, so that a test can make one that lies.

path.write_bytes(gguf_bytes(keys=[key("general.alignment", 4, u32(3))]))
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

F32, F16, Q8_0 = 0, 1, 8
UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def u8(x: int) -> bytes:
    return struct.pack("<B", x)


def u16(x: int) -> bytes:
    return struct.pack("<H", x)


def u32(x: int) -> bytes:
    return struct.pack("<I", x)


def u64(x: int) -> bytes:
    return struct.pack("<Q", x)


def text(data: bytes | str, length: int | None = None) -> bytes:
    """Length and bytes; `length` overrides the true one."""
    data = data.encode() if isinstance(data, str) else data
    return u64(len(data) if length is None else length) + data


def key(name: bytes | str, kind: int, payload: bytes) -> bytes:
    """A metadata entry."""
    return text(name) + u32(kind) + payload


def array(element: int, count: int, payload: bytes = b"") -> bytes:
    """What follows the type of an array."""
    return u32(element) + u64(count) + payload


def entry(
    name: bytes | str = "w", dims: Sequence[int] = (8,), kind: int = F32, offset: int = 0, num_dims: int | None = None
) -> bytes:
    """A tensor's directory entry; `dims` as in the file, fastest first."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + u32(count) + b"".join(u64(d) for d in dims) + u32(kind) + u64(offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; `num_keys` and `num_tensors` override the true counts."""
    head = magic + u32(version)
    head += u64(len(entries) if num_tensors is None else num_tensors) + u64(len(keys) if num_keys is None else num_keys)
    head += b"".join(keys) + b"".join(entries)
    return head + bytes(-len(head) % alignment if entries else 0) + data
