"""Finetuning trains an adapter and nothing else, loses nothing when it is interrupted, and writes what it trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.errors import InvalidContentError, OutputExistsError, UsageError
from starscope.graph import record
from starscope.lora import read_adapter
from starscope.train.adapters import AdapterJob, with_defaults
from starscope.train.new_adapter import choose_targets, new_pairs
from starscope.train.settings import resolve
from support.adapters import load_adapter, logits_of
from support.training import DOCUMENTS, tiny_graph

ULP = 2.0**-23
IDS = [1, 5, 9, 30, 77, 200, 31, 4]


@pytest.fixture
def data(tmp_path):
    for number, text in enumerate(DOCUMENTS * 3):
        path = tmp_path / "text" / f"{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(tmp_path / "text")


def make_job(start, data, out, **changes):
    given = {
        "start": str(start),
        "data": (data,),
        "steps": 6,
        "context_length": 32,
        "batch_size": 4,
        "rank": 4,
        "learning_rate": 1e-2,
        "precision": "float32",
        "sample_tokens": 0,
        "evaluate_every": 3,
        "log_every": 1,
        **changes,
    }
    return AdapterJob(resolve(with_defaults(given)), Path(out))


def run(job, *, resume=False):
    job.check_output(resume=resume)
    job.prepare(resume=resume)
    job.train()
    return job


def losses(out):
    lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_loss_falls_and_the_base_stands_still(checkpoint, data, tmp_path):
    job = make_job(checkpoint, data, tmp_path / "out", steps=40)
    job.prepare()
    before = {name: weight.clone() for name, weight in job.trainer.engine.weights.items()}
    job.train()
    assert np.mean(losses(tmp_path / "out")[-5:]) < np.mean(losses(tmp_path / "out")[:5]) - 0.1
    changed = [n for n, weight in job.trainer.engine.weights.items() if not torch.equal(weight, before[n])]
    assert sorted(changed) == sorted(job.trainer.engine.parameters)
    assert all(".lora_" in name for name in changed)


def test_it_begins_at_the_model_itself(checkpoint, data, tmp_path):
    job = make_job(checkpoint, data, tmp_path / "out")
    job.prepare()
    [found] = job.trainer.engine.forward([IDS], None, "all")
    [wanted] = starscope.load(checkpoint, engine="torch").engine.forward([IDS], None, "all")
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("base", ["checkpoint", "multi_head"])
def test_what_is_written_is_what_was_trained_for_peft_and_for_llama_cpp(base, data, request, tmp_path):
    folder = request.getfixturevalue(base)
    job = run(make_job(folder, data, tmp_path / "out", alpha=10.0, targets=("all-linear", "up_proj:2", "lm_head:3")))
    made = job.finish()
    [wanted] = job.trainer.engine.forward([IDS], None, "all")
    ours = [
        starscope.load(folder, lora=path).engine.forward([IDS], None, "all")[0] for path in (made.folder, made.file)
    ]
    for found in (logits_of(load_adapter(folder, made.folder), IDS), *ours):
        assert np.abs(found - wanted).max() <= 32 * ULP * np.abs(wanted).max()
    config = json.loads((made.folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 10, "")


def test_a_quantized_model_is_finetuned_and_runs_with_its_adapter(checkpoint, data, tmp_path):
    file = convert(checkpoint, tmp_path / "base.gguf", to="q8_0").out
    job = run(make_job(file, data, tmp_path / "out", steps=30))
    made = job.finish(merge=True)
    [wanted] = job.trainer.engine.forward([IDS], None, "all")
    plain, *adapted = (
        starscope.load(path, engine="native", lora=lora).engine.forward([IDS], None, "all")[0]
        for path, lora in ((file, ()), (file, made.file), (made.merged, ()))
    )
    apart = np.abs(plain - wanted).max()
    assert all(np.abs(found - wanted).max() < apart / 4 for found in adapted)


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_interrupted_and_resumed_is_uninterrupted_byte_for_byte(checkpoint, data, stop, tmp_path):
    whole = run(make_job(checkpoint, data, tmp_path / "whole"))
    run(make_job(checkpoint, data, tmp_path / "parts", steps=stop, decay_steps=6))
    parts = run(make_job(checkpoint, data, tmp_path / "parts", decay_steps=6), resume=True)
    made = [job.finish() for job in (whole, parts)]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (made[0].folder / name).read_bytes() == (made[1].folder / name).read_bytes()
    assert made[0].file.read_bytes() == made[1].file.read_bytes()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_it_goes_on_from_the_middle_of_an_accumulation(checkpoint, data, tmp_path):
    whole, parts = (make_job(checkpoint, data, tmp_path / name, accumulation=4) for name in ("whole", "parts"))
    run(whole)
    parts.prepare()
    assert parts.trainer.train_step(lambda: True) is None
    parts.trainer.save()
    again = run(make_job(checkpoint, data, tmp_path / "parts", accumulation=4), resume=True)
    assert whole.finish().file.read_bytes() == again.finish().file.read_bytes()


@pytest.mark.parametrize("change", [{"rank": 5}, {"alpha": 3.0}, {"targets": ("up_proj",)}, "base"])
def test_a_run_goes_on_with_the_same_adapter_and_base_alone(checkpoint, data, change, tmp_path):
    run(make_job(checkpoint, data, tmp_path / "out", steps=1))
    start, changes = checkpoint, change
    if change == "base":
        start, changes = convert(checkpoint, tmp_path / "base.gguf", to="q8_0").out, {}
    with pytest.raises(InvalidContentError, match=r"checkpoint in .* was made with"):
        run(make_job(start, data, tmp_path / "out", **changes), resume=True)


def test_a_folder_that_holds_a_run_is_not_begun_again(checkpoint, data, tmp_path):
    run(make_job(checkpoint, data, tmp_path / "out", steps=1))
    with pytest.raises(OutputExistsError, match="holds a run"):
        make_job(checkpoint, data, tmp_path / "out").check_output(resume=False)


def test_recomputed_activations_give_the_same_bits(checkpoint, data, tmp_path):
    made = [
        run(make_job(checkpoint, data, tmp_path / str(again), recompute=again)).finish().file.read_bytes()
        for again in (False, True)
    ]
    assert made[0] == made[1]


def test_bfloat16_trains_it_too(checkpoint, data, tmp_path):
    job = run(make_job(checkpoint, data, tmp_path / "out", steps=40, precision="bfloat16"))
    assert np.mean(losses(tmp_path / "out")[-5:]) < np.mean(losses(tmp_path / "out")[:5]) - 0.1
    job.finish()


def test_gradients_are_those_of_peft(checkpoint, data, tmp_path):
    """The same adapter, the same batch: each half's gradient, times what alpha / rank makes of it."""
    job = run(make_job(checkpoint, data, tmp_path / "out", alpha=12.0, fim_rate=0.0))
    made, scale = job.finish(), 12.0 / 4
    theirs = load_adapter(checkpoint, made.folder, is_trainable=True)
    ids = torch.tensor([IDS])
    loss = torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    loss.backward()
    job.trainer.parameters.gradients.zero_()
    job.trainer.forward.loss_sum(ids, None).backward()
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    ours = job.trainer.engine.parameters["layers.0.mlp.up_proj.lora_a.weight"].grad.numpy() * scale
    a = wanted["base_model.model.transformer.h.0.mlp.c_fc.lora_A.default.weight"]
    assert np.abs(ours - a).max() <= 256 * ULP * np.abs(a).max()
    b = wanted["base_model.model.transformer.h.0.mlp.c_fc.lora_B.default.weight"]
    ours = job.trainer.engine.parameters["layers.0.mlp.up_proj.lora_b.weight"].grad.numpy()
    assert np.abs(ours - b).max() <= 256 * ULP * np.abs(b).max()


TARGETS = {
    (): {"qkv_proj": 4, "o_proj": 4, "up_proj": 4, "down_proj": 4},
    ("all-linear",): {"qkv_proj": 4, "o_proj": 4, "up_proj": 4, "down_proj": 4},
    ("qkv_proj",): {"qkv_proj": 4},
    ("c_attn:2",): {"qkv_proj": 2},
    ("attn_qkv", "ffn_up:1"): {"qkv_proj": 4, "up_proj": 1},
    ("c_proj",): {"o_proj": 4, "down_proj": 4},
    ("mlp.c_proj",): {"down_proj": 4},
    ("all-linear", "down_proj:8"): {"qkv_proj": 4, "o_proj": 4, "up_proj": 4, "down_proj": 8},
}


@pytest.mark.parametrize("asked", TARGETS)
def test_targets_are_named_as_anybody_names_them(asked):
    found = choose_targets(tiny_graph(), asked, 4)
    of_block = {name.split(".")[-2]: rank for name, rank in found.items() if name.startswith("layers.1.")}
    assert of_block == TARGETS[asked]
    assert len(found) == 2 * len(TARGETS[asked])


def test_one_layer_or_the_head_may_be_named():
    graph = tiny_graph()
    assert choose_targets(graph, ("layers.1.mlp.up_proj",), 4) == {"layers.1.mlp.up_proj.weight": 4}
    assert choose_targets(graph, ("blk.0.ffn_up",), 4) == {"layers.0.mlp.up_proj.weight": 4}
    assert choose_targets(graph, ("lm_head",), 4) == {"lm_head.weight": 4}


@pytest.mark.parametrize(
    "asked", ["q_proj", "embed_tokens", "proj", "", "up_proj:", "up_proj:x", "up_proj:0", "up_proj:33"]
)
def test_a_target_that_is_no_linear_layer_and_a_rank_that_is_none_are_refused(asked):
    with pytest.raises(UsageError, match=r"no linear layer|rank"):
        choose_targets(tiny_graph(), (asked,), 4)


def test_a_new_adapter_is_a_function_of_its_seed_and_changes_nothing():
    graph = tiny_graph()
    ranks = choose_targets(graph, (), 4)
    first, same, other = (new_pairs(graph, ranks, 8.0, seed) for seed in (1, 1, 2))
    name = "layers.0.mlp.up_proj.weight"
    assert np.array_equal(first[name].a, same[name].a)
    assert not np.array_equal(first[name].a, other[name].a)
    assert not first[name].b.any()
    assert first[name].scale == 2.0
    assert graph.weights == record(graph.family, graph.hp).weights


def test_the_memory_is_told_for_the_adapter_alone(checkpoint, data, tmp_path):
    from starscope.train.estimate import estimate
    from starscope.train.job import train_options

    job = make_job(checkpoint, data, tmp_path / "out")
    job.prepare()
    assert list(job.trainer.engine.parameters) == job.new.names
    asked = train_options(job.settings)
    parts, whole = (m.parts for m in (job.new.memory(asked, torch.float32), estimate(job.graph, asked)))
    assert parts["gradients"] == 4 * job.parameters
    assert parts["optimizer"] == pytest.approx(8 * job.parameters, rel=0.01)
    assert parts["parameters"] == whole["parameters"] + 4 * job.parameters


def test_a_written_adapter_is_read_for_the_model_with_all_its_positions(checkpoint, data, tmp_path):
    made = run(make_job(checkpoint, data, tmp_path / "out", steps=1)).finish()
    model = starscope.load(checkpoint, engine="numpy")
    assert read_adapter(made.file, model.family, model.hparams).pairs
