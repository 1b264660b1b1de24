"""Every family is trained by the one command: from text, and on from a model that exists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.family import all_families
from starscope.gguf import read_gguf
from starscope.train.checkpoints import CURRENT, read_checkpoint
from starscope.train.job import Job
from starscope.train.plan import make_plan
from starscope.train.settings import Settings, read_settings, resolve
from support.checkpoints import make_checkpoint
from support.llama_checkpoints import make_llama
from support.training import DOCUMENTS

ULP = 2.0**-23
SMALL = {"context_length": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
FREQUENCIES = "rope_freqs.weight"
HEADS = {"llama": 2}  # of keys, where they are not as usual


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.py").write_text(DOCUMENTS[number % 5] + f"# {number}\n", encoding="utf-8")
    return folder


def settings_of(corpus: Path, **given: object) -> Settings:
    asked = {"data": (str(corpus),), "precision": "float32", "held_out": 0.3, "sample_tokens": 4, "batch_size": 4}
    return resolve({**asked, **given})


def run(settings: Settings, out: Path, *, resume: bool = False) -> Job:
    made = Job(settings, out)
    made.check_output(resume=resume)
    made.prepare(resume=resume)
    made.train()
    made.finish()
    return made


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.float().numpy()


def assert_same_logits(out: Path, vocab_size: int = 300) -> None:
    """Of the file here and of the folder in transformers."""
    ids = (np.arange(30) * 7 % vocab_size).tolist()
    ours = np.asarray(starscope.load(out / "model.gguf", engine="numpy").forward(ids))
    assert np.abs(ours - transformers_logits(out / "hf", ids)).max() <= 64 * ULP * np.abs(ours).max()


@pytest.mark.parametrize("family", all_families())
def test_a_model_of_every_family_is_trained_written_and_resumed_with_the_same_bits(corpus, tmp_path, family):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = {**SMALL, "family": family, "num_kv_heads": HEADS.get(family)}
    made = run(settings_of(corpus, steps=4, **asked), whole)
    run(settings_of(corpus, steps=2, **asked), parts)
    run(resolve({"steps": 4}, saved=read_settings(parts)), parts, resume=True)
    for name in ("model.gguf", "hf/model.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert_same_logits(whole)
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    found = {key for line in log for key in line}
    assert {"loss", "bits_per_byte", "samples", "induction", "lens_loss"} <= found
    assert (whole / "report.html").is_file()
    assert made.parameters == make_plan(settings_of(corpus, steps=4, **asked)).parameters
    assert made.graph.family.name == family


def make_start(family: str, folder: Path) -> int:
    """A model with what no setting says: sizes of heads, biases, scaled positions. Returns its vocabulary's size."""
    if family == "llama":
        make_llama(folder, kv_heads=2, scaling="llama3", tied=True, bias=True, head_dim=24, theta=5e5)
        return 320
    make_checkpoint(folder)
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize("family", all_families())
def test_going_on_with_a_model_of_every_family_keeps_what_no_setting_says(corpus, tmp_path, family):
    size = make_start(family, tmp_path / "start")
    convert(tmp_path / "start", tmp_path / "start.gguf", to="f32")
    before = starscope.load(tmp_path / "start.gguf", engine="numpy")
    asked = settings_of(corpus, start=str(tmp_path / "start.gguf"), context_length=32, steps=2)
    made = run(asked, tmp_path / "out")
    after = starscope.load(tmp_path / "out" / "model.gguf", engine="numpy")
    assert after.hparams == before.hparams.replace(context_length=32)
    assert_same_logits(tmp_path / "out", size)
    resumed = run(resolve({"steps": 4}, saved=read_settings(tmp_path / "out")), tmp_path / "out", resume=True)
    assert resumed.graph.hp == made.graph.hp
    run(settings_of(corpus, start=str(tmp_path / "start"), context_length=32, steps=4), tmp_path / "whole")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (tmp_path / "whole" / "model.gguf").read_bytes()


def test_frequencies_of_positions_stand_still_and_are_kept(corpus, tmp_path):
    make_start("llama", tmp_path / "start")
    convert(tmp_path / "start", tmp_path / "start.gguf", to="f32")
    made = Job(settings_of(corpus, start=str(tmp_path / "start.gguf"), context_length=32, steps=2), tmp_path / "out")
    made.prepare()
    weight = made.trainer.engine.weights[FREQUENCIES]
    before = weight.clone()  # type: ignore[union-attr]
    assert before.unique().numel() > 2
    assert FREQUENCIES not in made.trainer.engine.parameters
    assert made.parameters == sum(p.numel() for p in made.trainer.engine.parameters.values())
    made.train()
    made.finish()
    assert weight.grad is None  # type: ignore[union-attr]
    assert torch.equal(before, weight)  # type: ignore[arg-type]
    kinds = [
        name.partition(":")[0] for name in read_checkpoint(tmp_path / "out" / CURRENT).arrays if FREQUENCIES in name
    ]
    assert kinds == ["parameter"]
    with read_gguf(tmp_path / "out" / "model.gguf") as file:
        assert FREQUENCIES in file.tensors
    after = starscope.load(tmp_path / "out" / "model.gguf", engine="numpy")
    assert after.weights[FREQUENCIES].tobytes() == before.numpy().tobytes()
