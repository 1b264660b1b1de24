"""What is written is read again, here and by the gguf package, and no damage to a file gets past the reader."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starscope.errors import GGUFError, StarscopeError, UnsupportedError
from starscope.formats import FORMATS, KNOWN_TYPES, decode
from starscope.gguf import OutputTensor, Value, ValueType, array, read_gguf, scalar, string, strings, write_gguf
from starscope.gguf.format import SCALARS, Data
from support.gguf_files import entry, gguf_bytes

FEW = settings(max_examples=30, deadline=None)
Tensors = dict[str, tuple[tuple[int, ...], str, bytes]]  # name -> shape, format, bytes

numbers = {
    kind: st.floats(width=32 if dtype.itemsize == 4 else 64) if dtype.kind == "f"
    else st.booleans() if dtype.kind == "b"
    else st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for kind, dtype in SCALARS.items()
}  # fmt: skip
raw_texts = st.binary(max_size=8).map(lambda b: b.decode("utf-8", "surrogateescape"))
scalars = st.sampled_from(list(SCALARS)).flatmap(lambda kind: numbers[kind].map(lambda x: scalar(kind, x)))
arrays = st.sampled_from(list(SCALARS)).flatmap(
    lambda kind: st.lists(numbers[kind], max_size=5).map(lambda xs: array(kind, xs))
)
values = scalars | arrays | st.text(max_size=8).map(string) | st.lists(raw_texts, max_size=5).map(strings)
keys = st.from_regex(r"[a-z0-9_.-]{1,20}", fullmatch=True).filter(lambda k: k != "general.alignment")
metadata = st.dictionaries(keys, values, max_size=6)
names = st.text(st.characters(exclude_categories=("C",), exclude_characters="/\\"), min_size=1, max_size=15)


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    made: Tensors = {}
    for name in draw(st.lists(names, unique=True, max_size=4)):
        fmt = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
        shape = (*draw(st.lists(st.integers(1, 3), max_size=3)), fmt.block_size * draw(st.integers(1, 3)))
        made[name] = (shape, fmt.name, draw(st.randoms(use_true_random=False)).randbytes(fmt.nbytes(shape)))
    return made


def outputs(made: Tensors) -> list[OutputTensor]:
    def halves(data: bytes) -> Iterator[bytes]:
        yield from (data[: len(data) // 2], data[len(data) // 2 :])

    return [
        OutputTensor(name, shape, FORMATS[fmt], lambda data=data: halves(data))  # type: ignore[misc]
        for name, (shape, fmt, data) in made.items()
    ]


def same(a: Data, b: Any) -> bool:
    """Equal, NaN included, whether list or array."""
    if isinstance(a, str) or (isinstance(a, list) and a):
        return bool(a == b)
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f"))


@FEW
@given(metadata, tensors(), st.sampled_from([None, 8, 32, 128]))
def test_metadata_of_every_type_and_tensors_of_every_format_come_back(
    meta: dict[str, Value], made: Tensors, alignment: int | None
) -> None:
    if alignment is not None:
        meta = {**meta, "general.alignment": scalar(ValueType.UINT32, alignment)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        assert write_gguf(path, meta, outputs(made)) == path.stat().st_size
        with read_gguf(path) as file:
            assert list(file.metadata.items()) == list(meta.items())
            assert [t.name for t in file.tensors.values()] == list(made)
            assert (file.version, file.alignment, file.unused_bytes) == (3, alignment or 32, 0)
            for name, (shape, fmt, data) in made.items():
                info = file.tensors[name]
                assert (info.shape, info.format, info.offset % file.alignment) == (shape, FORMATS[fmt], 0)
                assert file.raw(name).tobytes() == data
                expected = decode(FORMATS[fmt], np.frombuffer(data, np.uint8)).reshape(shape)
                assert same(file.array(name), expected)


@FEW
@given(st.dictionaries(keys, values, max_size=6))
def test_values_decode_to_what_they_were_made_from(meta: dict[str, Value]) -> None:
    for value in meta.values():
        if value.type is ValueType.STRING:
            assert string(str(value.data)) == value
        elif value.element_type is ValueType.STRING:
            assert strings(list(value.data)) == value  # type: ignore[arg-type]
        elif value.element_type is not None:
            assert array(value.element_type, value.data.tolist()) == value  # type: ignore[union-attr]
            assert array(value.element_type, value.data) == value  # type: ignore[arg-type]
        else:
            assert scalar(value.type, value.data) == value  # type: ignore[arg-type]


def utf8(value: Value) -> bool:
    """Whether the gguf package can show the value: it wants UTF-8, and cannot say what an empty array holds."""
    if value.type is ValueType.ARRAY and value.count == 0:
        return False
    return value.element_type is not ValueType.STRING or all(s.isprintable() for s in value.data)  # type: ignore[union-attr]


@FEW
@given(st.dictionaries(keys, values.filter(utf8), max_size=6), tensors())
def test_a_file_written_here_opens_in_the_gguf_package(meta: dict[str, Value], made: Tensors) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, meta, outputs(made))
        reader = oracle.GGUFReader(path)
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(fields) == list(meta)
        for name, field in fields.items():
            assert [t.value for t in field.types] == [
                t for t in (meta[name].type, meta[name].element_type) if t is not None
            ]
            assert same(meta[name].data, field.contents())
        assert [t.name for t in reader.tensors] == list(made)
        for tensor in reader.tensors:
            shape, fmt, data = made[tensor.name]
            assert (tuple(tensor.shape.tolist())[::-1], tensor.tensor_type.name) == (shape, fmt)
            assert tensor.data.tobytes() == data


@FEW
@given(st.dictionaries(keys, values.filter(utf8), max_size=6), tensors())
def test_a_file_written_by_the_gguf_package_opens_here(meta: dict[str, Value], made: Tensors) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = oracle.GGUFWriter(path, "starcoder")
        meta.pop("general.architecture", None)
        for name, value in meta.items():
            element = None if value.element_type is None else oracle.GGUFValueType(value.element_type)
            data = value.data.tolist() if isinstance(value.data, np.ndarray) else value.data
            writer.add_key_value(name, data, oracle.GGUFValueType(value.type), element)
        for name, (shape, fmt, data) in made.items():
            raw = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
            writer.add_tensor(name, raw, raw_dtype=oracle.GGMLQuantizationType[fmt])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with read_gguf(path) as file:
            assert file.get("general.architecture") == "starcoder"
            assert {k: v for k, v in file.metadata.items() if k != "general.architecture"} == meta
            assert {n: (t.shape, t.type_name, file.raw(n).tobytes()) for n, t in file.tensors.items()} == made


# One small file with everything in it, whose last byte belongs to a tensor


def everything() -> tuple[dict[str, Value], Tensors]:
    rng = np.random.default_rng(0)
    meta = {f"scalar.{kind.name.lower()}": scalar(kind, 1) for kind in SCALARS}
    meta |= {f"array.{kind.name.lower()}": array(kind, [0, 1]) for kind in SCALARS}
    meta |= {
        "general.alignment": scalar(ValueType.UINT32, 8),
        "text": string("é"),
        "texts": strings(["", "a", "\udcff"]),
    }
    made: Tensors = {"vector": ((3,), "F32", rng.bytes(12)), "cube": ((2, 2, 4), "F16", rng.bytes(32))}
    made |= {"k": ((256,), "Q4_K", rng.bytes(144)), "last": ((2, 32), "Q8_0", rng.bytes(68))}
    return meta, made | {"z": ((4,), "F16", rng.bytes(8))}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    meta, made = everything()
    write_gguf(path, meta, outputs(made))
    return path.read_bytes()


def test_a_file_cut_at_any_byte_is_refused(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file)
    read_gguf(path).close()
    with path.open("r+b") as cut:
        for size in range(len(small_file) - 1, -1, -1):
            cut.truncate(size)
            with pytest.raises(GGUFError, match=r"\(byte [0-9]+\)"):
                read_gguf(path)


def read_all(path: Path) -> None:
    with read_gguf(path) as file:
        for value in file.metadata.values():
            assert value.data is not None
        for info in file.tensors.values():
            try:
                file.array(info.name)
            except UnsupportedError:
                assert file.raw(info.name).nbytes == info.nbytes


huge = st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**32, 2**31, 2**31 - 1, 1 << 24, 1 << 16, 255, 0, 1])
mutations = st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255) | huge), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(mutations=mutations, in_header=st.booleans(), cut=st.just(1.0) | st.floats(0, 1))
def test_a_damaged_file_raises_starscope_errors_only_and_costs_little_memory(
    small_file: bytes, mutations: list[tuple[float, int]], in_header: bool, cut: float
) -> None:
    damaged = bytearray(small_file)
    for place, number in mutations:
        at = int(place * (400 if in_header else len(damaged)))
        size = 1 if number < 256 else 4 if number < 2**32 else 8
        damaged[at : at + size] = number.to_bytes(size, "little")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        path.write_bytes(damaged[: int(cut * len(damaged))])
        tracemalloc.start()
        try:
            with contextlib.suppress(StarscopeError):
                read_all(path)
        finally:
            allocated = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert allocated < 100 * len(small_file)


@pytest.mark.parametrize("type_id", [i for i in KNOWN_TYPES if KNOWN_TYPES[i].name not in FORMATS])
def test_a_tensor_that_cannot_be_decoded_loads_and_says_so_when_decoded(tmp_path: Path, type_id: int) -> None:
    kind = KNOWN_TYPES[type_id]
    data = bytes(range(256)) * 2
    path = tmp_path / "rare.gguf"
    path.write_bytes(gguf_bytes([], [entry("w", (kind.block_size, 1), type_id)], data[: kind.block_bytes]))
    with read_gguf(path) as file:
        assert (file.tensors["w"].nbytes, file.tensors["w"].format) == (kind.block_bytes, None)
        assert file.raw("w").tobytes() == data[: kind.block_bytes]
        with pytest.raises(UnsupportedError, match=rf"^w is stored as {kind.name}, which"):
            file.array("w")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GGUFError, match="1 are missing"):
        read_gguf(path)


def test_a_file_of_version_2_is_read_as_one_of_version_3(small_file: bytes, tmp_path: Path) -> None:
    (tmp_path / "v2.gguf").write_bytes(small_file[:4] + b"\2" + small_file[5:])
    with read_gguf(tmp_path / "v2.gguf") as file:
        assert file.version == 2
        assert file.metadata == everything()[0]


def test_a_file_without_tensors_is_fine(tmp_path: Path) -> None:
    write_gguf(tmp_path / "vocab.gguf", {"a": strings(["x"])}, [])
    with read_gguf(tmp_path / "vocab.gguf") as file:
        assert (file.get("a"), file.get("b"), file.get("b", 3), file.tensors) == (["x"], None, 3, {})


def test_bytes_between_tensors_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "hole.gguf"
    path.write_bytes(gguf_bytes([], [entry("b", offset=96), entry("a")], bytes(128 + 5)))
    with read_gguf(path) as file:
        assert file.unused_bytes == 64 + 5
        assert list(file.tensors) == ["b", "a"]


def test_rows_are_mapped_read_only_and_outlive_the_file(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file)
    with read_gguf(path) as file:
        whole, row = file.raw("last"), file.raw_rows("last", 1, 2)
        vector = file.array("vector")
        with pytest.raises(GGUFError, match="has 2 rows; rows 1 to 3"):
            file.raw_rows("last", 1, 3)
        with pytest.raises(GGUFError, match="no tensor 'nothing'"):
            file.raw("nothing")
    assert whole.tobytes() == everything()[1]["last"][2]
    assert row.tobytes() == whole[1].tobytes()
    assert file.tensors["vector"].rows == 1
    for mapped in (whole, row, vector):
        assert not mapped.flags.writeable
        assert not mapped.flags.owndata
    with pytest.raises(StarscopeError, match="is closed"):
        file.raw("last")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: scalar(ValueType.UINT8, 256), "cannot be stored as UINT8"),
    (lambda: scalar(ValueType.UINT32, -1), "cannot be stored as UINT32"),
    (lambda: scalar(ValueType.INT32, 1.5), "cannot be stored as INT32"),
    (lambda: scalar(ValueType.FLOAT32, 1e39), "cannot be stored as FLOAT32"),
    (lambda: array(ValueType.INT8, np.array([1, 300])), "cannot be stored as INT8"),
    (lambda: array(ValueType.STRING, [1]), "STRING is not a type of numbers"),
    (lambda: string("\ud800"), "cannot be written as UTF-8"),
])  # fmt: skip
def test_a_value_that_does_not_fit_its_type_is_refused(make: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        make()
