"""Merged files compute what the model and its adapters do, and nothing is written that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import starscope
import starscope.merge
from starscope.convert import convert
from starscope.errors import OutputExistsError, UnsupportedError, UsageError, VerificationError
from starscope.gguf import read_gguf
from starscope.lora import Pair
from starscope.merge import merge
from support.adapters import make_adapter

IDS = [1, 5, 9, 30, 77, 200, 31, 4]
ULP = 2.0**-23
TARGETS = ["c_attn", "c_proj", "c_fc"]


def logits(model: str | Path, **options: object) -> np.ndarray:
    return starscope.load(model, engine="numpy", **options).engine.forward([IDS], None, "all")[0]


def share(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope="module")
def files(checkpoint, multi_head, tmp_path_factory):
    """By base and type: GGUF files; by base: two adapters."""
    folder = tmp_path_factory.mktemp("merge")
    made = {}
    for name, source in (("tied", checkpoint), ("untied", multi_head)):
        made[name] = source
        for kind in ("f32", "q8_0", "q4_k_m"):
            made[name, kind] = convert(source, folder / f"{name}-{kind}.gguf", to=kind).out
        for seed in (0, 1):
            made[name, seed] = folder / f"{name}-{seed}"
            make_adapter(source, made[name, seed], targets=TARGETS[seed:], seed=seed, r=3 + seed)
    return made


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_a_merged_float_file_computes_what_the_adapters_do(files, base, tmp_path):
    several = [(files[base, 0], 1.0), (files[base, 1], -0.5)]
    report = merge(files[base, "f32"], tmp_path / "out.gguf", lora=several)
    assert share(logits(report.out), logits(files[base, "f32"], lora=several)) <= 64 * ULP
    assert share(logits(report.out), logits(files[base, "f32"])) > 0.01


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("base", ["tied", "untied"])
def test_a_merged_quantized_file_is_the_rounding_away(files, base, kind, tmp_path):
    """As far from the exact one as the formats round, and not further than the base's own file from its original."""
    report = merge(files[base, kind], tmp_path / "out.gguf", lora=files[base, 0])
    wanted = logits(files[base, kind], lora=files[base, 0])
    rounding = share(logits(files[base, kind]), logits(files[base, "f32"]))
    assert 0 < share(logits(report.out), wanted) < 2 * rounding
    with read_gguf(files[base, kind]) as before, read_gguf(report.out) as after:
        assert {n: t.type_name for n, t in before.tensors.items()} == {n: t.type_name for n, t in after.tensors.items()}
        assert np.array_equal(before.raw("token_embd.weight"), after.raw("token_embd.weight"))
        assert before.metadata.keys() == after.metadata.keys()
    assert any("--lora-base" in note for note in report.notes)


def test_running_a_merged_file_is_running_with_lora_base(files, tmp_path):
    """Both are W of the original with the change added, rounded to the file's format."""
    options = {"lora": files["tied", 0], "lora_base": files["tied", "f32"]}
    report = merge(files["tied", "q8_0"], tmp_path / "out.gguf", **options)
    assert np.array_equal(logits(report.out), logits(files["tied", "q8_0"], **options))
    exact = logits(files["tied", "f32"], lora=files["tied", 0])
    assert share(logits(report.out), exact) < share(logits(files["tied", "q8_0"]), logits(files["tied", "f32"])) * 2
    assert not any("--lora-base" in note for note in report.notes)


def test_another_type_may_be_asked_for(files, tmp_path):
    report = merge(files["tied", "f32"], tmp_path / "out.gguf", lora=files["tied", 0], to="q8_0")
    with read_gguf(report.out) as file:
        assert {info.type_name for info in file.tensors.values()} == {"F32", "Q8_0"}
        assert file.get("general.file_type") == 7


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_a_folder_is_merged_as_its_conversion_would_be(files, base, tmp_path):
    merged = merge(files[base], tmp_path / "a.gguf", lora=files[base, 0], to="f32")
    of_file = merge(files[base, "f32"], tmp_path / "b.gguf", lora=files[base, 0])
    assert Path(merged.out).read_bytes() == Path(of_file.out).read_bytes()


@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_adapting_one_of_two_tied_tensors_makes_them_two(checkpoint, files, target, tmp_path):
    make_adapter(checkpoint, tmp_path / "adapter", targets=[target])
    report = merge(files["tied", "f32"], tmp_path / "out.gguf", lora=tmp_path / "adapter")
    with read_gguf(report.out) as file:
        assert "output.weight" in file.tensors
    assert any("two tensors" in note for note in report.notes)
    assert share(logits(report.out), logits(files["tied", "f32"], lora=tmp_path / "adapter")) <= 64 * ULP


def test_the_same_inputs_give_the_same_bytes(files, tmp_path):
    outs = [merge(files["tied", "q8_0"], tmp_path / n, lora=files["tied", 0]).out for n in ("a.gguf", "b.gguf")]
    assert Path(outs[0]).read_bytes() == Path(outs[1]).read_bytes()


def test_a_merge_that_computes_something_else_is_not_written(files, tmp_path, monkeypatch):
    right = starscope.merge.combined

    def wrong(adapters, weights):
        pairs, whole = right(adapters, weights)
        name = "layers.1.mlp.up_proj.weight"
        pairs[name] = Pair(pairs[name].a, pairs[name].b[::-1].copy(), 1.0)
        return pairs, whole

    recorded = starscope.merge.recorded

    def with_the_right_ones(family, hp, weights, pairs, whole, base=None):
        adapters = [(starscope.lora.read_adapter(files["tied", 0], family, hp), 1.0)]
        return recorded(family, hp, weights, *right(adapters, weights), base)

    monkeypatch.setattr(starscope.merge, "combined", wrong)
    monkeypatch.setattr(starscope.merge, "recorded", with_the_right_ones)
    with pytest.raises(VerificationError, match=r"merged weights' logits are .* ulp"):
        merge(files["tied", "f32"], tmp_path / "out.gguf", lora=files["tied", 0])
    assert not list(tmp_path.iterdir())


def test_a_file_whose_bytes_went_wrong_is_not_written(files, tmp_path, monkeypatch):
    chunks = starscope.merge.MergedPiece.chunks

    def broken(piece):
        for chunk in chunks(piece):
            changed = chunk.copy()
            if piece.slot.name == "layers.1.mlp.down_proj.weight":
                changed = changed[::-1].copy()
            yield changed

    monkeypatch.setattr(starscope.merge.MergedPiece, "chunks", broken)
    with pytest.raises(VerificationError, match="the file's logits"):
        merge(files["tied", "f32"], tmp_path / "out.gguf", lora=files["tied", 0])
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_or_an_input_is_refused(files, tmp_path):
    (tmp_path / "there.gguf").write_bytes(b"x")
    with pytest.raises(OutputExistsError):
        merge(files["tied", "f32"], tmp_path / "there.gguf", lora=files["tied", 0])
    with pytest.raises(UsageError, match="input"):
        merge(files["tied", "f32"], files["tied", "f32"], lora=files["tied", 0], force=True)
    with pytest.raises(UsageError, match="no adapter"):
        merge(files["tied", "f32"], tmp_path / "out.gguf", lora=[])


def test_a_format_that_is_not_written_needs_another_type(files, tmp_path, monkeypatch):
    form = starscope.merge.find_format
    monkeypatch.setattr(
        starscope.merge,
        "find_format",
        lambda name: form("Q2_K") if name == "Q8_0" else form(name),
    )
    with pytest.raises(UnsupportedError, match="not written"):
        merge(files["tied", "q8_0"], tmp_path / "out.gguf", lora=files["tied", 0])
