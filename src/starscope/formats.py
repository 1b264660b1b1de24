"""How GGUF stores weights: each format packs `block_size` values into `block_bytes` bytes.

A quant block is a scale (float16), sometimes a minimum, and small integers q: a value is about `scale * q + minimum`.
The K formats pack 256 values and keep integer scales for groups of 16 or 32. NumPy functions are the definition
(`quant_blocks.py`, `k_quants.py`); compiled kernels, equal to them bit for bit, run in their place where they exist.

    q8_0 = find_format("q8_0")
    raw = encode(q8_0, weight)       # float32 [rows cols] -> uint8 [rows row_bytes]
    weight = decode(q8_0, raw)       # and back
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from starscope import k_quants, quant_blocks
from starscope.errors import InvalidContentError, UnsupportedError
from starscope.machine import usable_cores
from starscope.native import kernels
from starscope.quant_blocks import Bytes as Bytes
from starscope.quant_blocks import Floats as Floats

CHUNK_VALUES = 1 << 18
"""Values converted at a time by NumPy: 1 MiB of float32, which stays in a core's cache."""


ACTIVATION_BLOCK = 32
INTEGER_FORMATS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
"""Those that the native engine multiplies as integers, with activations rounded to int8 (`round_activation`)."""


class StoredType(NamedTuple):
    """A ggml tensor type: what its bytes are called and how large they are."""

    name: str
    block_size: int  # values
    block_bytes: int  # bytes


KNOWN_TYPES: Mapping[int, StoredType] = MappingProxyType(
    {
        0: StoredType("F32", 1, 4),
        1: StoredType("F16", 1, 2),
        2: StoredType("Q4_0", 32, 18),
        3: StoredType("Q4_1", 32, 20),
        6: StoredType("Q5_0", 32, 22),
        7: StoredType("Q5_1", 32, 24),
        8: StoredType("Q8_0", 32, 34),
        9: StoredType("Q8_1", 32, 36),
        10: StoredType("Q2_K", 256, 84),
        11: StoredType("Q3_K", 256, 110),
        12: StoredType("Q4_K", 256, 144),
        13: StoredType("Q5_K", 256, 176),
        14: StoredType("Q6_K", 256, 210),
        15: StoredType("Q8_K", 256, 292),
        16: StoredType("IQ2_XXS", 256, 66),
        17: StoredType("IQ2_XS", 256, 74),
        18: StoredType("IQ3_XXS", 256, 98),
        19: StoredType("IQ1_S", 256, 50),
        20: StoredType("IQ4_NL", 32, 18),
        21: StoredType("IQ3_S", 256, 110),
        22: StoredType("IQ2_S", 256, 82),
        23: StoredType("IQ4_XS", 256, 136),
        24: StoredType("I8", 1, 1),
        25: StoredType("I16", 1, 2),
        26: StoredType("I32", 1, 4),
        27: StoredType("I64", 1, 8),
        28: StoredType("F64", 1, 8),
        29: StoredType("IQ1_M", 256, 56),
        30: StoredType("BF16", 1, 2),
        34: StoredType("TQ1_0", 256, 54),
        35: StoredType("TQ2_0", 256, 66),
        39: StoredType("MXFP4", 32, 17),
        40: StoredType("NVFP4", 64, 36),
        41: StoredType("Q1_0", 128, 18),
        42: StoredType("Q2_0", 64, 18),
    }
)
"""Every type id that ggml still defines, decoded here or not: sizes are checked, and an error can name the type."""


@dataclass(frozen=True)
class Format:
    """One row of the table of formats. `decode` and `encode` work on n quant blocks, as the functions below say."""

    name: str
    type_id: int
    block_size: int  # values
    block_bytes: int  # bytes
    decode: Callable[[Bytes], Floats]  # [n block_bytes] -> [n block_size]
    encode: Callable[[Floats], Bytes] | None  # [n block_size] -> [n block_bytes]; None: starscope does not write it
    halves: tuple[int, int] = (0, 2)  # the bytes of a quant block, from and to, that are float16: its scale and minimum

    def row_bytes(self, cols: int) -> int:
        """The bytes of a row of `cols` values; InvalidContentError when they are not whole quant blocks."""
        if cols % self.block_size:
            raise InvalidContentError(
                f"a row of {cols} values cannot be stored as {self.name}, which packs {self.block_size} at a time."
            )
        return cols // self.block_size * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a tensor of this shape in torch order [.. rows cols]."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


def find_format(name: str) -> Format:
    """The format of this name, in upper or lower case; UnsupportedError says which there are."""
    found = FORMATS.get(name.upper())
    if found is None:
        raise UnsupportedError(f"{name} is not a format that starscope reads; it reads {', '.join(FORMATS)}.")
    return found


def format_by_id(type_id: int) -> Format | None:
    """The format with this ggml type id, or None when starscope does not decode it."""
    return _BY_ID.get(type_id)


def decode(fmt: Format, raw: Bytes, *, threads: int | None = None) -> Floats:
    """uint8 [.. row_bytes] -> float32 [.. cols]: a new array, or, for F32, a view of `raw` where it can be one."""
    if raw.shape[-1] % fmt.block_bytes:
        raise InvalidContentError(
            f"a row of {raw.shape[-1]} bytes is not {fmt.name}, whose blocks are {fmt.block_bytes} bytes."
        )
    raw = np.ascontiguousarray(raw)
    if raw.ctypes.data % 4:
        raw = raw.copy()  # kernels and views of float32 want aligned addresses
    if fmt.name == "F32":
        return raw.view(np.float32)
    values = np.empty((*raw.shape[:-1], raw.shape[-1] // fmt.block_bytes * fmt.block_size), np.float32)
    module = kernels()
    if module is not None and fmt.type_id in module.decodes():
        module.decode(fmt.type_id, _as_rows(raw), _as_rows(values), threads or _cores())
    else:
        _by_chunks(fmt.decode, raw.reshape(-1, fmt.block_bytes), values.reshape(-1, fmt.block_size))
    return values


def encode(fmt: Format, values: Floats, *, threads: int | None = None) -> Bytes:
    """float32 [.. cols] -> uint8 [.. row_bytes]: a new array, or, for F32, a view of `values` where it can be one.

    What float16 cannot hold becomes an infinity, in F16 or in a block's scale: whoever converts has to look for it.
    """
    if fmt.encode is None:
        known = ", ".join(f.name for f in FORMATS.values() if f.encode is not None)
        raise UnsupportedError(f"starscope reads {fmt.name} and does not write it; it writes {known}.")
    values = np.require(values, np.float32, ["C", "A"])
    if fmt.name == "F32":
        return values.view(np.uint8)
    raw = np.empty((*values.shape[:-1], fmt.row_bytes(values.shape[-1])), np.uint8)
    module = kernels()
    if module is not None and fmt.type_id in module.encodes():
        module.encode(fmt.type_id, _as_rows(values), _as_rows(raw), threads or _cores())
    else:
        _by_chunks(fmt.encode, values.reshape(-1, fmt.block_size), raw.reshape(-1, fmt.block_bytes))
    return raw


def round_activation(x: Any) -> Any:
    """What the native engine multiplies with weights of INTEGER_FORMATS in place of x: float32 [.. cols] -> the same, a
    NumPy array, or a torch tensor for one.

    Blocks of 32 are rounded to int8 as Q8_0 does, but with a float32 scale and ties to even. A block with a number
    that is not finite gives NaN alone. InvalidContentError when the columns are not whole blocks.
    """
    if hasattr(x, "detach"):
        import torch

        return torch.from_numpy(round_activation(x.detach().cpu().numpy())).to(x.device)
    if x.shape[-1] % ACTIVATION_BLOCK:
        raise InvalidContentError(f"a row of {x.shape[-1]} values is not whole blocks of {ACTIVATION_BLOCK}.")
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, ACTIVATION_BLOCK)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        quants = np.rint(np.clip(blocks * quant_blocks.inverse(scale), -127, 127))
        quants[np.isnan(quants)] = 0  # whose scale is not finite either, or too small to have a reciprocal
        rounded: Floats = (quants * scale).reshape(x.shape)
    return rounded


def _as_rows(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(-1, x.shape[-1])


_cores = functools.cache(usable_cores)  # which are read from files of the system


def _by_chunks(convert: Callable[[NDArray[Any]], NDArray[Any]], source: NDArray[Any], target: NDArray[Any]) -> None:
    """`target[i] = convert(source)[i]` for every quant block i, a cache's worth of them at a time."""
    step = CHUNK_VALUES // max(source.shape[1], target.shape[1])
    with np.errstate(all="ignore"):  # infinities and NaN are values like others here
        for start in range(0, len(source), step):
            target[start : start + step] = convert(source[start : start + step])


def _format(name: str, codec: quant_blocks.Codec) -> Format:
    type_id, known = next((i, known) for i, known in KNOWN_TYPES.items() if known.name == name)
    return Format(name, type_id, known.block_size, known.block_bytes, *codec)


_TABLE = tuple(_format(name, codec) for name, codec in {**quant_blocks.CODECS, **k_quants.CODECS}.items())
FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _TABLE})
_BY_ID: Mapping[int, Format] = MappingProxyType({f.type_id: f for f in _TABLE})
