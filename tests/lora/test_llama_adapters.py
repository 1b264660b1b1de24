"""Adapters of LLaMA: three projections instead of a fused one, and query and key rows in GGUF's own order."""

from __future__ import annotations

import numpy as np
import pytest

import starscope
from starscope.convert import convert
from starscope.errors import CheckpointError
from starscope.gguf import read_gguf
from starscope.lora import read_adapter
from starscope.lora.gguf_file import write_gguf_adapter
from starscope.merge import merge
from support.adapters import logits_of, make_adapter
from support.llama_checkpoints import make_llama

IDS = [1, 5, 9, 30, 77, 200, 31, 4]
ULP = 2.0**-23
FORMS = {
    "all-linear": {"targets": "all-linear"},
    "attention": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 3, "use_rslora": True},
    "mlp": {"targets": ["gate_proj", "up_proj", "down_proj"], "rank_pattern": {"gate_proj": 7}},
    "embedding and head": {"targets": ["embed_tokens", "lm_head", "q_proj"]},
}


@pytest.fixture(scope="module", params=[(form, tied) for form in FORMS for tied in (False, True)])
def adapted(request, tmp_path_factory):
    """A folder, its GGUF file, an adapter, and the logits that peft computes."""
    form, tied = request.param
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder / "base", tied=tied)
    model = make_adapter(folder / "base", folder / "adapter", **FORMS[form])
    file = convert(folder / "base", folder / "base.gguf", to="f32").out
    return folder / "base", file, folder / "adapter", logits_of(model, IDS)


def share(found, wanted):
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def logits(path, engine="numpy", **options):
    return starscope.load(path, engine=engine, **options).engine.forward([IDS], None, "all")[0]


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_an_adapted_llama_computes_what_peft_does(adapted, engine):
    folder, file, adapter, wanted = adapted
    assert share(logits(folder, engine, lora=adapter), wanted) <= 64 * ULP
    assert share(logits(file, engine, lora=adapter), wanted) <= 64 * ULP
    assert share(logits(file, engine), wanted) > 1e-3


def test_the_native_engine_runs_it_as_it_runs_the_model(adapted):
    _, file, adapter, wanted = adapted
    try:
        usual = share(logits(file, "native"), logits(file))
    except starscope.errors.UnsupportedError as error:
        pytest.skip(error.message)
    assert share(logits(file, "native", lora=adapter), wanted) <= max(2 * usual, 64 * ULP)


def test_a_gguf_adapter_has_its_query_and_key_rows_in_ggufs_order(adapted, tmp_path):
    folder, file, adapter, wanted = adapted
    model = starscope.load(folder, engine="numpy")
    pairs = read_adapter(adapter, model.family, model.hparams).pairs
    write_gguf_adapter(tmp_path / "a.gguf", model.family, model.hparams, pairs)
    assert share(logits(file, lora=tmp_path / "a.gguf"), wanted) <= 64 * ULP
    name = "layers.0.self_attn.q_proj.weight"
    if name in pairs:
        with read_gguf(tmp_path / "a.gguf") as stored:
            b = stored.array("blk.0.attn_q.weight.lora_b")
        dim = model.head_dim  # the two halves of a head's rows lie in turns there
        halves = pairs[name].b.reshape(model.num_heads, 2, dim // 2, -1)
        assert np.allclose(b, halves.swapaxes(1, 2).reshape(b.shape) * (b.std() / pairs[name].b.std()), rtol=1e-4)


def test_a_merged_llama_computes_what_its_adapter_did(adapted, tmp_path):
    folder, file, adapter, wanted = adapted
    for source in (folder, file):
        report = merge(source, tmp_path / "out.gguf", lora=adapter, to="f32", force=True)
        assert share(logits(report.out), wanted) <= 64 * ULP


def test_what_no_adapter_changes_is_copied_in_its_order(tmp_path):
    make_llama(tmp_path / "base", hidden=64)
    file = convert(tmp_path / "base", tmp_path / "base.gguf", to="q8_0").out
    make_adapter(tmp_path / "base", tmp_path / "adapter", targets=["up_proj"])
    report = merge(file, tmp_path / "out.gguf", lora=tmp_path / "adapter")
    with read_gguf(file) as before, read_gguf(report.out) as after:
        changed = {n for n in before.tensors if not np.array_equal(before.raw(n), after.raw(n))}
    assert changed == {"blk.0.ffn_up.weight", "blk.1.ffn_up.weight"}


def test_an_adapter_of_the_other_family_is_refused_by_name(checkpoint, tmp_path):
    make_llama(tmp_path / "llama")
    make_adapter(tmp_path / "llama", tmp_path / "adapter", targets=["q_proj"])
    with pytest.raises(CheckpointError, match=r"no part of gpt_bigcode.*q_proj"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path / "adapter")
    model = starscope.load(tmp_path / "llama", engine="numpy")
    pairs = read_adapter(tmp_path / "adapter", model.family, model.hparams).pairs
    write_gguf_adapter(tmp_path / "a.gguf", model.family, model.hparams, pairs)
    with pytest.raises(CheckpointError, match="is for 'llama'; the model is 'starcoder'"):
        starscope.load(checkpoint, engine="numpy", lora=tmp_path / "a.gguf")
