"""PyTorch files: what is read equals what torch reads, and what does not fit is refused."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPTBigCodeForCausalLM

from starscope.checkpoint import open_checkpoint, read_torch_bin
from starscope.convert import convert
from starscope.errors import CheckpointError, InputError, UnsupportedError
from support.checkpoints import PAIRWISE, Setting, make_checkpoint, store_as_torch
from support.torch_files import ZEROS, call, make_tensor, named, state, storage, text, write_archive

SAFE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


# Reading


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("setting", PAIRWISE[:6], ids=str)
def test_every_tensor_reads_as_transformers_has_it(setting: Setting, shards: int, tmp_path: Path) -> None:
    state = make_checkpoint(tmp_path, **setting.options()).state_dict()
    store_as_torch(tmp_path, state, shards)
    reread = GPTBigCodeForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == list(state) == list(reread)
        for name, tensor in checkpoint.tensors.items():
            assert tensor.dtype == SAFE[setting.dtype]
            np.testing.assert_array_equal(tensor.read(), reread[name].float().numpy())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_conversion_gives_the_same_file_from_either_kind_of_weights(shards: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, multi_query=False, dtype="bfloat16")
    expected = convert(tmp_path, tmp_path / "expected.gguf", to="q8_0").out.read_bytes()
    store_as_torch(tmp_path, model.state_dict(), shards)
    assert convert(tmp_path, to="q8_0", verify=True).out.read_bytes() == expected


def test_safetensors_win_when_both_are_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert {tensor.path.name for tensor in checkpoint.tensors.values()} == {"model.safetensors"}


def test_a_state_dict_with_its_own_attributes_is_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    torch.save(module.state_dict(), tmp_path / "one.bin")  # an OrderedDict with _metadata
    torch.save(dict(module.named_parameters()), tmp_path / "two.bin")  # Parameters
    for name in ("one.bin", "two.bin"):
        found = read_torch_bin(tmp_path / name)
        np.testing.assert_array_equal(found["weight"].read(), module.weight.detach().numpy())
        np.testing.assert_array_equal(found["bias"].read(), module.bias.detach().numpy())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_can_write_is_read(protocol: int, tmp_path: Path) -> None:
    state = {f"layers.{i}": torch.full((2, 3), float(i)) for i in range(300)}
    torch.save(state, tmp_path / "m.bin", pickle_protocol=protocol)
    for name, tensor in read_torch_bin(tmp_path / "m.bin").items():
        np.testing.assert_array_equal(tensor.read(), state[name].numpy())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "columns": lambda x: x[:, 1:3],
    "rows": lambda x: x[2:5],
    "turned columns": lambda x: x.T[1:3],
    "every other row": lambda x: x[::2],
    "one row": lambda x: x[3],
    "cube": lambda x: x.reshape(-1, 2, 2),
    "scalar": lambda x: x[1, 2],
    "nothing": lambda x: x[:0],
}


@given(
    sizes=st.tuples(st.integers(6, 9), st.sampled_from([4, 8])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    chosen=st.lists(st.sampled_from(list(VIEWS)), min_size=1, max_size=5),
)
def test_views_of_one_storage_read_as_torch_reads_them(
    sizes: tuple[int, int], dtype: torch.dtype, chosen: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "m.bin"
    base = torch.randn(sizes).to(dtype)
    torch.save({f"{i} {name}": VIEWS[name](base) for i, name in enumerate(chosen)}, path)
    expected = torch.load(path, weights_only=True)
    found = read_torch_bin(path)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape)
        np.testing.assert_array_equal(tensor.read(), expected[name].float().numpy(), err_msg=name)
        for start in range(tensor.num_rows):
            part = tensor.read_rows(start, min(start + 2, tensor.num_rows))
            whole = expected[name].float().numpy().reshape(tensor.num_rows, -1) if tensor.num_rows else part
            np.testing.assert_array_equal(part.reshape(len(part), -1), whole[start : start + 2])


def test_tensors_that_share_a_storage_are_one_stretch_of_the_file(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    assert "lm_head.weight" in model.state_dict()
    store_as_torch(tmp_path, model.state_dict())
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["lm_head.weight"].offset == checkpoint.tensors["transformer.wte.weight"].offset
    assert convert(tmp_path).notes == []


def test_masks_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    torch.save({"mask": torch.ones(2, 2, dtype=torch.bool), "step": torch.tensor(3)}, tmp_path / "m.bin")
    found = read_torch_bin(tmp_path / "m.bin")
    assert (found["mask"].dtype, found["step"].dtype) == ("BOOL", "I64")
    with pytest.raises(UnsupportedError, match="step is stored as I64; supported: F32, F16, BF16"):
        found["step"].read()


def test_a_pickle_assembled_by_hand_is_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()), {**ZEROS, "version": b"3\n"})
    np.testing.assert_array_equal(read_torch_bin(path)["w"].read(), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(torch.load(path, weights_only=True)["w"].numpy(), np.arange(6).reshape(2, 3))


# Files that are wrong

BAD_STATES: dict[str, tuple[bytes, str]] = {
    "a list": (b"\x80\x02].", "holds a list; expected a dict of tensors.*Save only the model"),
    "a training checkpoint": (state(model=state(w=make_tensor())[2:-1]), "'model' is a dict; expected only tensors"),
    "a number": (state(w=make_tensor(), step=b"K\x03"), "'step' is a int; expected only tensors"),
    "a name that is a number": (b"\x80\x02}(K\x01" + make_tensor() + b"u.", "has a int for a name; expected text"),
    "a name twice": (b"\x80\x02}(" + 2 * (text("w") + make_tensor()) + b"u.", "names 'w' twice"),
    "a newer kind of tensor": (
        state(w=call(named("torch._utils", "_rebuild_tensor_v3"), storage())),
        "asks for 'torch._utils._rebuild_tensor_v3'",
    ),
    "a negated view": (
        state(w=make_tensor(None, 0, (2, 3), (3, 1), b"}" + text("neg") + b"\x88s")),
        "a tensor with flags",
    ),
    "a storage that is not there": (
        state(w=make_tensor(storage(key="1"))),
        "w is in storage '1', which the file does not",
    ),
    "a storage elsewhere": (
        state(w=make_tensor(storage(key="../data.pkl"))),
        r"w is in storage '\.\./data\.pkl', which",
    ),
    "a storage of another size": (
        state(w=make_tensor(storage(size=7))),
        "a storage of 24 bytes; expected 28 for 7 of F32",
    ),
    "a storage of another type": (state(w=make_tensor(storage("HalfStorage"))), "24 bytes; expected 12 for 6 of F16"),
    "a tensor larger than its storage": (
        state(w=make_tensor(shape=(3, 3))),
        "w reaches to element 9 of a storage of 6",
    ),
    "a tensor that begins too late": (state(w=make_tensor(offset=1)), "w reaches to element 7 of a storage of 6"),
    "sizes whose product wraps": (state(w=make_tensor(shape=(1 << 62, 4), strides=(4, 1))), "reaches to element"),
    "a size beyond 63 bits": (state(w=make_tensor(shape=(1 << 63, 0), strides=(0, 0))), "does not take"),
    "one row many times": (
        state(w=make_tensor(strides=(0, 1))),
        r"w of shape \[2, 3\] is stored with strides \[0, 1\]",
    ),
    "overlapping rows": (state(w=make_tensor(strides=(1, 1))), r"is stored with strides \[1, 1\]\. .*\.contiguous\(\)"),
    "a cube turned over": (
        state(w=make_tensor(shape=(1, 2, 3), strides=(1, 1, 2))),
        r"is stored with strides \[1, 1, 2\]",
    ),
    "every other element": (state(w=make_tensor(shape=(3,), strides=(2,))), r"is stored with strides \[2\]"),
    "a pickle without its end": (state(w=make_tensor())[:-1], "ends or empties its stack too early"),
    "no pickle": (b"", "ends or empties its stack too early"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    pickled, message = BAD_STATES[case]
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read_torch_bin(write_archive(tmp_path / "m.bin", pickled))


BAD_ENTRIES: dict[str, tuple[dict[str, bytes], str]] = {
    "big-endian": ({"byteorder": b"big"}, "has byte order b'big'; supported: b'little'"),
    "an order that is none": ({"byteorder": b"x" * 17}, "has an entry of 17 bytes; expected at most 16"),
    "TorchScript": ({"constants.pkl": b""}, "is a TorchScript program"),
    "an entry above": ({"../evil": b""}, r"has an entry '\.\./evil'; expected names inside one folder"),
    "an entry above by way of the folder": ({"data/../../evil": b""}, "expected names inside one folder"),
    "an entry at the root": ({"/etc/evil": b""}, "has an entry '/etc/evil'"),
    "an entry with a backslash": ({"data\\evil": b""}, "expected names inside one folder"),
    "an entry with an empty part": ({"data//evil": b""}, "expected names inside one folder"),
    "an entry that cannot be shown": ({"\x1b[2J": b""}, r"has an entry 'm/\\x1b\[2J'"),
    "another folder": ({"other/data/1": b""}, "has no data.pkl in the one folder of its archive"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_an_archive_with_a_wrong_entry_is_refused(case: str, tmp_path: Path) -> None:
    entries, message = BAD_ENTRIES[case]
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read_torch_bin(write_archive(tmp_path / "m.bin", state(w=make_tensor()), {**ZEROS, **entries}))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries_are_refused(method: int, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()), method=method)
    with pytest.raises(UnsupportedError, match=r"m/data\.pkl is compressed"):
        read_torch_bin(path)


def patched(path: Path, at: int, data: bytes) -> Path:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (8, b"\x01", r"m/data\.pkl is encrypted"),
        (10, b"\x08", r"m/data\.pkl is compressed"),
        (20, b"\x01\x00\x00\x00", r"m/data\.pkl is compressed"),
        (20, b"\x00\x00\x00\x7f" * 2, r"m/data/0 begins inside m/data\.pkl"),
        (42, b"\x04\x00\x00\x00", r"m/data\.pkl is not where the list of entries says"),
        (42, b"\x00\x00\x00\x7f", r"m/data\.pkl is not where the list of entries says"),
        (20, b"\xff" * 8, r"m/data\.pkl does not say where it is"),
        (0, b"PK\x01\x03", "has a damaged list of entries"),
        (28, b"\x00\x00", "has a damaged list of entries"),
        (30, b"\xff\xff", "has a damaged list of entries"),
    ],
)
def test_a_list_of_entries_that_lies_is_refused(at: int, data: bytes, message: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()))
    start = path.read_bytes().index(b"PK\x01\x02")
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read_torch_bin(patched(path, start + at, data))


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (10, b"\x03\x00", "lists fewer than the 3 entries"),
        (10, b"\x01\x00", "lists more than the 1 entries"),
        (12, b"\x00\x00\x00\x7f", "says that its list of entries has"),
        (16, b"\x00\x00\x00\x7f", "says that its list of entries has"),
        (16, b"\xff\xff\xff\xff", "does not say where its list of entries is"),
        (0, b"PK\x05\x07", "is cut: it does not end as an archive does"),
    ],
)
def test_an_end_of_the_archive_that_lies_is_refused(at: int, data: bytes, message: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()))
    end = path.read_bytes().index(b"PK\x05\x06")
    with pytest.raises(CheckpointError, match=message):
        read_torch_bin(patched(path, end + at, data))


def test_an_entry_twice_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()), {"data/0": bytes(24), "data/1": bytes(24)})
    path.write_bytes(path.read_bytes().replace(b"m/data/1", b"m/data/0"))
    with pytest.raises(CheckpointError, match="has m/data/0 twice"):
        read_torch_bin(path)


def test_entries_over_one_another_are_refused(tmp_path: Path) -> None:
    inner = write_archive(tmp_path / "inner", b"", {"data/1": bytes(24)}).read_bytes()
    local = inner[inner.rindex(b"PK\x03\x04") : inner.index(b"PK\x01\x02")]
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()), {"data/0": local, "data/1": bytes(24)})
    raw = bytearray(path.read_bytes())
    listed = raw.rindex(b"PK\x01\x02")
    raw[listed + 42 : listed + 46] = struct.pack("<I", raw.index(local))
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="m/data/1 begins inside m/data/0"):
        read_torch_bin(path)


def test_a_large_archive_says_its_sizes_in_zip64_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)  # as if every size and offset were beyond 32 bits
    path = write_archive(tmp_path / "m.bin", state(w=make_tensor()))
    assert b"PK\x06\x06" in path.read_bytes()
    np.testing.assert_array_equal(read_torch_bin(path)["w"].read(), np.arange(6).reshape(2, 3))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    written = path.read_bytes()
    for size in range(0, len(written), 7):
        path.write_bytes(written[:size])
        with pytest.raises(CheckpointError, match=r"is cut|is not a PyTorch file"):
            read_torch_bin(path)


def test_the_older_form_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"form that torch\.save wrote before 1\.6.*safe_serialization=True"):
        read_torch_bin(tmp_path / "m.bin")


def test_a_file_that_is_something_else_says_how_it_starts(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match=r"is not a PyTorch file: it starts with b'<!DO'"):
        read_torch_bin(tmp_path / "m.bin")


def test_a_pickle_over_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starscope.checkpoint.torch_bin.PICKLE_LIMIT", 100)
    with pytest.raises(CheckpointError, match=r"has an entry of \d+ bytes; expected at most 100"):
        read_torch_bin(write_archive(tmp_path / "m.bin", state(w=make_tensor())))


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100, 100).T}, tmp_path / "m.bin")
    found = read_torch_bin(tmp_path / "m.bin")["w"]
    os.truncate(tmp_path / "m.bin", found.offset + 1000)
    with pytest.raises(CheckpointError, match=r"ends at byte \d+; expected \d+ bytes more"):
        found.read()


# Folders


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    store_as_torch(tmp_path, make_checkpoint(tmp_path).state_dict(), shards=3)
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(InputError, match=r"has 2 of 3 shards; missing: pytorch_model-00002-of-00003\.bin"):
        open_checkpoint(tmp_path)


def test_parts_without_their_index_are_not_guessed_at(tmp_path: Path) -> None:
    store_as_torch(tmp_path, make_checkpoint(tmp_path).state_dict(), shards=2)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(InputError, match=r"has 2 shards and no pytorch_model\.bin\.index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_and_its_parts_have_to_agree(tmp_path: Path) -> None:
    store_as_torch(tmp_path, make_checkpoint(tmp_path).state_dict(), shards=2)
    torch.save({"other": torch.zeros(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"00002\.bin has no .*, which pytorch_model\.bin\.index\.json says"):
        open_checkpoint(tmp_path)
