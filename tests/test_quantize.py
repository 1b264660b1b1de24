"""Quantizing a GGUF file gives what converting the folder to that format gives, and says what it cannot do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize as reference_quantize

import starscope.convert
import starscope.quantize
from starscope.convert import convert
from starscope.errors import GGUFError, OutputExistsError, UnsupportedError, UsageError
from starscope.family import find_family_of_file, hparams_from_metadata
from starscope.formats import KNOWN_TYPES, Format, encode, find_format
from starscope.gguf import GGUFFile, OutputTensor, Value, ValueType, read_gguf, scalar, string, write_gguf
from starscope.quantize import quantize
from starscope.recipes import RECIPES, choose_formats, find_recipe
from support.checkpoints import gguf_tensors, make_checkpoint

TYPES = [name.lower() for name in RECIPES]
IN_GGUF = [to for to in TYPES if "_k" not in to]  # the gguf package encodes no K format
U16, I32 = ValueType.UINT16, ValueType.INT32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, tied=False, n_inner=256, hidden=256, heads=4)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for to in TYPES:
        convert(folder, folder / f"{to}.gguf", to=to)
    return folder


def write_changed(
    source: Path,
    out: Path,
    *,
    keys: dict[str, Value] | None = None,
    tensors: dict[str, tuple[Format, bytes] | None] | None = None,
    only: set[str] | None = None,
) -> Path:
    """A copy of a file with other keys, with tensors stored otherwise (None: left out), or with some tensors alone."""
    with read_gguf(source) as file:
        outputs = []
        for name, info in file.tensors.items():
            form, data = (info.format, file.raw(name).tobytes())
            if tensors and name in tensors:
                changed = tensors[name]
                if changed is None:
                    continue
                form, data = changed
            if only is None or name in only:
                assert form is not None
                outputs.append(OutputTensor(name, info.shape, form, lambda data=data: [data]))  # type: ignore[misc]
        write_gguf(out, {**file.metadata, **(keys or {})}, outputs)
    return out


@pytest.mark.parametrize("to", TYPES)
def test_an_f32_file_quantized_is_the_folder_converted_byte_for_byte(to: str, folder: Path, tmp_path: Path) -> None:
    report = quantize(folder / "f32.gguf", tmp_path / "out.gguf", to=to)
    assert report.out.read_bytes() == (folder / f"{to}.gguf").read_bytes()
    assert (report.family, report.format, report.notes) == ("gpt_bigcode", to.upper(), [])
    assert report.bytes == report.out.stat().st_size
    assert report.parameters == sum(np.prod(info.shape) for info in read_gguf(report.out).tensors.values())


@pytest.mark.parametrize("to", IN_GGUF)
@pytest.mark.parametrize("source", IN_GGUF)
def test_every_format_becomes_every_other_as_gguf_py_would_have_it(
    source: str, to: str, folder: Path, tmp_path: Path
) -> None:
    with read_gguf(folder / f"{source}.gguf") as before:
        report = quantize(before.path, tmp_path / "out.gguf", to=to.upper())
        after = read_gguf(report.out)
        for name, info in before.tensors.items():
            values = before.array(name)
            if values.ndim == 1 or name == "position_embd.weight":
                kind = GGMLQuantizationType.F32
            else:
                kind = GGMLQuantizationType[to.upper()]
            raw = before.raw(name) if info.type_name == kind.name else reference_quantize(values, kind)
            np.testing.assert_array_equal(after.raw(name).ravel(), raw.view(np.uint8).ravel(), err_msg=name)
            assert after.tensors[name].type_id == kind
    is_again = source not in ("f32", "f16", "bf16") and source != to
    assert [note.split(";")[0] for note in report.notes] == (
        [f"the source is quantized already ({source.upper()})"] if is_again else []
    )


@pytest.mark.parametrize("to", ["q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "Q4_K", "q5_K"])
def test_a_mixture_has_the_formats_of_its_recipe_and_values_near_the_source(
    to: str, folder: Path, tmp_path: Path
) -> None:
    report = quantize(folder / "f32.gguf", tmp_path / "out.gguf", to=to)
    assert report.format == (f"{to}_M" if to in ("Q4_K", "q5_K") else to).upper()
    with read_gguf(report.out) as after, read_gguf(folder / "f32.gguf") as before:
        family = find_family_of_file(before)
        formats, _ = choose_formats(family.slots(hparams_from_metadata(family, before)), find_recipe(to))
        assert {name: info.type_name for name, info in after.tensors.items()} == {n: f.name for n, f in formats.items()}
        assert after.tensors["output.weight"].type_name == "Q6_K"
        for name, info in after.tensors.items():
            values = before.array(name)
            error = {"F32": 0, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.025}[info.type_name]
            reference = reference_dequantize(after.raw(name), GGMLQuantizationType(info.type_id)).reshape(values.shape)
            np.testing.assert_array_equal(after.array(name), reference)
            assert np.std(reference - values) <= error * np.std(values)


def test_the_order_of_tensors_in_the_source_does_not_decide_which_blocks_get_more_bits(
    folder: Path, tmp_path: Path
) -> None:
    with read_gguf(folder / "f16.gguf") as file:
        names = list(file.tensors)[::-1]
        outputs = []
        for name in names:
            info, data = file.tensors[name], file.raw(name).tobytes()
            outputs.append(OutputTensor(name, info.shape, find_format(info.type_name), lambda data=data: [data]))  # type: ignore[misc]
        write_gguf(tmp_path / "reversed.gguf", dict(file.metadata), outputs)
    straight = read_gguf(quantize(folder / "f16.gguf", tmp_path / "straight.gguf", to="q4_k_m").out)
    turned = read_gguf(quantize(tmp_path / "reversed.gguf", tmp_path / "turned.gguf", to="q4_k_m").out)
    assert list(turned.tensors) == names
    for name in names:
        assert turned.tensors[name].type_id == straight.tensors[name].type_id
        np.testing.assert_array_equal(turned.raw(name), straight.raw(name))


def test_every_key_but_those_of_the_format_is_copied(folder: Path, tmp_path: Path) -> None:
    keys = {"custom.numbers": Value(ValueType.ARRAY, I32, 2, b"\1\0\0\0\2\0\0\0"), "general.file_type": string("odd")}
    source = write_changed(folder / "f16.gguf", tmp_path / "in.gguf", keys=keys)
    before = read_gguf(source).metadata
    after = read_gguf(quantize(source, tmp_path / "out.gguf", to="q8_0").out).metadata
    assert list(after) == list(before)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"general.file_type"}
    assert after["general.file_type"].data == 7
    assert after["general.license"].data == "mit"


def test_the_alignment_of_the_source_is_kept(folder: Path, tmp_path: Path) -> None:
    keys = {"general.alignment": scalar(ValueType.UINT32, 256)}
    source = write_changed(folder / "f32.gguf", tmp_path / "in.gguf", keys=keys)
    with read_gguf(quantize(source, tmp_path / "out.gguf", to="q4_0").out) as file:
        assert file.alignment == 256
        assert all(info.offset % 256 == 0 for info in file.tensors.values())


def test_a_file_in_parts_becomes_one(folder: Path, tmp_path: Path) -> None:
    names = list(read_gguf(folder / "f16.gguf").tensors)
    parts = [set(names[:5]), set(names[5:6]), set(names[6:])]
    for i, part in enumerate(parts):
        keys = {
            "split.no": scalar(U16, i),
            "split.count": scalar(U16, len(parts)),
            "split.tensors.count": scalar(I32, len(names)),
        }
        write_changed(folder / "f16.gguf", tmp_path / f"m-{i + 1:05}-of-00003.gguf", keys=keys, only=part)
    first = tmp_path / "m-00001-of-00003.gguf"
    joined = quantize(first, tmp_path / "joined.gguf", to="f16").out
    assert joined.read_bytes() == (folder / "f16.gguf").read_bytes()
    for part_path in tmp_path.glob("m-*.gguf"):
        with pytest.raises(UsageError, match="is an input of this conversion"):
            quantize(first, part_path, to="q8_0", force=True)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K", "IQ4_NL"])
def test_a_format_that_is_only_decoded_becomes_its_values(kind: str, folder: Path, tmp_path: Path) -> None:
    form = find_format(kind)
    shape = read_gguf(folder / "f16.gguf").tensors["blk.0.ffn_up.weight"].shape
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 0x38, form.nbytes(shape), np.uint8)  # no scale of 0x38.. or more is infinite
    source = write_changed(
        folder / "f16.gguf", tmp_path / "in.gguf", tensors={"blk.0.ffn_up.weight": (form, raw.tobytes())}
    )
    report = quantize(source, tmp_path / "out.gguf", to="f32")
    assert report.notes == [f"the source is quantized already ({kind}); converting the original again gives more."]
    expected = reference_dequantize(raw.reshape(shape[0], -1), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(read_gguf(report.out).array("blk.0.ffn_up.weight"), expected)


def test_a_format_that_is_not_decoded_is_named(folder: Path, tmp_path: Path) -> None:
    known = KNOWN_TYPES[16]
    form = Format(known.name, 16, known.block_size, known.block_bytes, lambda raw: raw, None)  # type: ignore[arg-type, return-value]
    data = bytes(form.nbytes((256, 256)))
    source = write_changed(
        folder / "f16.gguf", tmp_path / "in.gguf", tensors={"blk.0.attn_output.weight": (form, data)}
    )
    told: list[int] = []
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_output\.weight is stored as IQ2_XXS"):
        quantize(source, tmp_path / "out.gguf", to="q8_0", progress=lambda done, _: told.append(done))
    assert told == []  # before any tensor was written
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_a_tensor_that_keeps_its_format_keeps_its_bytes(folder: Path, tmp_path: Path) -> None:
    form = find_format("q8_0")
    data = np.random.default_rng(0).integers(0, 0x38, form.nbytes((256, 256)), np.uint8).tobytes()
    tensors = {"blk.1.attn_output.weight": (form, data)}  # not what encoding its own values would give
    source = write_changed(folder / "q8_0.gguf", tmp_path / "in.gguf", tensors=tensors)
    assert quantize(source, tmp_path / "out.gguf", to="q8_0").out.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_with_repeated_heads_keeps_that_form(tied: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, tied=tied)
    source = convert(tmp_path, to="f16", expand_mqa=True).out
    file = read_gguf(quantize(source, tmp_path / "out.gguf", to="f32").out)
    assert file.get("starcoder.attention.head_count_kv") == 4
    expected = gguf_tensors(model)["blk.1.attn_qkv.weight"].astype(np.float16)
    found = file.array("blk.1.attn_qkv.weight")
    np.testing.assert_array_equal(found[:64], expected[:64])
    for head in range(4):
        np.testing.assert_array_equal(found[64 + 16 * head :][:16], expected[64:80])
        np.testing.assert_array_equal(found[128 + 16 * head :][:16], expected[80:96])


def test_rows_that_are_not_whole_blocks_fall_back(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, hidden=48, n_inner=192)
    source = convert(tmp_path, to="f32").out
    report = quantize(source, tmp_path / "out.gguf", to="q4_0")
    assert report.out.read_bytes() == convert(tmp_path, tmp_path / "direct.gguf", to="q4_0").out.read_bytes()
    assert "rows that are not whole blocks of 32 are F16" in report.notes[0]


def test_the_size_of_a_chunk_does_not_show_in_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starscope.quantize, "CHUNK_BYTES", 3000)
    out = quantize(folder / "f32.gguf", tmp_path / "out.gguf", to="q8_0").out
    assert out.read_bytes() == (folder / "q8_0.gguf").read_bytes()


@pytest.mark.parametrize("to", ["f32", "f16"])  # decoded, and handed over as it is
@pytest.mark.parametrize("when", ["between two chunks", "while a chunk is decoded or written"])
def test_a_source_that_becomes_shorter_is_one_error_and_leaves_nothing(
    to: str, when: str, folder: Path, tmp_path: Path
) -> None:
    source = write_changed(folder / "f16.gguf", tmp_path / "in.gguf")
    program = f"""
        import os, sys
        import starscope.quantize as library
        from starscope.errors import GGUFError

        def shorten(*_):
            os.truncate({str(source)!r}, 8192)

        if {when!r} != "between two chunks":
            make = library.StoredPiece.chunks
            def chunks(piece, watch):
                for chunk in make(piece, watch):
                    shorten()
                    yield chunk
            decode = library.decode
            def decode_shortened(form, raw):
                shorten()
                return decode(form, raw)
            library.StoredPiece.chunks, library.decode = chunks, decode_shortened
        library.CHUNK_BYTES = 4096
        try:
            library.quantize({str(source)!r}, {str(tmp_path / "out.gguf")!r}, to={to!r}, progress=shorten)
        except GGUFError as error:
            print(error.exit_status, error.message)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # a mapped page that is gone ends the process by SIGBUS
    assert re.fullmatch(rf"4 {re.escape(str(source))} .*\n", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


# Refusals


def test_the_source_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    source = write_changed(folder / "f16.gguf", tmp_path / "in.gguf")
    before = source.read_bytes()
    (tmp_path / "soft.gguf").symlink_to(source)
    os.link(source, tmp_path / "hard.gguf")
    for out in (source, tmp_path / "soft.gguf", tmp_path / "hard.gguf"):
        with pytest.raises(UsageError, match="is an input of this conversion"):
            quantize(source, out, to="q8_0", force=True)
        with pytest.raises(OutputExistsError):
            quantize(source, out, to="q8_0")
    assert source.read_bytes() == before


BAD_SOURCES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another architecture": (
        {"keys": {"general.architecture": string("llama7")}},
        UnsupportedError,
        "general.architecture is 'llama7'; supported: .*starcoder",
    ),
    "a missing tensor": (
        {"tensors": {"blk.1.ffn_norm.bias": None}},
        GGUFError,
        r"has no tensor blk\.1\.ffn_norm\.bias; gpt_bigcode needs it",
    ),
    "fewer layers than tensors": (
        {"keys": {"starcoder.block_count": scalar(ValueType.UINT32, 1)}},
        GGUFError,
        r"has a tensor that gpt_bigcode does not know: blk\.1\.attn_norm\.weight",
    ),
    "other sizes": (
        {"keys": {"starcoder.feed_forward_length": scalar(ValueType.UINT32, 255)}},
        GGUFError,
        r"blk\.0\.ffn_up\.weight is \[256 256\]; expected \[255 256\]",
    ),
    "no tensors": ({"only": set()}, GGUFError, "has a vocabulary and no tensors"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_source_that_does_not_fit_together_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    changes, error, message = BAD_SOURCES[name]
    source = write_changed(folder / "f16.gguf", tmp_path / "in.gguf", **changes)
    with pytest.raises(error, match=message):
        quantize(source, tmp_path / "out.gguf", to="q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_a_file_without_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    with read_gguf(folder / "f16.gguf") as file:
        keys = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
    write_gguf(tmp_path / "in.gguf", keys, [])
    with pytest.raises(GGUFError, match=r"has no general\.architecture"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", to="q8_0")


@pytest.mark.parametrize("to", ["q3_k", "iq4_nl", "x"])
def test_a_type_that_cannot_be_written_is_refused_with_those_that_can(to: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected one of F32, F16, Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, BF16, Q4_K_S"):
        quantize(folder / "f16.gguf", tmp_path / "out.gguf", to=to)


@pytest.mark.parametrize(("to", "value"), [
    ("q4_0", 6e5), ("q5_0", -1.1e6), ("q4_1", 1e6), ("q5_1", -7e4),
    ("q4_1", np.nan), ("q5_1", np.inf), ("q5_0", np.nan),
    ("q4_k_s", 7e7), ("q5_k_s", -5e6), ("q6_k", -3e8), ("q4_k_m", np.nan), ("q6_k", np.inf),
])  # fmt: skip
def test_a_block_whose_scale_or_minimum_is_beyond_float16_is_refused(
    to: str, value: float, folder: Path, tmp_path: Path
) -> None:
    with read_gguf(folder / "f32.gguf") as file:
        values = file.array("blk.1.ffn_down.weight").copy()
    values[200, 96:128] = value  # a whole block: the range is nothing, the minimum everything
    changed = (find_format("F32"), values.tobytes())
    source = write_changed(folder / "f32.gguf", tmp_path / "in.gguf", tensors={"blk.1.ffn_down.weight": changed})
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_down\.weight holds (values up to|a value that is not)"):
        quantize(source, tmp_path / "out.gguf", to=to)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("stored", "to", "told"), [
    ("f32", "f16", "3 values are"), ("f16", "bf16", "3 values are"), ("bf16", "f32", "3 values are"),
    ("q8_0", "f16", "1 value is"), ("q8_0", "q8_0", "1 value is"), ("q6_k", "f16", "1 value is"),
])  # fmt: skip
def test_values_that_are_not_finite_are_noted(stored: str, to: str, told: str, folder: Path, tmp_path: Path) -> None:
    """Each is kept; of a quantized tensor the scales are looked at."""
    name, form = "blk.1.ffn_down.weight", find_format(stored)
    with read_gguf(folder / f"{stored}.gguf") as file:
        raw = file.raw(name).reshape(-1, form.block_bytes).copy()
    if form.block_size == 1:
        for i, value in enumerate((np.nan, np.inf, -np.inf)):
            raw[700 * i] = encode(form, np.array([value], np.float32))
    else:
        raw[5, slice(*form.halves)] = np.array([np.nan], np.float16).view(np.uint8)
    source = write_changed(folder / f"{stored}.gguf", tmp_path / "in.gguf", tensors={name: (form, raw.tobytes())})
    notes = quantize(source, tmp_path / "out.gguf", to=to).notes
    assert f"{told} not finite (NaN or infinite), the first in {name}; the model cannot be expected to work." in notes


def test_the_number_of_a_file_type_is_llama_cpps(folder: Path) -> None:
    for to in TYPES:
        names = [
            kind.name
            for kind in LlamaFileType
            if kind.value == read_gguf(folder / f"{to}.gguf").get("general.file_type")
        ]
        assert names == [f"{'ALL' if to == 'f32' else 'MOSTLY'}_{to.upper()}"]


def test_a_value_beyond_float16_is_refused(folder: Path, tmp_path: Path) -> None:
    with read_gguf(folder / "f32.gguf") as file:
        values = file.array("blk.1.ffn_down.weight").copy()
    values[200, 100] = 1e6
    changed = (find_format("F32"), values.tobytes())
    source = write_changed(folder / "f32.gguf", tmp_path / "in.gguf", tensors={"blk.1.ffn_down.weight": changed})
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_down\.weight holds values up to 1e\+06"):
        quantize(source, tmp_path / "out.gguf", to="f16")
    assert isinstance(read_gguf(quantize(source, tmp_path / "out.gguf", to="bf16").out), GGUFFile)
