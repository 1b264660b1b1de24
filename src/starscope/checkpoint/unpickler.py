"""The pickle inside a PyTorch file, read as data: tensors of a state dict, and nothing else.

A pickle is a program for a machine with a stack. This machine has only the instructions that torch.save writes, and
looks names up in a table of its own: a name that is not there ends the reading, and none is ever imported. What it
makes are tuples, dicts, texts, numbers and descriptions of tensors:

    read_state_dict(data, "model.bin")["lm_head.weight"]    # View(Storage("F16", "0", 1024), 0, (32, 32), (32, 1))
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starscope.checkpoint.content import short
from starscope.errors import CheckpointError, UnsupportedError

PICKLE_LIMIT = 16 << 20  # bytes; a model of a thousand tensors needs 200 KB
STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
}  # fmt: skip
ORDERED_DICT, TENSOR, PARAMETER = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
KNOWN = {ORDERED_DICT, TENSOR, PARAMETER} | {f"torch.{name}" for name in STORAGES}
RESAVE = (
    "Save only the model's state dict: torch.save(model.state_dict(), FILE), or "
    "model.save_pretrained(FOLDER, safe_serialization=True)."
)


@dataclass(frozen=True)
class Storage:
    """`size` elements of `dtype` in the archive's entry `data/<key>`."""

    dtype: str
    key: str
    size: int


@dataclass(frozen=True)
class View:
    """A tensor: elements of a storage from `offset` on, with strides; all in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Name:
    """A dotted name of KNOWN. It stands for itself: there is nothing behind it that could be called."""

    dotted: str


def read_state_dict(data: bytes, where: str) -> dict[str, View]:
    """The tensors of a pickled state dict, by name.

    UnsupportedError for a pickle that asks for anything but tensors, CheckpointError for one that is damaged.
    """
    machine = _Machine(data, where)
    try:
        found = machine.run()
    except IndexError:
        raise machine.damaged("ends or empties its stack too early") from None
    except UnicodeDecodeError:
        raise machine.damaged("has a text that is not UTF-8") from None
    if not isinstance(found, dict):
        raise UnsupportedError(f"{where} holds a {_kind(found)}; expected a dict of tensors.", hint=RESAVE)
    for name, value in found.items():
        if not isinstance(value, View):
            raise UnsupportedError(f"{where}: {short(name)} is a {_kind(value)}; expected only tensors.", hint=RESAVE)
    return found


class _Machine:
    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.memo: dict[int, Any] = {}

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {what} (near byte {self.at}); expected what torch.save writes.")

    def run(self) -> Any:
        """The value that the pickle leaves."""
        while (opcode := self.take(1)) != b".":
            self.step(opcode)
        return self.stack.pop()

    def take(self, size: int) -> bytes:
        taken = self.data[self.at : self.at + size]
        if len(taken) < size:
            raise IndexError
        self.at += size
        return taken

    def number(self, layout: str) -> Any:
        """A number laid out as `struct` says."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        """What lies above the last mark, which goes."""
        above, self.stack = self.stack, self.below.pop()
        return above

    def step(self, opcode: bytes) -> None:
        """One instruction, by the letters of CPython's pickle.py."""
        push = self.stack.append
        match opcode:
            case b"\x80":  # PROTO
                if (version := self.number("<B")) > 5:
                    raise self.damaged(f"is a pickle of protocol {version}")
            case b"\x95":  # FRAME
                self.take(8)
            case b"(":  # MARK
                self.below.append(self.stack)
                self.stack = []
            case b"}":  # EMPTY_DICT
                push({})
            case b"]":  # EMPTY_LIST
                push([])
            case b")":  # EMPTY_TUPLE
                push(())
            case b"t":  # TUPLE
                values = self.since_mark()
                self.stack.append(tuple(values))
            case b"\x85" | b"\x86" | b"\x87":  # TUPLE1, TUPLE2, TUPLE3
                self.stack.append(tuple(self.pop_last(opcode[0] - 0x84)))
            case b"a" | b"e":  # APPEND, APPENDS
                values = self.pop_last(1) if opcode == b"a" else self.since_mark()
                self.last(list).extend(values)
            case b"s" | b"u":  # SETITEM, SETITEMS
                self.set_items(self.pop_last(2) if opcode == b"s" else self.since_mark())
            case b"N":  # NONE
                push(None)
            case b"\x88" | b"\x89":  # NEWTRUE, NEWFALSE
                push(opcode == b"\x88")
            case b"K" | b"M" | b"J":  # BININT1, BININT2, BININT
                push(self.number({b"K": "<B", b"M": "<H", b"J": "<i"}[opcode]))
            case b"\x8a":  # LONG1
                push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))
            case b"G":  # BINFLOAT
                push(self.number(">d"))
            case b"X" | b"\x8c":  # BINUNICODE, SHORT_BINUNICODE
                push(self.take(self.number("<I" if opcode == b"X" else "<B")).decode())
            case b"q" | b"r":  # BINPUT, LONG_BINPUT
                self.memo[self.number("<B" if opcode == b"q" else "<I")] = self.stack[-1]
            case b"\x94":  # MEMOIZE
                self.memo[len(self.memo)] = self.stack[-1]
            case b"h" | b"j":  # BINGET, LONG_BINGET
                push(self.recall(self.number("<B" if opcode == b"h" else "<I")))
            case b"c":  # GLOBAL
                push(self.find(self.line(), self.line()))
            case b"\x93":  # STACK_GLOBAL
                self.stack.append(self.find(*self.pop_last(2)))
            case b"Q":  # BINPERSID
                push(self.storage(self.stack.pop()))
            case b"R":  # REDUCE
                self.stack.append(self.build(*self.pop_last(2)))
            case b"b":  # BUILD: the attributes of a state dict, which say nothing about its tensors
                self.stack.pop()
                self.last(dict)
            case _:
                raise UnsupportedError(
                    f"{self.where} has the pickle instruction {opcode!r} at byte {self.at - 1}, which no tensor needs; "
                    "nothing of it was run.",
                    hint=RESAVE,
                )

    def pop_last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def last(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise self.damaged(f"treats a {_kind(self.stack[-1])} as a {kind.__name__}")
        return self.stack[-1]

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise self.damaged(f"recalls value {index}, which it never kept")
        return self.memo[index]

    def set_items(self, values: Sequence[Any]) -> None:
        table = self.last(dict)
        if len(values) % 2:
            raise self.damaged("has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                raise UnsupportedError(f"{self.where} has a {_kind(key)} for a name; expected text.", hint=RESAVE)
            if key in table:
                raise CheckpointError(f"{self.where} names {short(key)} twice.")
            table[key] = value

    def find(self, module: Any, name: Any) -> Name:
        """The name, if it is one of the few that tensors are made with."""
        dotted = f"{module}.{name}" if type(module) is str and type(name) is str else "something that is not a name"
        if dotted not in KNOWN or "." in name:
            raise UnsupportedError(
                f"{self.where} asks for {dotted[:80]!r}, which no tensor needs; nothing of it was run.",
                hint=f"If you trust where it comes from: {RESAVE[0].lower()}{RESAVE[1:]}",
            )
        return Name(dotted)

    def storage(self, key: Any) -> Storage:
        """The storage of a persistent id: ("storage", type, key, device, number of elements)."""
        if type(key) is tuple and len(key) == 5 and key[0] == "storage":
            _, kind, entry, device, size = key
            dtype = STORAGES.get(kind.dotted.removeprefix("torch.")) if type(kind) is Name else None
            if dtype and type(entry) is type(device) is str and _is_size(size):
                return Storage(dtype, entry, size)
        raise self.damaged("has a persistent id that is not a storage's")

    def build(self, name: Any, args: Any) -> Any:
        """What one of the three callable names gives."""
        if type(name) is not Name or type(args) is not tuple:
            raise self.damaged(f"calls a {_kind(name)}")
        if name.dotted == ORDERED_DICT and not args:
            return {}
        if name.dotted == PARAMETER and len(args) == 3 and type(args[0]) is View:
            return args[0]
        if name.dotted == TENSOR and len(args) in (6, 7):
            storage, offset, shape, strides, *_ = args
            fits = type(storage) is Storage and _is_size(offset) and _are_sizes(shape) and _are_sizes(strides)
            if fits and len(shape) == len(strides):
                if args[6:] and args[6]:  # bits that say "the conjugate" or "the negative"
                    raise UnsupportedError(f"{self.where} has a tensor with flags; expected plain values.", hint=RESAVE)
                return View(storage, offset, shape, strides)
        raise self.damaged(f"calls {name.dotted} with {len(args)} values that it does not take")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and all(map(_is_size, values))


def _kind(value: Any) -> str:
    return {View: "tensor", Name: "name", str: "text", type(None): "None"}.get(type(value), type(value).__name__)
