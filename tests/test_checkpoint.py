"""Hugging Face folders: what is read equals what the safetensors library reads, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from starscope.checkpoint import (
    HEADER_LIMIT,
    open_checkpoint,
    parse_front_matter,
    read_safetensors,
)
from starscope.errors import CheckpointError, InputError, UnsupportedError
from support.checkpoints import PAIRWISE, Setting, make_checkpoint
from support.users import ordinary_user, reachable_folder


def write_safetensors(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file that may lie: `header` is JSON data, or the header's very bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, shards=2)
    return tmp_path


# Reading


@pytest.mark.parametrize("setting", PAIRWISE, ids=str)
def test_every_tensor_of_a_folder_reads_as_transformers_wrote_it(setting: Setting, tmp_path: Path) -> None:
    state = make_checkpoint(tmp_path, **setting.options()).state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(state) - ({"lm_head.weight"} if setting.tied else set())
        for name, tensor in checkpoint.tensors.items():
            assert tensor.dtype == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[setting.dtype]
            np.testing.assert_array_equal(tensor.read(), state[name].float().numpy())
    assert checkpoint.config["n_embd"] == 64
    assert checkpoint.generation_config is not None


@given(
    tensors=st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
        ),
        max_size=5,
    )
)
def test_what_the_safetensors_library_writes_is_read_the_same(
    tensors: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    save_file({name: torch.randn(shape).to(dtype) for name, (shape, dtype) in tensors.items()}, path)
    expected = load_file(path)
    found = read_safetensors(path)
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape)
        np.testing.assert_array_equal(tensor.read(), expected[name].float().numpy())


def test_rows_are_read_alone_and_into_a_buffer(tmp_path: Path) -> None:
    values = torch.randn(7, 3)
    save_file({"a": torch.zeros(5), "w": values}, tmp_path / "m.safetensors")
    tensor = read_safetensors(tmp_path / "m.safetensors")["w"]
    np.testing.assert_array_equal(tensor.read_rows(2, 5), values[2:5].numpy())
    buffer = np.zeros(100, np.uint8)
    raw = tensor.read_raw_rows(6, 7, buffer)
    assert np.shares_memory(raw, buffer)
    assert raw.tobytes() == values[6:7].numpy().tobytes()
    with pytest.raises(IndexError, match="rows 5 to 8 of w, which has 7"):
        tensor.read_rows(5, 8)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.randn(8, 8)}, tmp_path / "m.safetensors")
    tensor = read_safetensors(tmp_path / "m.safetensors")["w"]
    os.truncate(tmp_path / "m.safetensors", tensor.offset + 100)
    with pytest.raises(CheckpointError, match=r"ends at byte \d+; expected 156 bytes more"):
        tensor.read()


def test_weights_can_be_left_unopened(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert open_checkpoint(folder, weights=False).tensors == {}


def test_one_file_comes_before_an_index_as_in_transformers(folder: Path) -> None:
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == {"w"}


# safetensors files that are wrong

BAD_FILES: dict[str, tuple[Any, bytes, str]] = {
    "an array": (b"[]", b"", r"starts with b'\[\]'; expected '\{'"),
    "no JSON": (b"{x", b"", "is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "is not valid JSON"),
    "nested without end": (b'{"a":' * 200_000, b"", "is not valid JSON"),
    "a name twice": (
        b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        bytes(4),
        "says 'a' twice",
    ),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not a table of strings"),
    "an entry that is no object": ({"a": 3}, b"", "a has int; expected dtype, shape and data_offsets"),
    "a missing field": ({"a": {"dtype": "F32", "shape": []}}, b"", "a has dtype, shape; expected"),
    "another field": ({"a": {**entry([], 0, 4), "x": 1}}, bytes(4), "a has dtype, shape, data_offsets, x; expected"),
    "an unknown dtype": ({"a": entry([], 0, 4, "F31")}, bytes(4), "a has dtype 'F31'; expected one of"),
    "a negative size": ({"a": entry([-1], 0, 4)}, bytes(4), r"a has shape \[-1\]; expected a list of sizes"),
    "a size that is true": ({"a": {**entry([], 0, 4), "shape": [True]}}, bytes(4), "expected a list of sizes"),
    "a size beyond 63 bits": ({"a": entry([1 << 63, 0], 0, 0)}, b"", "expected a list of sizes"),
    "sizes whose product wraps": ({"a": entry([1 << 62, 16], 0, 0)}, b"", "a has 0 bytes; expected 2.9"),
    "offsets turned over": ({"a": entry([], 4, 0)}, bytes(4), "expected where its bytes begin and end"),
    "one offset": ({"a": {**entry([], 0, 4), "data_offsets": [0]}}, bytes(4), "expected where its bytes begin and end"),
    "too few bytes": ({"a": entry([2], 0, 4)}, bytes(4), r"a has 4 bytes; expected 8 for F32 \[2\]"),
    "an overlap": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), "b starts at byte .* overlaps"),
    "a hole": ({"a": entry([], 0, 4), "b": entry([], 8, 12)}, bytes(12), "b starts at byte .* leaves a hole"),
    "a hole at the start": ({"a": entry([], 4, 8)}, bytes(8), "a starts at byte .* leaves a hole"),
    "bytes after the last tensor": ({"a": entry([], 0, 4)}, bytes(5), "expected .*, where its last tensor ends"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_safetensors_file_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    header, data, message = BAD_FILES[name]
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(write_safetensors(tmp_path / "m.safetensors", header, data))


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", b"{}", length=HEADER_LIMIT + 1)
    with pytest.raises(CheckpointError, match=f"has {HEADER_LIMIT + 1} bytes; expected at most {HEADER_LIMIT}"):
        read_safetensors(path)


def test_a_file_cut_anywhere_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.randn(2, 3), "b": torch.randn(4)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        message = rf"has {size} bytes; .* at least 8|cut: expected \d+ bytes.* found {size}"
        with pytest.raises(CheckpointError, match=message):
            read_safetensors(path)


@given(data=st.data())
def test_a_header_with_a_changed_byte_is_read_or_refused_in_words(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "m.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16)}, path)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError, UnsupportedError):
        for tensor in read_safetensors(path).values():
            assert tensor.read().shape == tensor.shape


def test_a_type_that_weights_are_not_stored_in_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.int64)}, tmp_path / "m.safetensors")
    tensor = read_safetensors(tmp_path / "m.safetensors")["w"]
    with pytest.raises(UnsupportedError, match="w is stored as I64; supported: F32, F16, BF16"):
        tensor.read()


# Folders that are wrong


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such does not exist\. Expected the folder"):
        open_checkpoint(tmp_path / "no-such")


def test_a_file_in_place_of_a_folder_is_told_apart_by_what_it_is(folder: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is a file\. .*name the one that holds it"):
        open_checkpoint(folder / "config.json")
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(InputError, match=r"is a GGUF file; .* use starscope quantize"):
        open_checkpoint(folder / "model.gguf")


def test_a_folder_without_config_says_what_it_is_instead(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json\. Expected the folder of a Hugging Face model"):
        open_checkpoint(folder)
    (folder / "a.gguf").touch()
    with pytest.raises(InputError, match=r"has no config\.json\. It holds a\.gguf, which is converted already"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[]", "is a JSON list; expected an object"), ('{"a": 1, "a": 2}', "says 'a' twice")],
)
def test_a_config_that_is_no_json_object_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_folder_without_weights_says_what_was_expected(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(InputError, match=r"has no weights; expected model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "training_args.bin", "x.pt"])
def test_other_kinds_of_weights_are_named_with_the_way_out(name: str, folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    (folder / name).touch()
    with pytest.raises(UnsupportedError, match=r"no model\.safetensors or pytorch_model\.bin.*safe_serialization=True"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_says_what_it_is(name: str, folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match=f"{name} is a Git LFS pointer, not the file itself"):
        open_checkpoint(folder)


def test_a_missing_shard_is_named_with_how_many_are_there(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    expected = f"has {len(shards) - 1} of {len(shards)} shards; missing: {shards[1].name}"
    with pytest.raises(InputError, match=expected):
        open_checkpoint(folder)


def test_shards_without_their_index_are_not_guessed_at(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"has 3 shards and no model\.safetensors\.index\.json"):
        open_checkpoint(folder)


def edit_index(folder: Path, name: str, shard: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/passwd", "a\\b", "", "..", 3])
def test_a_shard_that_is_not_a_plain_name_is_refused(shard: Any, folder: Path) -> None:
    edit_index(folder, "transformer.wte.weight", shard)
    with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight is in .*; expected the plain name"):
        open_checkpoint(folder)


def test_an_index_and_its_shards_have_to_agree(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, *_, last = sorted(set(index.values()))
    edit_index(folder, "extra.weight", first)
    with pytest.raises(CheckpointError, match=f"{first} has no extra.weight, which .* says is there"):
        open_checkpoint(folder)
    edit_index(folder, "extra.weight", last)
    moved = next(name for name, shard in index.items() if shard == first)
    save_file({"extra.weight": torch.zeros(1), **load_file(folder / last)}, folder / last)
    (folder / "other.safetensors").write_bytes((folder / first).read_bytes())
    edit_index(folder, moved, "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has .*, which model\.safetensors\.index\.json does not list there"):
        open_checkpoint(folder)


def test_an_index_without_a_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(folder)


def test_a_pipe_in_place_of_weights_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(InputError, match="is not a regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_unreadable_file_is_named(name: str) -> None:
    with reachable_folder() as folder:
        make_checkpoint(folder)
        (folder / name).chmod(0)
        with ordinary_user(), pytest.raises(InputError, match=f"{name} cannot be read: Permission denied"):
            open_checkpoint(folder)


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400])
def test_a_folder_that_may_not_be_entered_is_named(mode: int) -> None:
    with reachable_folder() as folder:
        make_checkpoint(folder)
        folder.chmod(mode)
        with ordinary_user(), pytest.raises(InputError, match=f"{folder} cannot be read: Permission denied"):
            open_checkpoint(folder)


@pytest.mark.parametrize(("name", "reason"), [("a\0b", "null byte"), ("n" * 300, "File name too long")])
def test_a_path_that_cannot_be_is_one_sentence(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot be read: .*{reason}"):
        open_checkpoint(tmp_path / name)


# The model card


def test_the_front_matter_gives_its_one_line_values() -> None:
    card = """---
license: bigcode-openrail-m   # a comment
license_name: "Open RAIL: M"
library: 'transformers'
datasets:
- bigcode/the-stack
tags: [code]
nested:
  key: value
empty:
---
license: not-this
"""
    assert parse_front_matter(card) == {
        "license": "bigcode-openrail-m",
        "license_name": "Open RAIL: M",
        "library": "transformers",
    }


@pytest.mark.parametrize("card", ["", "# Title\nlicense: mit\n", "---\nlicense: mit\n", "--- \nno colon\n---\n"])
def test_a_card_without_front_matter_gives_nothing(card: str) -> None:
    assert parse_front_matter(card) == {}
