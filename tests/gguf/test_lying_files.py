"""Files that lie: each is refused in one sentence that says where, and costs no more memory than it has bytes."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from starscope.errors import GGUFError, InputError, UnsupportedError
from starscope.gguf import read_gguf
from support.gguf_files import (
    ARRAY,
    BOOL,
    F16,
    FLOAT32,
    Q8_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    array,
    entry,
    gguf_bytes,
    key,
    text,
    u8,
    u16,
    u32,
    u64,
)

HUGE = 2**64 - 1
FLOATS = bytes(32)  # the data of entry(): 8 float32


def lie(claim: str, content: bytes, message: str, error: type[Exception] = GGUFError) -> object:
    return pytest.param(content, message, error, id=claim.replace(" ", "_"))


def one_key(name: bytes | str, kind: int, payload: bytes) -> bytes:
    return gguf_bytes([key(name, kind, payload)])


def one_tensor(**changes: object) -> bytes:
    return gguf_bytes([], [entry(**changes)], FLOATS)  # type: ignore[arg-type]


HEADERS = [
    lie("an empty file is too short", b"", r"ends after 0 bytes.*24"),
    lie("a header of 23 bytes is too short", gguf_bytes()[:23], "ends after 23 bytes"),
    lie("another magic is no GGUF file", gguf_bytes(magic=b"GGML"), r"starts with b'GGML'.*byte 0"),
    lie("a file from before GGUF is called that", gguf_bytes(magic=b"tjgg"), "older ggml format"),
    lie("a big-endian version 3 is unsupported", gguf_bytes(version=3 << 24), "big-endian", UnsupportedError),
    lie("a big-endian version 2 is unsupported", gguf_bytes(version=2 << 24), "big-endian", UnsupportedError),
    lie("version 1 is unsupported", gguf_bytes(version=1), "version 1", UnsupportedError),
    lie("version 4 is unsupported", gguf_bytes(version=4), "version 4", UnsupportedError),
    lie("version 0 does not exist", gguf_bytes(version=0), "version 0"),
    lie(
        "a negative number of tensors is refused", gguf_bytes(num_tensors=HUGE), r"18446744073709551615 tensors.*byte 8"
    ),
    lie("more tensors than allowed are refused", gguf_bytes(num_tensors=65_537), "at most 65536"),
    lie(
        "more tensors than fit are refused", gguf_bytes(num_tensors=9, data=bytes(100)), "need 297 bytes; 108 are left"
    ),
    lie("a negative number of keys is refused", gguf_bytes(num_keys=HUGE), r"18446744073709551615 metadata.*byte 16"),
    lie("more keys than allowed are refused", gguf_bytes(num_keys=65_537), "at most 65536"),
    lie("more keys than fit are refused", gguf_bytes(num_keys=9, data=bytes(100)), "need 126 bytes; 100 are left"),
]
NUMBER = u32(7)
KEYS = [
    lie("a key of no bytes is refused", one_key("", UINT32, NUMBER), "a key of 0 bytes"),
    lie("a key of 65536 bytes is refused", one_key("k" * 65_536, UINT32, NUMBER), "a key of 65536 bytes"),
    lie(
        "a key longer than anything is refused",
        gguf_bytes([text("key", HUGE) + bytes(9)]),
        "key of 18446744073709551615",
    ),
    lie(
        "a key longer than the file is refused",
        gguf_bytes([text("key", 999) + bytes(9)]),
        "999 bytes expected, 12 left",
    ),
    lie("a key in upper case is refused", one_key("general.Name", UINT32, NUMBER), "only a-z"),
    lie("a key outside ASCII is refused", one_key("général", UINT32, NUMBER), "only a-z"),
    lie("a key with a zero byte is refused", one_key(b"a\0b", UINT32, NUMBER), "only a-z"),
    lie("a key that ends in a newline is refused", one_key(b"a\n", UINT32, NUMBER), "only a-z"),
    lie("a key given twice is refused", gguf_bytes([key("a", UINT32, NUMBER)] * 2), r"a appears twice \(byte 41\)"),
    lie("a value type that does not exist is refused", one_key("a", 13, NUMBER), "value type of a is 13"),
    lie("a truth value of 2 is refused", one_key("a", BOOL, u8(2)), "truth value of 2"),
    lie("a number cut off is refused", gguf_bytes([key("abc", UINT64, NUMBER)]), "8 bytes expected, 4 left"),
    lie("a text longer than the file is refused", one_key("a", STRING, text("abc", 4)), "4 bytes expected, 3 left"),
    lie("a text of 2^64 bytes is refused", one_key("a", STRING, text("abc", HUGE)), "18446744073709551615 bytes"),
    lie("a text over 64 MiB is refused", one_key("a", STRING, text("abc", (64 << 20) + 1)), "at most 67108864"),
    lie(
        "a chat template over 1 MiB is refused",
        one_key("tokenizer.chat_template", STRING, text(b"x" * ((1 << 20) + 1))),
        "at most 1048576",
    ),
    lie("a text that is not UTF-8 is refused", one_key("a", STRING, text(b"ok\xff")), r"not UTF-8.*byte 47"),
]
ARRAYS = [
    lie(
        "an element type that does not exist is refused",
        one_key("a", ARRAY, array(13, 1, NUMBER)),
        "element type of a is 13",
    ),
    lie(
        "an array of arrays is refused", one_key("a", ARRAY, array(ARRAY, 1, array(UINT8, 1, u8(1)))), "array of arrays"
    ),
    lie(
        "an array longer than the file is refused", one_key("a", ARRAY, array(UINT32, 2, NUMBER)), "need 8 bytes; 4 are"
    ),
    lie("an array of 2^64 numbers is refused", one_key("a", ARRAY, array(UINT32, HUGE, NUMBER)), "4 are left"),
    lie("an array whose size wraps is refused", one_key("a", ARRAY, array(UINT64, 2**61, u64(0))), "8 are left"),
    lie("an array of 2^64 texts is refused", one_key("a", ARRAY, array(STRING, HUGE, text("x"))), "9 are left"),
    lie("a text of an array past the end is refused", one_key("a", ARRAY, array(STRING, 1, text("x", 2))), "inside a"),
    lie(
        "a text of an array of 2^64 bytes is refused",
        one_key("a", ARRAY, array(STRING, 1, text("x", HUGE))),
        "inside a",
    ),
    lie(
        "a length of an array cut off is refused",
        one_key("a", ARRAY, array(STRING, 2, text("xyz") + bytes(7))),
        "inside a",
    ),
    lie("a truth value of 2 in an array is refused", one_key("a", ARRAY, array(BOOL, 3, b"\0\2\1")), "truth value"),
    lie(
        "more elements than allowed in all arrays are refused",
        gguf_bytes([key(k, ARRAY, array(UINT8, n, bytes(n))) for k, n in (("a", 1 << 24), ("b", 1))]),
        "16777217; 16777216 are allowed",
    ),
]


def alignment(kind: int, payload: bytes) -> bytes:
    return one_key("general.alignment", kind, payload)


ALIGNMENTS = [
    lie("an alignment of 64 bits is refused", alignment(UINT64, u64(32)), "is UINT64; expected UINT32"),
    lie("an alignment of 0 is refused", alignment(UINT32, u32(0)), "alignment is 0"),
    lie("an alignment of 24 is refused", alignment(UINT32, u32(24)), "alignment is 24"),
    lie("an alignment of 4 is refused", alignment(UINT32, u32(4)), "alignment is 4"),
    lie("an alignment of 2 MiB is refused", alignment(UINT32, u32(2 << 20)), "alignment is 2097152"),
]
TENSORS = [
    lie("a tensor name of no bytes is refused", one_tensor(name=""), "name of 0 bytes"),
    lie("a tensor name of 64 bytes is refused", one_tensor(name="n" * 64), "name of 64 bytes"),
    lie(
        "a tensor name of 2^64 bytes is refused", gguf_bytes([], [text("w", HUGE) + bytes(60)]), "18446744073709551615"
    ),
    lie("a tensor name with a zero byte is refused", one_tensor(name=b"a\0b"), "control characters"),
    lie("a tensor name with a slash is refused", one_tensor(name="a/b"), "slashes"),
    lie("a tensor name with a backslash is refused", one_tensor(name="a\\b"), "slashes"),
    lie("a tensor name that is not UTF-8 is refused", one_tensor(name=b"a\xff"), "not UTF-8"),
    lie(
        "a tensor given twice is refused",
        gguf_bytes([], [entry(), entry(offset=32)], bytes(64)),
        r"w appears twice \(byte 57\)",
    ),
    lie("a tensor without dimensions is refused", one_tensor(num_dims=0), "0 dimensions"),
    lie("a tensor of 5 dimensions is refused", one_tensor(dims=(8, 1, 1, 1, 1)), "5 dimensions"),
    lie("a tensor of 2^32 dimensions is refused", one_tensor(num_dims=2**32 - 1), "4294967295 dimensions"),
    lie("a dimension of 0 is refused", one_tensor(dims=(8, 0)), "at least 1"),
    lie("a dimension of 2^64 is refused", one_tensor(dims=(HUGE,)), "63 bits"),
    lie("dimensions whose product wraps are refused", one_tensor(dims=(2**42, 2**42)), "63 bits"),
    lie("a size in bytes that wraps is refused", one_tensor(dims=(2**62,)), "needs 18446744073709551616 bytes"),
    lie("a tensor type that was removed is refused", one_tensor(kind=4), "type 4"),
    lie("a tensor type that does not exist is refused", one_tensor(kind=2**32 - 1), "type 4294967295"),
    lie("rows that are not whole quant blocks are refused", one_tensor(dims=(33,), kind=Q8_0), "packs 32 at a time"),
    lie("an offset off the alignment is refused", one_tensor(offset=16), "multiple of 32"),
    lie(
        "an offset past the end is refused",
        one_tensor(offset=64),
        "up to byte 160, and the file has 96: 64 are missing",
    ),
    lie("an offset of nearly 2^64 is refused", one_tensor(offset=2**64 - 32), "are missing"),
    lie(
        "a tensor cut off is refused with both sizes",
        gguf_bytes([], [entry(dims=(9,))], bytes(35)),
        r"w needs 36 bytes, up to byte 100, and the file has 99: 1 are missing \(byte 64\)",
    ),
    lie(
        "tensors in each other are refused",
        gguf_bytes([], [entry("a", (16,)), entry("b", (8,), offset=32)], bytes(64)),
        "a and b overlap",
    ),
    lie(
        "two tensors in one place are refused",
        gguf_bytes([], [entry("a", (8,), F16), entry("b", (8,))], bytes(64)),
        "overlap",
    ),
    lie("a directory cut off is refused", gguf_bytes([], [entry()])[: 24 + 32], "8 bytes expected, 7 left"),
]


@pytest.mark.parametrize(("content", "message", "error"), HEADERS + KEYS + ARRAYS + ALIGNMENTS + TENSORS)
def test_a_lie_is_refused_and_named(tmp_path: Path, content: bytes, message: str, error: type[Exception]) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message) as caught:
            read_gguf(path)
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "lie.gguf" in str(caught.value)
    assert "byte" in str(caught.value)
    assert allocated < 2 * len(content) + 100_000


def test_the_file_that_the_lies_are_made_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "true.gguf"
    path.write_bytes(gguf_bytes([key("a", UINT32, NUMBER)], [entry()], FLOATS))
    with read_gguf(path) as file:
        assert file.get("a") == 7
        assert file.array("w").tolist() == [0.0] * 8


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_gguf(tmp_path)


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="no regular file"):
        read_gguf(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("name", ["missing.gguf", "n" * 256, "zero\0byte.gguf", "missing/model.gguf"])
def test_what_cannot_be_opened_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be opened"):
        read_gguf(tmp_path / name)


def test_a_file_that_shrinks_after_it_was_opened_is_refused_rather_than_touched(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([], [entry()], FLOATS))
    with read_gguf(path) as file:
        os.truncate(path, 80)
        with pytest.raises(GGUFError, match="had 96 bytes when it was opened and has 80"):
            file.array("w")


# Split models


def part(number: int, count: int = 2, total: int = 2, name: str | None = None, extra: bytes | None = None) -> bytes:
    keys = [
        key("split.no", 2, u16(number)),
        key("split.count", 2, u16(count)),
        key("split.tensors.count", 5, u32(total)),
    ]
    keys += [extra] if extra else []
    return gguf_bytes(keys, [entry(name or f"w{number}")], bytes([number] * 32))


def split(folder: Path, *contents: bytes, count: int | None = None) -> Path:
    paths = [folder / f"m-{i + 1:05}-of-{count or len(contents):05}.gguf" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths[0]


def test_the_parts_of_a_split_model_open_as_one(tmp_path: Path) -> None:
    with read_gguf(split(tmp_path, part(0), part(1))) as file:
        assert list(file.tensors) == ["w0", "w1"]
        assert [file.raw(name)[0, 0] for name in file.tensors] == [0, 1]
        assert [info.part for info in file.tensors.values()] == [0, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_a_split_of_one_part_may_have_any_name(tmp_path: Path, count: int) -> None:
    (tmp_path / "any.gguf").write_bytes(part(0, count, 1))
    assert list(read_gguf(tmp_path / "any.gguf").tensors) == ["w0"]


def test_a_later_part_names_the_first_one(tmp_path: Path) -> None:
    split(tmp_path, part(0), part(1))
    with pytest.raises(GGUFError, match=r"part 2 of 2. Open the first part, m-00001-of-00002.gguf"):
        read_gguf(tmp_path / "m-00002-of-00002.gguf")


def test_a_missing_part_is_an_input_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf cannot be opened"):
        read_gguf(split(tmp_path, part(0), count=2))


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(part(0))
    with pytest.raises(GGUFError, match=r"should end in -00001-of-00002\.gguf"):
        read_gguf(tmp_path / "model.gguf")


def test_more_than_1000_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="one of 1001 parts; at most 1000"):
        read_gguf(split(tmp_path, part(0, 1001), count=1001))


def test_a_split_number_that_is_no_count_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_key("split.count", STRING, text("2")))
    with pytest.raises(GGUFError, match=r"split.count is <STRING '2'>; expected a count"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(("second", "message"), [
    (part(0, name="x"), "does not say that it is part 2 of 2"),
    (part(1, 3), "does not say that it is part 2 of 2"),
    (gguf_bytes([], [entry("w1")], FLOATS), "does not say that it is part 2 of 2"),
    (part(1, name="w0"), "repeats the tensor w0"),
    (part(1, total=3), "disagree about split.tensors.count"),
    (part(1, extra=key("a", FLOAT32, NUMBER)), "disagree about a"),
])  # fmt: skip
def test_parts_that_contradict_each_other_are_refused(tmp_path: Path, second: bytes, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read_gguf(split(tmp_path, part(0), second))


def test_parts_with_another_number_of_tensors_than_announced_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"hold 2 tensors; split.tensors.count says 3"):
        read_gguf(split(tmp_path, part(0, total=3), part(1, total=3)))


def test_a_part_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(part(1))
    (tmp_path / "model").mkdir()
    first = split(tmp_path / "model", part(0), count=2)
    first.with_name("m-00002-of-00002.gguf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GGUFError, match="leads out of the folder"):
        read_gguf(first)


def test_parts_that_all_link_to_one_other_folder_are_read_as_a_cache_keeps_them(tmp_path: Path) -> None:
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    for i in range(2):
        (tmp_path / "blobs" / f"{i}f").write_bytes(part(i))
        (tmp_path / "snapshot" / f"m-0000{i + 1}-of-00002.gguf").symlink_to(tmp_path / "blobs" / f"{i}f")
    assert len(read_gguf(tmp_path / "snapshot" / "m-00001-of-00002.gguf").tensors) == 2


def test_a_part_that_links_to_itself_is_an_input_error(tmp_path: Path) -> None:
    first = split(tmp_path, part(0), count=2)
    second = first.with_name("m-00002-of-00002.gguf")
    second.symlink_to(second)
    with pytest.raises(InputError, match="cannot be opened"):
        read_gguf(first)
