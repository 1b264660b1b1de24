"""Reading a PyTorch file never imports or runs anything, whatever its pickle says and whichever byte is wrong."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import starscope.checkpoint
from starscope.checkpoint import read_torch_bin
from starscope.errors import CheckpointError, StarscopeError, UnsupportedError
from support.checkpoints import make_checkpoint, store_as_torch
from support.torch_files import EMPTY, call, make_tensor, named, number, state, storage, text, values, write_archive


class Tripwire:
    """Every event that CPython reports to audit hooks while armed, but for reading files and listing folders."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.thread: int | None = None
        sys.addaudithook(self.hook)

    def hook(self, event: str, details: tuple[Any, ...]) -> None:
        if self.thread != threading.get_ident() or event in ("os.listdir", "os.scandir", "pathlib.Path.glob"):
            return
        if event == "open" and not details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.events.append((event, details))

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self.events, self.thread = [], threading.get_ident()
        try:
            yield
        finally:
            self.thread = None


@pytest.fixture(scope="module")
def tripwire(tmp_path_factory: pytest.TempPathFactory) -> Tripwire:
    path = tmp_path_factory.mktemp("warm") / "m.bin"
    torch.save({"w": torch.zeros(2)}, path)
    read_torch_bin(path)
    return Tripwire()


def test_the_tripwire_sees_what_pythons_unpickler_does(tripwire: Tripwire, tmp_path: Path) -> None:
    payloads = [call(named("builtins", "eval"), text("1 + 1")), call(named("os", "mkdir"), text(str(tmp_path / "x")))]
    for payload in [*payloads, named("json.tool", "main")]:
        with tripwire.armed(), contextlib.suppress(BaseException):
            pickle.loads(payload + b".")
        assert tripwire.events


# Module, name, arguments. Published ways from a pickle to a program, and names next to the allowed ones.
CALLS = [
    ("os", "system", "touch {0}"),
    ("posix", "system", "touch {0}"),
    ("nt", "system", "touch {0}"),
    ("subprocess", "Popen", "touch {0}"),
    ("subprocess", "check_output", "touch {0}"),
    ("builtins", "eval", "open('{0}', 'w')"),
    ("builtins", "exec", "open('{0}', 'w')"),
    ("__builtin__", "eval", "open('{0}', 'w')"),
    ("builtins", "__import__", "this"),
    ("builtins", "getattr", "os", "system"),
    ("builtins", "open", "{0}", "w"),
    ("builtins", "compile", "open('{0}', 'w')", "x", "exec"),
    ("importlib", "import_module", "this"),
    ("runpy", "run_path", "{0}"),
    ("runpy", "_run_code", "open('{0}', 'w')"),
    ("timeit", "timeit", "open('{0}', 'w')"),
    ("operator", "attrgetter", "system"),
    ("operator", "methodcaller", "system", "touch {0}"),
    ("functools", "partial", "system"),
    ("pydoc", "pipepager", "x", "touch {0}"),
    ("webbrowser", "open", "file:{0}"),
    ("code", "InteractiveInterpreter"),
    ("pip", "main", "install"),
    ("ctypes", "CDLL", "libc.so.6"),
    ("marshal", "loads", "x"),
    ("pickle", "loads", "x"),
    ("_pickle", "loads", "x"),
    ("shutil", "rmtree", "{0}"),
    ("socket", "create_connection", "x"),
    ("numpy.testing._private.utils", "runstring", "open('{0}', 'w')"),
    ("numpy", "load", "{0}"),
    ("copyreg", "_reconstructor", "x"),
    ("copyreg", "__newobj__", "x"),
    ("copyreg", "add_extension", "os", "system"),
    ("copy_reg", "_reconstructor", "x"),
    ("torch", "load", "{0}"),
    ("torch.serialization", "load", "{0}"),
    ("torch.storage", "_load_from_bytes", "x"),
    ("torch.hub", "load", "x"),
    ("torch.hub", "_load_local", "x"),
    ("torch.jit", "load", "{0}"),
    ("torch._utils", "_import_dotted_name", "os.system"),
    ("torch._utils", "_rebuild_parameter_with_state", "x"),
    ("torch._utils", "_rebuild_wrapper_subclass", "x"),
    ("torch._tensor", "_rebuild_from_type_v2", "x"),
    ("torch.utils.collect_env", "run", "touch {0}"),
    ("torch.utils._config_module", "load_config", "x"),
    ("torch._dynamo.guards", "GuardBuilder.get", "x"),
    ("torch._inductor.codecache", "compile_file", "x"),
    ("torch.fx.experimental.symbolic_shapes.ShapeEnv", "evaluate_guards_expression", "x"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__", "x"),
    ("torch._utils._rebuild_tensor_v2", "__globals__", "x"),
    ("torch", "_utils._rebuild_tensor_v2", "x"),
    ("torch", "FloatStorage.__reduce__", "x"),
    ("collections", "OrderedDict.fromkeys", "x"),
    ("collections", "namedtuple", "x", "y"),
    ("", "collections.OrderedDict"),
]

PLACES: dict[str, Callable[[bytes], bytes]] = {
    "all there is": lambda payload: b"\x80\x02" + payload + b".",
    "a value": lambda payload: state(w=make_tensor(), x=payload),
    "a key": lambda payload: b"\x80\x02}(" + payload + make_tensor() + b"u.",
    "the hooks": lambda payload: state(
        w=call(named("torch._utils", "_rebuild_tensor_v2"), storage(), b"K\x00", values(), values(), b"\x89", payload)
    ),
    "a storage": lambda payload: state(
        w=make_tensor(values(text("storage"), payload, text("0"), text("cpu"), b"K\x06") + b"Q")
    ),
    "attributes": lambda payload: b"\x80\x02" + EMPTY + b"}" + text("__setstate__") + payload + b"sb.",
    "thrown away": lambda payload: state(w=make_tensor()).replace(b"}", payload + b"0}", 1),
}


def assert_refused_untouched(path: Path, tripwire: Tripwire) -> StarscopeError:
    """Reading `path` ends in one of our errors; nothing happened besides, and no file appeared beside it."""
    before, modules = sorted(path.parent.iterdir()), set(sys.modules)
    with tripwire.armed(), pytest.raises(StarscopeError) as caught:
        read_torch_bin(path)
    assert tripwire.events == []
    assert sorted(path.parent.iterdir()) == before
    assert set(sys.modules) == modules
    return caught.value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("module", "attribute", "arguments"), [(row[0], row[1], row[2:]) for row in CALLS])
def test_a_pickle_that_calls_anything_else_is_refused_by_the_name_of_it(
    module: str, attribute: str, arguments: tuple[str, ...], place: str, tripwire: Tripwire, tmp_path: Path
) -> None:
    filled = [text(argument.format(tmp_path / "run")) for argument in arguments]
    by_stack = text(module) + text(attribute) + b"\x93"
    for function in (named(module, attribute), by_stack):
        path = write_archive(tmp_path / "m.bin", PLACES[place](call(function, *filled)))
        error = assert_refused_untouched(path, tripwire)
        assert isinstance(error, UnsupportedError)
        assert f"{module}.{attribute}"[:80] in str(error)
        assert "nothing of it was run" in str(error)


INSTRUCTIONS = {
    "INST": b"(" + text("touch x") + b"ios\nsystem\n",
    "OBJ": b"(" + named("collections", "OrderedDict") + text("x") + b"o",
    "NEWOBJ": named("collections", "OrderedDict") + b")\x81",
    "NEWOBJ_EX": named("collections", "OrderedDict") + b")}\x92",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Pstorage\n",
    "REDUCE on text": text("os.system") + values(text("x")) + b"R",
    "REDUCE on a storage type": call(named("torch", "FloatStorage"), number(1 << 40)),
    "BUILD on a name": named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("__code__") + text("x") + b"sb",
    "BUILD on a tensor": make_tensor() + b"}b",
    "OrderedDict of something": call(named("collections", "OrderedDict"), b"]"),
    "STRING": b"S'x'\n",
    "INT": b"I1\n",
    "FLOAT": b"F1\n",
    "UNICODE": b"Vx\n",
    "LONG": b"L1L\n",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "BINBYTES": b"B\xff\xff\xff\x7f",
    "BINBYTES8": b"\x8e" + b"\xff" * 8,
    "BINUNICODE8": b"\x8d" + b"\xff" * 8,
    "BINUNICODE beyond the end": b"X\xff\xff\xff\xff",
    "BYTEARRAY8": b"\x96" + b"\xff" * 8,
    "NEXT_BUFFER": b"\x97",
    "DUP": b"2",
    "a frame beyond the end": b"\x95" + b"\xff" * 8,
    "protocol 6": b"\x80\x06",
    "a mark alone": b"t",
    "a value never kept": b"j\xff\xff\xff\x7f",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff",
    "a persistent id that is a text": text("storage") + b"Q",
    "a storage of a type that is no name": values(text("storage"), text("x"), text("0"), text("cpu"), b"K\x06") + b"Q",
    "a storage of negative size": storage(size=-1),
    "a tensor without its storage": call(named("torch._utils", "_rebuild_tensor_v2"), *(b"N" for _ in range(6))),
    "a tensor of negative size": make_tensor(shape=(-2, 3)),
    "a tensor with a negative stride": make_tensor(strides=(-3, 1)),
    "a tensor of true size": make_tensor().replace(number(2), b"\x88"),
    "a tensor with fewer strides than sizes": make_tensor(strides=(1,)),
    "a parameter of no tensor": call(named("torch._utils", "_rebuild_parameter"), b"N", b"N", b"N"),
}  # fmt: skip


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_that_no_tensor_needs_is_refused(instruction: str, tripwire: Tripwire, tmp_path: Path) -> None:
    for place in PLACES.values():
        assert_refused_untouched(write_archive(tmp_path / "m.bin", place(INSTRUCTIONS[instruction])), tripwire)


def test_a_memo_of_two_thousand_million_places_takes_no_memory(tmp_path: Path) -> None:
    pickled = state(w=b"Nr\xff\xff\xff\xff0" + make_tensor()).replace(b"0c", b"c")
    with pytest.raises(StarscopeError):
        read_torch_bin(write_archive(tmp_path / "m.bin", pickled))
    pickled = state(w=make_tensor() + b"r\xff\xff\xff\xff")
    assert read_torch_bin(write_archive(tmp_path / "m.bin", pickled))["w"].shape == (2, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("files") / "m.bin"
    base = torch.randn(4, 6)
    torch.save(torch.nn.ParameterDict({"w": base.T, "v": base[1], "h": base.half()}).state_dict(), path)
    return path.read_bytes()


@settings(max_examples=400)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused_and_runs_nothing(
    data: st.DataObject, written: bytes, tripwire: Tripwire, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(written)
    pickled = raw.index(b"data.pkl") + 8
    for _ in range(data.draw(st.integers(1, 4))):
        start, end = data.draw(st.sampled_from([(0, len(raw)), (pickled, pickled + 600), (len(raw) - 900, len(raw))]))
        raw[data.draw(st.integers(start, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("files") / "m.bin"
    path.write_bytes(raw)
    with tripwire.armed(), contextlib.suppress(CheckpointError, UnsupportedError):
        for found in read_torch_bin(path).values():
            found.read_raw_rows(0, found.num_rows)
    assert tripwire.events == []


@settings(max_examples=300)
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(
                [*INSTRUCTIONS.values(), make_tensor(), storage(), EMPTY, b"(", b"}", b"u", b"t", b"R", b"b", b"Q"]
            ),
            st.sampled_from([named("os", "system"), named("torch._utils", "_rebuild_tensor_v2"), text("touch x")]),
            st.binary(max_size=4),
        ),
        max_size=12,
    )
)
def test_any_program_is_read_or_refused_and_runs_nothing(
    pieces: list[bytes], tripwire: Tripwire, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_archive(tmp_path_factory.mktemp("files") / "m.bin", b"\x80\x02" + b"".join(pieces) + b".")
    with tripwire.armed(), contextlib.suppress(CheckpointError, UnsupportedError):
        read_torch_bin(path)
    assert tripwire.events == []


@pytest.mark.parametrize("module", ["torch_bin", "unpickler"])
def test_what_reads_a_pickle_has_no_way_to_a_module_or_an_attribute_by_name(module: str) -> None:
    path = Path(starscope.checkpoint.__file__).with_name(f"{module}.py")
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    ours = {"content", "files", "tensor", "unpickler"}
    allowed = {"__future__", "collections.abc", "dataclasses", "pathlib", "struct", "typing", "starscope.errors"}
    assert imported <= allowed | {f"starscope.checkpoint.{name}" for name in ours}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert not used & {"__import__", "getattr", "setattr", "eval", "exec", "compile", "globals", "vars", "open"}


def test_a_conversion_imports_no_torch(tmp_path: Path) -> None:
    store_as_torch(tmp_path, make_checkpoint(tmp_path).state_dict(), shards=2)
    code = "import sys; from starscope.convert import convert; convert(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
